"""As tests/api/test_removal.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_removal import *  # noqa: F403

pytestmark = pytest.mark.server
