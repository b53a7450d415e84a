"""Any layout to any layout, bit for bit. Ranks run one after the other, in a group that sends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from workers.checkpoint import logical, manifest, shards
from workers.checkpoint.logical import Mismatch
from workers.checkpoint.manifest import BadCheckpoint, Incomplete
from workers.checkpoint.shards import Piece, Region
from workers.checkpoint.storage import LocalStorage, Storage

pytestmark = pytest.mark.torch

SLICES = {"rows": 0, "columns": 1, "cube": 2}


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(rank: int, sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh for one rank. Its names are the rank's own: equal meshes share cached coordinates."""
    names = tuple(f"axis{axis}-of-{rank}" for axis in range(len(sizes)))
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Sizes that no mesh below divides; every dtype that training stores."""
    torch.manual_seed(seed)
    return {
        "rows": torch.randn(9, 5),
        "columns": torch.randn(13, 7).to(torch.bfloat16),
        "cube": torch.randn(5, 3, 4, dtype=torch.float64),
        "vector": torch.randn(11).to(torch.float16),
        "few": torch.randint(-9, 9, (2, 3)),
        "mask": torch.rand(6, 4) > 0.5,
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh sizes, and the cuts (mesh axis, dimension) in the order they are made; other axes replicate."""

    mesh: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def placements(self) -> list[Replicate | Shard | _StridedShard]:
        placements: list[Replicate | Shard | _StridedShard] = [Replicate()] * len(self.mesh)
        for number, (axis, dim) in enumerate(self.cuts):
            before = [self.mesh[other] for other, d in self.cuts[:number] if d == dim and other > axis]
            placements[axis] = _StridedShard(dim, split_factor=math.prod(before)) if before else Shard(dim)
        return placements

    def local(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        place = torch.unravel_index(torch.tensor(rank), self.mesh)
        for axis, dim in self.cuts:
            chunks = tensor.chunk(self.mesh[axis], dim)
            at = int(place[axis])
            tensor = chunks[at] if at < len(chunks) else tensor.narrow(dim, 0, 0)
        return tensor.clone()

    def shard(self, state: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The rank's DTensors of a full state. Called inside `as_rank`."""
        mesh, placements = mesh_of(rank, self.mesh), self.placements()
        return {
            name: DTensor.from_local(
                self.local(full, rank),
                mesh,
                placements,
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            for name, full in state.items()
        }


LAYOUTS = {
    "one rank": Layout((1,), ()),
    "replicas": Layout((3,), ()),
    "fsdp": Layout((3,), ((0, 0),)),
    "more ranks than rows": Layout((7,), ((0, 0),)),
    "hsdp": Layout((2, 3), ((1, 0),)),
    "both from the left": Layout((2, 3), ((0, 0), (1, 0))),
    "fsdp over tp, even": Layout((2, 4), ((1, 0), (0, 0))),
    "fsdp over tp, uneven": Layout((4, 2), ((1, 0), (0, 0))),
    "three on one": Layout((2, 2, 2), ((2, 0), (1, 0), (0, 0))),
}
MATRIX_LAYOUTS = LAYOUTS | {
    "tp on columns": Layout((4,), ((0, 1),)),
    "fsdp and tp on columns": Layout((3, 2), ((1, 1), (0, 0))),
    "hsdp and tp on columns": Layout((2, 2, 2), ((2, 1), (1, 0))),
}


def save(storage: Storage, layout: Layout, state: dict[str, torch.Tensor], step: int) -> manifest.Manifest:
    records = []
    for rank in range(layout.world):
        with as_rank(rank, layout.world):
            pieces = logical.pieces(layout.shard(state, rank), SLICES)
        records.append(shards.write(storage, manifest.folder(step, 1, "a"), rank, pieces))
    return assemble(storage, records, step)


def assemble(storage: Storage, records: list[shards.ShardRecord], step: int = 1) -> manifest.Manifest:
    plain = {"job": "j", "layout": {}, "model": {}, "header": {}, "created_at": 0.0}
    made = manifest.assemble(storage, step=step, attempt=1, token="a", records=records, **plain)
    manifest.publish(storage, made)
    return made


def layouts_of(state: dict[str, torch.Tensor]) -> dict[str, Layout]:
    return MATRIX_LAYOUTS if all(tensor.ndim > 1 for tensor in state.values()) else LAYOUTS


def some_state(dims: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in full_state().items() if dims == "any" or t.ndim > 1}


@pytest.fixture(scope="module", params=["any", "matrices"])
def saved(request, tmp_path_factory) -> tuple[Storage, dict[str, torch.Tensor], dict[str, manifest.Manifest]]:
    """One checkpoint in each layout, all of the same state."""
    storage = Storage.open(str(tmp_path_factory.mktemp("saved")))
    state = some_state(request.param)
    made = {name: save(storage, layout, state, n) for n, (name, layout) in enumerate(layouts_of(state).items())}
    return storage, state, made


def test_every_layout_to_every_layout(saved):
    storage, state, made = saved
    layouts = layouts_of(state)
    for into, rank in [(name, rank) for name in made for rank in range(layouts[name].world)]:
        layout = layouts[into]
        with as_rank(rank, layout.world):
            for source, checkpoint in made.items():
                blank = layout.shard({name: torch.zeros_like(full) for name, full in state.items()}, rank)
                logical.load(blank, checkpoint, storage)
                for name, full in state.items():
                    assert torch.equal(blank[name].to_local(), layout.local(full, rank)), (
                        f"{name} from {source} into {into}"
                    )


def test_a_checkpoint_of_many_ranks_is_read_without_a_group(saved):
    storage, state, made = saved
    assert not dist.is_initialized()
    for source, checkpoint in made.items():
        blank = {name: torch.zeros_like(full) for name, full in state.items()}
        logical.load(blank, manifest.load(storage, checkpoint.path), storage)
        assert all(torch.equal(blank[name], full) for name, full in state.items()), source
    manifest.verify(storage, checkpoint.path)


def written(storage: Storage, state: dict[str, torch.Tensor], slices: logical.Slices = SLICES) -> manifest.Manifest:
    pieces = logical.pieces(state, slices)
    return assemble(storage, [shards.write(storage, manifest.folder(1, 1, "a"), 0, pieces)])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("view", ["plain", "transposed", "strided"])
def test_any_memory_order_goes_in_and_out(storage, dim, view):
    views = {"plain": lambda t: t, "transposed": torch.t, "strided": lambda t: t[:, ::2]}
    tensor = views[view](torch.randn(6, 10))
    made = written(storage, {"w": tensor}, {"w": dim})
    blank = views[view](torch.zeros(6, 10))
    logical.load({"w": blank}, made, storage)
    assert torch.equal(blank, tensor)
    data = storage.read(made.shards[0].path)
    assert data == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.permute(2, 1, 0), lambda t: t[:, ::2]])
def test_what_is_stored_turned_is_read_as_well(storage, axes, view):
    """The format lets dimensions be stored in any order, and earlier checkpoints were."""
    tensor = view(torch.randn(6, 10, 4))
    shape = tuple(tensor.shape)
    region = Region("w", shape, "float32", axes, (0, 0, 0), shape)
    piece = Piece(region, lambda: tensor.permute(axes).contiguous().numpy().tobytes())
    made = assemble(storage, [shards.write(storage, manifest.folder(1, 1, "a"), 0, [piece])])
    blank = view(torch.zeros(6, 10, 4))
    logical.load({"w": blank}, made, storage)
    assert torch.equal(blank, tensor)


def test_scalars_empty_tensors_and_parameters(storage):
    state = {"step": torch.tensor(7), "none": torch.zeros(0, 4), "p": torch.nn.Parameter(torch.randn(3))}
    made = written(storage, state)
    blank = {"step": torch.tensor(0), "none": torch.ones(0, 4), "p": torch.nn.Parameter(torch.zeros(3))}
    logical.load(blank, made, storage)
    assert torch.equal(blank["step"], state["step"])
    assert torch.equal(blank["p"], state["p"])


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_a_big_piece_is_read_in_bounded_parts(storage, monkeypatch, limit):
    monkeypatch.setattr(logical, "TASK_BYTES", limit)
    monkeypatch.setattr(logical, "ROWS_BYTES", limit)
    state = some_state("any")
    made = written(storage, state)
    blank = {name: torch.zeros_like(full) for name, full in state.items()}
    logical.load(blank, made, storage)
    assert all(torch.equal(blank[name], full) for name, full in state.items())


class Counted(LocalStorage):
    """Adds up the bytes that are read of shards."""

    total = 0

    def read(self, path, start=None, end=None):
        data = super().read(path, start, end)
        Counted.total += len(data) if path.endswith(".bin") else 0
        return data

    def read_into(self, path: str, start: int, out: memoryview) -> int:
        Counted.total += len(out)
        return super().read_into(path, start, out)


def test_a_tensor_parallel_rank_reads_its_own_rows_only(tmp_path):
    plain = Storage.open(str(tmp_path))
    state = {"w": torch.randn(1024, 4096)}  # 16 MiB, cut along columns
    made = written(plain, state, {"w": 1})
    counted, layout = Counted(plain.fs, plain.root, plain.uri), Layout((4,), ((0, 1),))
    with as_rank(2, 4):
        blank = layout.shard({"w": torch.zeros(1024, 4096)}, 2)
        logical.load(blank, made, counted)
        assert torch.equal(blank["w"].to_local(), state["w"][:, 2048:3072])
    assert Counted.total == 4 << 20


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"w": torch.zeros(4, 3), "v": torch.zeros(1)}, "v is missing"),
        ({"w": torch.zeros(3, 4)}, r"w has shape \(4, 3\), not \(3, 4\)"),
        ({"w": torch.zeros(4, 3, dtype=torch.bfloat16)}, "w is float32, not bfloat16"),
        ({f"x{n}": torch.zeros(1) for n in range(9)}, "x0 is missing.*and 4 more"),
    ],
)
def test_another_state_is_refused_and_named(storage, asked, why):
    made = written(storage, {"w": torch.ones(4, 3)})
    with pytest.raises(Mismatch, match=why):
        logical.load(asked, made, storage)
    assert not any(tensor.any() for tensor in asked.values())


