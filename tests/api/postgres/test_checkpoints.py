"""As tests/api/test_checkpoints.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_checkpoints import *  # noqa: F403

pytestmark = pytest.mark.server
