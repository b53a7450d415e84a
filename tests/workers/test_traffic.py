"""What a step moves along each axis is what arithmetic says, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.workers import runs
from workers import flops
from workers.data.corpus import Corpus
from workers.engine import Engine
from workers.parallel import mesh
from workers.spec import RunSpec
from workers.traffic import Figure, Traffic

pytestmark = pytest.mark.torch

Axes = dict[str, dict[str, int]]

VOCABULARY = 260  # divisible by every axis, so that nothing is padded
LAYERS, HIDDEN, SEQ = runs.MODEL["layers"], runs.MODEL["hidden"], runs.MODEL["seq_len"]
SIZE = 8  # bytes of a float64
ACTIVATION = SEQ * HIDDEN * SIZE  # of a micro-batch, which has one sample here
EXPERTS = {"count": 4, "top_k": 2, "hidden": 16}

AGREEMENT = Figure(1, 3 * SIZE)
"""Loss, norm and tokens are summed over the world once a step."""


def spec(**changes: Any) -> RunSpec:
    return runs.spec(layout=changes["layout"], model={"vocab_size": VOCABULARY} | changes.get("model", {}))


def counted(store: dist.Store, rank: int, run: RunSpec) -> tuple[Axes, dict[tuple[str, str], Figure], int]:
    """The second step's traffic on this rank: by axis and by operator; and the bytes of its parameters, unsharded."""
    corpus = Corpus(run.data, run.model.seq_len, run.train.seed)
    with mesh.joined(store, rank, run.parallel, "cpu", 60.0) as axes:
        engine = Engine(run, corpus.vocabulary, axes, torch.device("cpu"))
        runs.step_at(engine, corpus, 0)
        with Traffic() as traffic:
            runs.step_at(engine, corpus, run.train.global_batch)
        copies = run.parallel.dp // run.parallel.replicate
        nbytes = sum(shard.nbytes * copies for shard in engine.optimizer.shards)
        return traffic.axes(), traffic.counts, nbytes


def figure(axes: Axes, axis: str) -> Figure:
    found = axes.get(axis, {"collectives": 0, "bytes": 0})
    return Figure(found["collectives"], found["bytes"])


def total(axes: Axes) -> Figure:
    return sum((figure(axes, axis) for axis in axes), Figure())


def micro_batches(run: RunSpec) -> int:
    """Of a replica; they are the same number on each here."""
    return run.train.global_batch // run.parallel.dp


def of_data(parameters: int) -> Figure:
    """At zero 1 parameters are gathered once a step and their gradients reduced once."""
    return Figure(2, 2 * parameters)


def of_tensors(run: RunSpec, stage: int = 0) -> Figure:
    """A sub-layer is entered and left, the embedding left, the head entered: one exchange each in the forward pass and
    one in the backward pass, or, with positions whole, none on entering forward and none on leaving backward. The loss
    takes a maximum and two sums of each token. With positions split the norms' gradients, this
    replica's shards of them, are summed once a step, all at once."""
    layers, first, last = LAYERS // run.parallel.pp, stage == 0, stage == run.parallel.pp - 1
    split = run.parallel.splits_sequence(SEQ)
    exchanges = (4 * layers + first + last) * (2 if split else 1)
    each = Figure(exchanges, exchanges * ACTIVATION) + (Figure(2, 3 * SEQ * SIZE) if last else Figure())
    norms = (2 * layers + last) * HIDDEN * SIZE // run.parallel.dp
    return sum([each] * micro_batches(run), Figure(1, norms) if split else Figure())


def of_stages(run: RunSpec) -> Figure:
    """Each of two stages sends one message a micro-batch: activations forward, or their gradients back; of the
    positions that this rank has."""
    part = ACTIVATION // (run.parallel.tp if run.parallel.splits_sequence(SEQ) else 1)
    return Figure(micro_batches(run), micro_batches(run) * part)


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}],
    ids=lambda layout: "-".join(layout),
)
def test_an_axis_alone_moves_what_arithmetic_says(pool: Pool, layout: dict[str, Any]) -> None:
    """Such an axis has the world's ranks, and may have the world's group."""
    run = spec(layout=layout)
    for axes, _, parameters in pool.run(2, counted, run):
        kinds = {"dp": of_data(parameters), "tp": of_tensors(run), "pp": of_stages(run)}
        assert total(axes) == kinds[next(iter(layout))] + AGREEMENT


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": False}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}],
    ids=lambda layout: "-".join(layout),
)
def test_axes_are_told_apart(pool: Pool, layout: dict[str, Any]) -> None:
    run = spec(layout=layout)
    for rank, (axes, _, parameters) in enumerate(pool.run(4, counted, run)):
        assert figure(axes, "world") == AGREEMENT
        assert figure(axes, "dp") == (of_data(parameters) if run.parallel.dp > 1 else Figure())
        assert figure(axes, "tp") == (
            of_tensors(run, run.parallel.coordinates(rank)[0]) if run.parallel.tp > 1 else Figure()
        )
        assert figure(axes, "pp") == (of_stages(run) if run.parallel.pp > 1 else Figure())


