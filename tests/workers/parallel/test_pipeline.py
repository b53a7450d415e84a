"""How layers are cut into stages, and which rank has which."""

from __future__ import annotations

import pytest

from workers.parallel import pipeline
from workers.spec import ParallelLayout

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (30, 4, [8, 8, 7, 7]),
        (5, 4, [2, 1, 1, 1]),
        (4, 4, [1, 1, 1, 1]),
        (8, 1, [8]),
        (32, 8, [4] * 8),
        (7, 3, [3, 2, 2]),
    ],
)
def test_earlier_stages_take_what_does_not_divide(layers: int, stages: int, sizes: list[int]) -> None:
    parts = pipeline.stage_layers(layers, ParallelLayout(pp=stages))
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.parametrize(
    ("pp", "vpp", "stages"),
    [
        (1, 1, [[0]]),
        (4, 1, [[0], [1], [2], [3]]),
        (2, 2, [[0, 2], [1, 3]]),
        (3, 2, [[0, 3], [1, 4], [2, 5]]),
        (2, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_stages_go_round_the_pipeline_ranks(pp: int, vpp: int, stages: list[list[int]]) -> None:
    layout = ParallelLayout(pp=pp, vpp=vpp, schedule="1f1b" if vpp == 1 else "interleaved_1f1b")
    assert [pipeline.stages_of(rank, layout) for rank in range(pp)] == stages


def test_under_zbv_the_second_half_runs_back() -> None:
    layout = ParallelLayout(pp=3, vpp=2, schedule="zbv")
    assert [pipeline.stages_of(rank, layout) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [pipeline.rank_of(stage, layout) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_layers_of_each_stage_may_be_named() -> None:
    weighed = ParallelLayout(pp=4, stage_layers="weighed")
    assert [len(stage) for stage in pipeline.stage_layers(30, weighed, head=2.4)] == [8, 8, 8, 6]
    assert [len(stage) for stage in pipeline.stage_layers(4, weighed, head=9.0)] == [2, 1, 1, 0]
    layout = ParallelLayout(pp=3, stage_layers=(3, 3, 0))
    assert pipeline.stage_layers(6, layout) == [range(3), range(3, 6), range(6, 6)]
