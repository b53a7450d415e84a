"""As tests/api/test_streams.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_streams import *  # noqa: F403

pytestmark = pytest.mark.server
