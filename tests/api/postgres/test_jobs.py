"""As tests/api/test_jobs.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_jobs import *  # noqa: F403

pytestmark = pytest.mark.server
