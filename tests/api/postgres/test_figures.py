"""As tests/api/test_figures.py, on PostgreSQL."""

from __future__ import annotations

import pytest

from tests.api.test_figures import *  # noqa: F403

pytestmark = pytest.mark.server
