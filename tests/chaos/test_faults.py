"""Each fault breaks what it says, and undoing it mends that."""

from __future__ import annotations

import errno
import random
import sqlite3
from collections.abc import Callable, Iterator

import psutil
import pytest

from service.contracts.errors import PhalanxError
from service.contracts.status import JobView
from tests.chaos import faults, job
from tests.chaos.fleet import API_PORT, Fleet
from tests.e2e.world import until

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.timeout(600)]

RNG = random.Random(1)


@pytest.fixture(scope="module")
def training(fleet: Fleet) -> Iterator[str]:
    uid = fleet.client.submit(job.spec(1_000_000)).uid
    until(lambda: fleet.client.get(uid).status.progress.step > 3, "steps")
    yield uid
    fleet.client.cancel(uid)
    until(lambda: fleet.client.get(uid).phase.terminal, "end of the job")


def view(fleet: Fleet, uid: str) -> JobView:
    """Once it runs and can be hit."""
    return until(lambda: (now := fleet.client.get(uid)) and faults.KillRank().wants(fleet, now) and now, "running job")


def write(fleet: Fleet) -> str:
    """What writing 64 KiB to storage is answered with."""
    try:
        (fleet.storage / "probe").write_bytes(bytes(65536))
        (fleet.storage / "probe").unlink()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def there(fleet: Fleet) -> str:
    return write(fleet) if (fleet.storage / "kept").exists() else "gone"


def store(fleet: Fleet) -> str:
    with sqlite3.connect(fleet.home / "store.sqlite3", timeout=0.1) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            return str(error)
        connection.rollback()
    return ""


def cut_off(fleet: Fleet) -> list[str]:
    """Hosts from which the API can't be reached."""
    return [host for host in fleet.rack_of if not fleet.answers("head", API_PORT, asked_by=host)]


PLACES: tuple[tuple[str, Callable[[Fleet], str], str], ...] = (
    ("full_disk", write, "ENOSPC"),
    ("storage_read_only", there, "EROFS"),
    ("storage_away", there, "gone"),
    ("store_locked", store, "database is locked"),
)


@pytest.mark.parametrize(("kind", "asked", "answer"), PLACES)
def test_storage_and_store(fleet: Fleet, training: str, kind: str, asked: Callable[[Fleet], str], answer: str) -> None:
    (fleet.storage / "kept").touch()
    now, fault = view(fleet, training), faults.KINDS[kind]()
    assert fault.wants(fleet, now)
    until(lambda: asked(fleet) == "", "sound store and storage")
    fault.strike(fleet, now, RNG)
    try:
        until(lambda: asked(fleet) == answer, answer, 5)
    finally:
        fault.undo(fleet)
    until(lambda: asked(fleet) == "", "sound store and storage")


@pytest.mark.parametrize("kind", ["kill_api", "kill_keeper", "kill_controller", "kill_rank", "memory_lost"])
def test_a_killed_process_is_followed_by_another(fleet: Fleet, training: str, kind: str) -> None:
    now, fault = view(fleet, training), faults.KINDS[kind]()
    assert fault.wants(fleet, now)
    before = {host: set(fleet.net.pids(host)) for host in fleet.net.addresses}
    fault.strike(fleet, now, RNG)
    until(lambda: any(pids - set(fleet.net.pids(host)) for host, pids in before.items()), "end of a process")
    fault.undo(fleet)
    until(lambda: _beyond(fleet, training, now.status.progress.step), "new step")


def test_a_stopped_rank_goes_on(fleet: Fleet, training: str) -> None:
    now, fault = view(fleet, training), faults.StopRank()
    fault.strike(fleet, now, RNG)
    assert fault.hit is not None
    stopped = psutil.Process(fault.hit.pid)
    until(lambda: stopped.status() == psutil.STATUS_STOPPED, "stop")
    fault.undo(fleet)
    until(lambda: _beyond(fleet, training, now.status.progress.step), "new step")


def test_a_cut_is_where_it_is_said_to_be(fleet: Fleet, training: str) -> None:
    now = view(fleet, training)
    assert not cut_off(fleet)
    for fault in (faults.CutHost(), faults.Partition()):
        fault.strike(fleet, now, RNG)
        cut = cut_off(fleet)
        fault.undo(fleet)
        assert cut == list(fleet.racks.get(fault.hit, [fault.hit]))
        until(lambda: not cut_off(fleet), "healed network")
    until(lambda: not fleet.tend() and _beyond(fleet, training, now.status.progress.step), "new step", 180)


def _beyond(fleet: Fleet, uid: str, step: int) -> bool:
    try:
        return fleet.client.get(uid).status.progress.step > step
    except PhalanxError:
        return False
