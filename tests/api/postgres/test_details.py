"""As tests/api/test_details.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_details import *  # noqa: F403

pytestmark = pytest.mark.server
