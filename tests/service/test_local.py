from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import psutil
import pytest

from service import roster
from service.contracts.errors import Conflict
from service.local import LocalFleet


def test_one_fleet_in_a_home(tmp_path: Path) -> None:
    alive = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    (tmp_path / roster.STATE).write_text(json.dumps({"temp": "", "processes": [alive]}))
    before = dict(os.environ)
    with pytest.raises(Conflict, match=r"a fleet runs in .* already") as refused:
        LocalFleet(tmp_path).start()
    assert "phalanx down" in refused.value.hint
    assert dict(os.environ) == before
    assert [path.name for path in tmp_path.iterdir()] == [roster.STATE]


def test_the_token_of_a_fleet_is_private_and_stays(tmp_path: Path) -> None:
    first, second = (LocalFleet(tmp_path).environment()["RAY_AUTH_TOKEN_PATH"] for _ in range(2))
    assert first == second
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600
    assert len(Path(first).read_text()) == 64