def test_one_gather_and_one_reduction_of_all_parameters(pool: Pool) -> None:
    """The model's parameters, each stage's gathered by each of its two ranks."""
    run = spec(layout={"dp": 2, "pp": 2})
    ranks = pool.run(4, counted, run)
    for kind in ("allgather_base", "reduce_scatter_base"):
        assert all(counts["dp", kind].collectives == 1 for _, counts, _ in ranks)
        moved = sum(counts["dp", kind].nbytes for _, counts, _ in ranks)
        assert moved == 2 * SIZE * flops.parameters(run.model, VOCABULARY)


def test_sharded_parameters_are_gathered_twice_a_micro_batch(pool: Pool) -> None:
    """Zero 3: before the forward and the backward pass of each block, and of what is in none; gradients are reduced
    every micro-batch."""
    run = spec(layout={"dp": 2, "pp": 2, "zero": 3})
    for _, counts, _ in pool.run(4, counted, run):
        parts = LAYERS // 2 + 1
        assert counts["dp", "reduce_scatter_base"].collectives == micro_batches(run) * parts
        assert counts["dp", "allgather_base"].collectives == micro_batches(run) * 2 * parts


def test_hybrid_shards_are_reduced_within_and_then_across_copies(pool: Pool) -> None:
    """Each of 2 copies is cut in 2: gather and reduce over the shards, then sum the half that this rank has."""
    run = spec(layout={"dp": 4, "replicate": 2})
    for axes, _, parameters in pool.run(4, counted, run):
        assert figure(axes, "dp") == of_data(parameters) + Figure(1, parameters // 2)


def test_tokens_travel_to_their_experts_and_back(pool: Pool) -> None:
    """Each layer of each micro-batch says how many rows it sends, sends them and gets them back, and so do their
    gradients; a token has a row for each of its experts, whoever has them."""
    run = spec(layout={"dp": 2, "tp": 2, "ep": 2}, model={"experts": EXPERTS})
    ranks = [figure(axes, "ep") for axes, _, _ in pool.run(4, counted, run)]
    calls = LAYERS * micro_batches(run)
    assert all(one.collectives == 5 * calls for one in ranks)
    rows = LAYERS * run.train.global_batch * SEQ * EXPERTS["top_k"]
    said = len(ranks) * calls * EXPERTS["count"] * SIZE  # int64
    assert sum(one.nbytes for one in ranks) == 4 * rows * HIDDEN * SIZE + said


def plain(store: dist.Store, rank: int) -> dict[tuple[str, str], Figure]:
    """Collectives of every kind in the world's group, a group without an axis, and some outside of the count."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        pair = dist.new_group([0, 1])
        one, two = torch.zeros(4), torch.zeros(8)
        dist.all_reduce(one)
        with Traffic() as traffic:
            dist.barrier()
            dist.broadcast(one, 0)
            dist.all_gather([torch.zeros(4), torch.zeros(4)], one, group=pair)
            gives, gets = ([0, 3], [0, 0]) if rank == 0 else ([0, 1], [3, 1])
            dist.all_to_all_single(torch.zeros(sum(gets)), torch.zeros(sum(gives)), gets, gives)
            (dist.send if rank else dist.recv)(two, 1 - rank)
        dist.all_reduce(one)
        return traffic.counts
    finally:
        dist.destroy_process_group()
        mesh.forget_groups()


def test_every_kind_of_call_is_counted_once(pool: Pool) -> None:
    """An all-to-all by what is given, a message where it is sent, a barrier without bytes, and nothing before or after.
    A group that is no axis's is the other one."""
    first, second = pool.run(2, plain)
    both = {
        ("world", "barrier"): Figure(1, 0),
        ("world", "broadcast"): Figure(1, 16),
        ("other", "allgather"): Figure(1, 32),
    }
    assert first == both | {("world", "alltoall_base"): Figure(1, 12)}
    assert second == both | {("world", "alltoall_base"): Figure(1, 4), ("world", "send"): Figure(1, 32)}


def test_nothing_moves_on_one_rank_but_the_agreement(pool: Pool) -> None:
    [(axes, _, _)] = pool.run(1, counted, spec(layout={}))
    assert total(axes) == AGREEMENT
