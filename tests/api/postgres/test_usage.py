"""As tests/api/test_usage.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_usage import *  # noqa: F403

pytestmark = pytest.mark.server