def test_damage_is_found_on_load_and_named(storage):
    made = written(storage, {"w": torch.ones(4, 3), "v": torch.ones(600_000)})
    file = Path(storage.root, made.shards[0].path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"rank-00000.bin: bytes .* \(block 9\) fail their checksum") as caught:
        logical.load({"w": torch.zeros(4, 3), "v": torch.zeros(600_000)}, made, storage)
    assert caught.value.manifest == made.path


def test_a_manifest_with_a_hole_does_not_load(storage):
    made = written(storage, {"w": torch.ones(4, 3)})
    holed = dataclasses.replace(made, tensors={"w": dataclasses.replace(made.tensors["w"], pieces=())})
    with pytest.raises(BadCheckpoint, match="the pieces of w don't cover"):
        logical.load({"w": torch.zeros(4, 3)}, holed, storage)


def test_plain_tensors_on_many_ranks_need_an_owner(storage):
    state = {"norm": torch.ones(4)}
    with as_rank(1, 2):
        with pytest.raises(ValueError, match="norm is a plain tensor on one of 2 ranks"):
            logical.pieces(state, {})
        assert logical.pieces(state, {}, owner=False) == []
        assert len(logical.pieces(state, {}, owner=True)) == 1


def test_a_rank_that_did_not_save_is_missed(storage):
    layout, state = Layout((3,), ((0, 0),)), {"w": torch.randn(9, 2)}
    records = []
    for rank in (0, 2):
        with as_rank(rank, 3):
            pieces = logical.pieces(layout.shard(state, rank), {})
        records.append(shards.write(storage, manifest.folder(1, 1, "a"), rank, pieces))
    with pytest.raises(Incomplete, match="w: 6 of 18 elements are in no shard"):
        assemble(storage, records)


