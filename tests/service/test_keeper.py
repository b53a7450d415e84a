from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service import keeper
from service.keeper import Keeper

pytestmark = pytest.mark.server

STAYS = "import os, time; print('here', os.getpid(), flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STAYS}"
ENDS = "print('here', flush=True); raise SystemExit(3)"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path)
    yield made
    made.stop()


def said(kept: Keeper, name: str) -> int:
    return (kept.logs / f"{name}.log").read_text().count("here")


@pytest.mark.parametrize(("ends", "waits"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (6, 16), (7, 30), (5000, 30)])
def test_each_end_in_a_row_is_waited_for_longer(ends: int, waits: float) -> None:
    assert keeper.wait_s(ends) == waits


def test_a_killed_process_is_started_again(kept: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    told: list[int | None] = []
    kept.restarted = lambda: told.append(kept.pid("one"))
    kept.start("one", "-S", "-c", STAYS)
    kept.start("other", "-S", "-c", STAYS)
    until(lambda: said(kept, "one"))
    kept.keep()
    first, other = kept.pid("one"), kept.pid("other")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: told)
    until(lambda: said(kept, "one") == 2)
    assert told == [kept.pid("one")]
    assert kept.pid("one") != first
    assert kept.pid("other") == other
    assert "one was ended by SIGKILL; it is started again in 0 s" in caplog.text


def test_one_that_always_ends_is_not_started_without_pause(kept: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    kept.start("one", "-S", "-c", ENDS)
    kept.keep()
    until(lambda: "one ended with exit code 3; it is started again in 1 s" in caplog.text)
    assert said(kept, "one") == 2
    assert kept.pid("one") is None


def test_before_it_is_kept_an_end_is_told(kept: Keeper) -> None:
    kept.start("stays", "-S", "-c", STAYS)
    kept.start("ends", "-S", "-c", ENDS)
    until(kept.ended)
    assert kept.ended() == ["ends"]


def test_stop_ends_also_the_stubborn(kept: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "END_S", 0.2)
    for name, code in (("obeys", STAYS), ("stubborn", STUBBORN)):
        kept.start(name, "-S", "-c", code)
        until(lambda name=name: said(kept, name))
    kept.keep()
    pids = [kept.pid("obeys"), kept.pid("stubborn")]
    kept.stop()
    assert not [pid for pid in pids if pid is not None and Path(f"/proc/{pid}").exists()]
    kept.stop()
