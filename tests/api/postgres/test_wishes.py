"""As tests/api/test_wishes.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_wishes import *  # noqa: F403

pytestmark = pytest.mark.server
