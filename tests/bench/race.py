"""Two trainers in the same processes, step about: this project's engine and the loop in `minimal`. Run in a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.bench import minimal
from workers.engine import Engine
from workers.models.decoder import Decoder, initial
from workers.models.sharding import dimension
from workers.parallel import mesh
from workers.spec import RunSpec

Step = Callable[[], tuple[float, float]]


def run(store: dist.Store, rank: int, spec: RunSpec, rounds: int, warm: int) -> dict[str, Any]:
    """Of each round's step, ours and theirs: seconds, this rank's seconds on a core, and (loss, gradient norm)."""
    generator = torch.Generator().manual_seed(3)
    vocabulary, train = spec.model.vocab_size, spec.train
    whole = torch.randint(vocabulary, (train.global_batch, spec.model.seq_len + 1), generator=generator)
    with mesh.joined(store, rank, spec.parallel, "cpu", 120.0) as axes:
        shape = (spec.parallel.pp, spec.parallel.dp, spec.parallel.tp)
        their_axes = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        engine = Engine(spec, vocabulary, axes, torch.device("cpu"))
        loop = minimal.Loop(spec, vocabulary, their_axes)
        fill(loop.part, spec, their_axes)
        first, count = engine.share(0)
        tokens, targets = whole[first : first + count, :-1].contiguous(), whole[first : first + count, 1:].contiguous()

        def ours() -> tuple[float, float]:
            outcome = engine.step(tokens, targets)
            return outcome.loss, outcome.grad_norm

        def theirs() -> tuple[float, float]:
            return loop.step(tokens, targets)

        found: dict[str, dict[str, list[Any]]] = {
            side: {"seconds": [], "core": [], "outcomes": []} for side in ("ours", "theirs")
        }
        for number in range(-warm, rounds):
            pair = [("ours", ours), ("theirs", theirs)]
            for name, step in pair if number % 2 else reversed(pair):
                seconds, core, outcome = timed(step)
                found[name]["outcomes"].append(outcome)
                if number >= 0:
                    found[name]["seconds"].append(seconds)
                    found[name]["core"].append(core)
        return found


def timed(step: Step) -> tuple[float, float, tuple[float, float]]:
    """Seconds until every rank is done, this rank's on a core, and what the step returned."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    outcome = step()
    core = time.process_time() - worked
    dist.barrier()
    return time.perf_counter() - began, core, outcome


@torch.no_grad()
def fill(part: minimal.Part, spec: RunSpec, axes: DeviceMesh) -> None:
    """The values that the engine starts from, cut the same way, so that both must compute the same losses."""
    size, rank = axes["tp"].size(), axes["tp"].get_local_rank()
    for name, parameter in part.named_parameters():
        logical = logical_name(name)
        dim = dimension(Decoder.SHARDING, logical, "tp")
        local = list(parameter.shape)
        if dim is not None:
            local[dim] *= size
        value = initial(logical, torch.Size(local), spec.model, spec.train.seed)
        value = (value if dim is None else value.chunk(size, dim)[rank]).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            rows = value.chunk(axes["dp"].size())[axes["dp"].get_local_rank()]
            parameter.to_local().copy_(rows)
        else:
            parameter.copy_(value)


def logical_name(name: str) -> str:
    """What the engine calls the parameter of this name."""
    head, _, tail = name.rpartition(".")
    kind = head.rpartition(".")[2]
    group = {"wq": "attention", "wk": "attention", "wv": "attention", "wo": "attention",
             "gate": "ffn", "up": "ffn", "down": "ffn"}.get(kind)  # fmt: skip
    return name if group is None else f"{head.rpartition('.')[0]}.{group}.{kind}.{tail}"