@pytest.mark.parametrize(
    ("placements", "local", "why"),
    [
        ([Partial(), Replicate()], (8, 2), "still has to be reduced"),
        ([_StridedShard(0, split_factor=3), Shard(0)], (2, 2), "no order of cuts gives"),
        ([Shard(0), Shard(0)], (3, 2), "only cuts as torch.chunk makes them"),
    ],
)
def test_what_is_no_box_is_refused(placements, local, why):
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        odd = DTensor.from_local(
            torch.ones(local), mesh, placements, run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
        )
        with pytest.raises(ValueError, match=why):
            logical.pieces({"w": odd}, {})
        with pytest.raises(ValueError, match=why):
            logical._box("w", odd, owner=True)


@pytest.mark.parametrize("rows", [8, 9, 10, 3])
def test_what_fully_shard_makes_of_tensor_parallel_parameters(storage, rows):
    """FSDP2 over TP on one dimension, also where neither divides it: the layout that the trainer runs."""
    weight, bias = torch.randn(rows, 6), torch.randn(6)
    dp, tp = 4, 2
    records = []

    def module(rank: int, weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Module:
        mesh = mesh_of(rank, (dp, tp))
        over_dp, over_tp = (mesh[name] for name in mesh.mesh_dim_names or ())
        local = Layout((tp,), ((0, 0),)).local(weight, rank % tp)
        cut = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(DTensor.from_local(local, over_tp, [Shard(0)], **cut))
        made.bias = torch.nn.Parameter(DTensor.from_local(bias.clone(), over_tp, [Replicate()], run_check=False))
        return fully_shard(made, mesh=over_dp)

    for rank in range(dp * tp):
        with as_rank(rank, dp * tp):
            pieces = logical.pieces(dict(module(rank, weight, bias).named_parameters()), {"weight": 1})
            records.append(shards.write(storage, manifest.folder(1, 1, "a"), rank, pieces))
    made = assemble(storage, records)
    blank = {"weight": torch.zeros(rows, 6), "bias": torch.zeros(6)}
    logical.load(blank, made, storage)
    assert torch.equal(blank["weight"], weight)
    assert torch.equal(blank["bias"], bias)
    for rank in range(dp * tp):
        with as_rank(rank, dp * tp):
            again = dict(module(rank, torch.zeros_like(weight), torch.zeros_like(bias)).named_parameters())
            logical.load(again, made, storage)
            expected = Layout((dp, tp), ((1, 0), (0, 0))).local(weight, rank)
            assert torch.equal(again["weight"].to_local(), expected)
