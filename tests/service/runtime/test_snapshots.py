"""A node's keeper by itself: two generations, the rest goes; and which generations are whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import Fenced
from service.contracts.job import PlacementPolicy
from service.core import peers, placement
from service.core.state import Restored
from service.runtime import courier, recall, shelf, snapshots
from service.runtime.snapshots import Kept, Snapshots
from workers.checkpoint import manifest, shards
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import Storage
from workers.reports import ShardSaved
from workers.spec import ParallelLayout


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots(3, "job", "n0", str(tmp_path), limit=1000)
    yield made
    made.close()


def shard(storage: Storage, step: int, rank: int, attempt: int = 1, token: str = "a") -> ShardSaved:
    """As a rank writes it."""
    region = Region("w", (2, 100), "uint8", (0, 1), (rank, 0), (1, 100))
    piece = Piece(region, lambda: bytes([rank + step]) * 100)
    record = shards.write(storage, manifest.folder(step, attempt, token), rank, [piece])
    return ShardSaved(step, rank, record.index, record.digest, record.nbytes, {"step": step}, 0.001)


def held(keeper: Snapshots) -> list[tuple[int, int]]:
    return sorted((one.record.step, one.record.rank) for one in keeper.kept())


def test_the_newest_two_generations_stay(keeper: Snapshots) -> None:
    for step in (5, 6, 7):
        for rank in (0, 1):
            keeper.hold(2, shard(keeper.storage, step, rank))
    assert held(keeper) == [(6, 0), (6, 1), (7, 0), (7, 1)]
    assert {name.split("/")[1] for name in keeper.storage.names("checkpoints")} == {f"{6:010d}", f"{7:010d}"}


@pytest.mark.parametrize(
    ("begun", "stay"),
    [
        ([(9, 1, "a"), (5, 2, "b"), (6, 2, "b")], [5, 6]),  # a later attempt began further back
        ([(9, 1, "a"), (5, 1, "a+1"), (6, 1, "a+1")], [5, 6]),  # so did a rollback
        ([(9, 1, "a+2"), (10, 1, "a+2"), (9, 1, "a+10")], [9, 10]),
    ],
)
def test_newest_is_what_was_begun_last(keeper: Snapshots, begun: list[tuple[int, int, str]], stay: list[int]) -> None:
    for step, attempt, token in begun:
        keeper.hold(1, shard(keeper.storage, step, 0, attempt, token))
    assert [step for step, _ in held(keeper)] == stay


def test_a_shard_that_is_being_written_is_none_of_the_kept_and_is_not_taken_away(keeper: Snapshots) -> None:
    keeper.hold(2, shard(keeper.storage, 5, 0))
    shard(keeper.storage, 6, 0)
    keeper.hold(2, shard(keeper.storage, 5, 1))
    assert held(keeper) == [(5, 0), (5, 1)]
    assert len(keeper.storage.names("checkpoints")) == 2 * 3 + 2


def test_a_new_attempt_keeps_what_is_whole_and_nothing_else(keeper: Snapshots) -> None:
    for step in (5, 6):
        keeper.hold(2, shard(keeper.storage, step, 0))
    keeper.publish("manifests/x.json", b"old")
    keeper.begin(4, None, [manifest.folder(5, 1, "a")])
    assert held(keeper) == [(5, 0)]
    assert keeper.storage.names("manifests") == []
    with pytest.raises(Fenced, match="another controller leads job job"):
        keeper.begin(3, None, [])


def test_what_comes_from_a_peer_is_ours_once_it_is_all_there(keeper: Snapshots, tmp_path: Path) -> None:
    other = Storage.open(str(tmp_path / "other"))
    record = shard(other, 5, 1)
    data, index = record.index.replace(".json", ".bin"), record.index
    whole = other.read(data)
    files = {name: tmp_path / "other" / name for name in (data, index)}
    note = {"world": 2, **dataclasses.asdict(record)}
    with pytest.raises(OSError, match="No such file"):
        courier.send(keeper.door(), {data: files[data], index: tmp_path / "none"}, note)
    assert held(keeper) == []
    courier.send(keeper.door(), files, note)
    assert held(keeper) == [(5, 1)]
    assert (keeper.read(data, None, None), keeper.size(data), keeper.read(index, 3, 9)) == (
        whole, len(whole), other.read(index)[3:9],
    )  # fmt: skip


def test_a_record_that_was_cut_short_is_none(keeper: Snapshots, tmp_path: Path) -> None:
    keeper.hold(1, shard(keeper.storage, 5, 0))
    (record,) = (tmp_path / "n0" / "job").rglob("*.record")
    record.write_bytes(record.read_bytes()[:20])
    assert held(keeper) == []


def test_memory_is_bounded_for_own_ranks_and_peers_together(keeper: Snapshots) -> None:
    assert keeper.admit(0, 200) == ""
    assert keeper.reserve("n7", 4, 200) == ""
    assert keeper.admit(1, 101) == "snapshots need 0.0 MiB of memory on n0, which gives them 0.0 MiB"
    assert keeper.admit(0, 250) == ""  # the same rank again is no other
    keeper.begin(4, None, [])
    assert keeper.admit(1, 500) == ""


def test_the_limit_is_half_of_what_is_free_where_none_is_given(tmp_path: Path) -> None:
    made = Snapshots(1, "job", "n0", str(tmp_path), limit=0)
    assert made.limit > 1 << 20
    made.close()


def test_what_a_keeper_that_is_gone_has_left_is_cleared(keeper: Snapshots, tmp_path: Path) -> None:
    keeper.hold(1, shard(keeper.storage, 5, 0))
    for name, locked in (("gone", True), ("alive", True), ("fresh", False), ("old", False)):
        left = tmp_path / "n0" / name
        left.mkdir()
        (left / "shard.bin").write_bytes(b"1")
        if locked:
            (left / snapshots.LOCK).touch()
    os.utime(tmp_path / "n0" / "old", (0, 0))
    assert snapshots.clear(str(tmp_path), "n0", {"alive", "job"}) == ["alive", "fresh"]
    assert snapshots.clear(str(tmp_path), "n0", {"alive"}) == ["alive", "fresh", "job"]
    assert sorted(path.name for path in (tmp_path / "n0").iterdir()) == ["alive", "fresh", "job"]
    assert snapshots.clear(str(tmp_path), "n0", {"job"}) == ["fresh"]  # its job ended without coming back here
    assert sorted(path.name for path in (tmp_path / "n0").iterdir()) == ["fresh", "job"]
    assert held(keeper) == [(5, 0)]
    assert snapshots.clear(str(tmp_path), "n1", set()) == []


def test_the_end_leaves_nothing(keeper: Snapshots, tmp_path: Path) -> None:
    keeper.hold(1, shard(keeper.storage, 5, 0))
    keeper.end(3)
    keeper.end(3)
    assert list((tmp_path / "n0").iterdir()) == []


def kept(step: int, ranks: str, node: str = "n0", world: int = 3, attempt: int = 1, token: str = "a") -> list[Kept]:
    folder = manifest.folder(step, attempt, token)
    return [
        Kept(node, world, ShardSaved(step, int(rank), f"{folder}/rank-{int(rank):05d}.json", "d", 8, {}, 0.0))
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("found", "steps"),
    [
        (kept(5, "012"), [5]),
        (kept(5, "01") + kept(5, "2", "n1"), [5]),
        (kept(5, "012") + kept(6, "012") + kept(7, "012"), [7, 6]),
        (kept(5, "012") + kept(6, "02"), [5]),  # one is lost with its peer
        (kept(5, "012") + kept(6, "02") + kept(6, "1", "n1"), [6, 5]),
        (kept(6, "01") + kept(6, "2", attempt=2, token="b"), []),  # of two attempts
        (kept(9, "012") + kept(5, "012", attempt=2, token="b"), [5]),
        (kept(9, "012") + kept(5, "012", token="a+1"), [5]),  # 9 is what a rollback went back from
        (kept(3, "012"), []),  # storage has newer
        (kept(5, "012", world=4), []),
        ([], []),
    ],
)
def test_whole_generations(found: list[Kept], steps: list[int]) -> None:
    assert [parts[0].record.step for _, parts in recall.whole(found, above=4)] == steps


def test_what_a_restore_has_undone_is_not_continued() -> None:
    found = kept(5, "012") + kept(6, "012")
    assert [parts[0].record.step for _, parts in recall.whole(found, 4, Restored(5, 1, until=1))] == [5]
    assert recall.whole(found, 4, Restored(4, 1, until=1)) == []


def test_where_each_shard_is() -> None:
    found = shelf.nodes_of(kept(5, "01", "n0") + kept(5, "1", "n1"))
    folder = manifest.folder(5, 1, "a")
    assert found == {f"{folder}/rank-00000": ("n0",), f"{folder}/rank-00001": ("n0", "n1")}


RACKS = Fleet(tuple(Node(f"id-{name}", name, 2, rack=f"r{name[1]}") for name in ("n00", "n01", "n10", "n11")))


@pytest.mark.parametrize(
    ("lost", "source"),
    [
        ((), "memory"),
        (("n00",), "memory"),
        (("n00", "n01"), "memory"),  # two in one rack: the whole rack
        (("n10", "n11"), "memory"),
        (("n00", "n10"), "memory"),  # two in different racks
        (("n01", "n11"), "memory"),
        (("n00", "n11"), "storage"),  # both copies of some state
        (("n01", "n10"), "storage"),
        (("n00", "n01", "n10"), "storage"),
    ],
)
def test_f18_nodes_that_die_together(lost: tuple[str, ...], source: str) -> None:
    layout = ParallelLayout(dp=2, pp=2, tp=2)
    placed = placement.place(layout, RACKS, frozenset(), PlacementPolicy(), "cpu")
    peer_of = {own.removeprefix("id-"): peer.removeprefix("id-") for own, peer in
               peers.choose(layout, placed, RACKS).items()}  # fmt: skip
    assert peer_of == {"n00": "n11", "n11": "n00", "n01": "n10", "n10": "n01"}
    found = [
        one
        for rank, slot in enumerate(placed.slots)
        for node in (slot.name, peer_of[slot.name])
        if node not in lost
        for one in kept(5, str(rank), node, world=8)
    ]
    assert bool(recall.whole(found, above=4)) == (source == "memory")
