"""What was told of jobs that ended long ago is forgotten; what became of them stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.contracts.errors import Fenced
from service.runtime.retention import DAY_S, Retention
from service.store.jobs import Store
from service.store.records import Changes, JobUpdate, LogChunk, MetricRow

NOW = 1000 * DAY_S


def told(store: Store, folder: Path, uid: str, ended_days: float | None) -> None:
    """A job that ended so many days ago, with an event, a step, a log and a checkpoint."""
    store.submit({"name": uid}, uid, uid=uid, at=1.0, status={"attempt": 1})
    for path in ("logs/1.jsonl", "checkpoints/4/x"):
        file = folder / uid / path
        file.parent.mkdir(parents=True)
        file.write_text("x")
    ended = None if ended_days is None else NOW - ended_days * DAY_S
    update = JobUpdate(uid, "running" if ended is None else "succeeded", "why", {"attempt": 1}, {}, ended)
    changes = Changes(
        jobs=[update],
        metrics=[MetricRow(uid, 1, 1, 1.0, {"loss": 1.0})],
        log_chunks=[LogChunk(uid, 1, "n", "logs/1.jsonl", 1, 1.0)],
    )
    store.commit(1, changes)


def test_only_what_is_old_and_over_is_forgotten(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/store.sqlite3")
    assert store.acquire("test", 600) == 1
    for uid, days in (("old", 40), ("new", 20), ("going", None)):
        told(store, tmp_path, uid, days)
    retention = Retention(store, 1, str(tmp_path), 30)
    assert retention.turn(NOW) == 1
    assert retention.turn(NOW) == 0
    assert (store.events("old", 0), store.metrics("old", 0), store.log_chunks("old", 0)) == ([], [], [])
    assert (store.job("old").reason, store.job("old").status) == ("why", {"attempt": 1})
    assert not (tmp_path / "old/logs").exists()
    assert (tmp_path / "old/checkpoints/4/x").exists()
    for uid in ("new", "going"):
        assert store.events(uid, 0)
        assert (tmp_path / uid / "logs/1.jsonl").exists()
    with pytest.raises(Fenced):
        store.expire(7, "new")
    store.close()


def test_logs_that_can_not_be_removed_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.checkpoint.storage import LocalStorage

    store = Store.open(f"sqlite:///{tmp_path}/store.sqlite3")
    store.acquire("test", 600)
    told(store, tmp_path, "old", 40)
    retention = Retention(store, 1, str(tmp_path), 30)
    with monkeypatch.context() as patch:

        def refuse(self: LocalStorage, path: str) -> None:
            raise PermissionError(path)

        patch.setattr(LocalStorage, "delete", refuse)
        assert retention.turn(NOW) == 0
        assert store.events("old", 0)
    assert retention.turn(NOW) == 1
    store.close()
