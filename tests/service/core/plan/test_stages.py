import pytest

from service.core.plan import stages
from service.core.plan.layout import Layout


@pytest.mark.parametrize(
    ("layout", "layers", "dense", "head", "expected"),
    [
        (Layout(), 5, 5, 0.0, [(5, 0)]),
        (Layout(pp=4), 30, 30, 0.0, [(8, 0), (8, 0), (7, 0), (7, 0)]),  # the engine's own example
        (Layout(pp=2, vpp=2, schedule="interleaved_1f1b"), 6, 6, 0.0, [(3, 0), (3, 0)]),
        (Layout(pp=2, vpp=2, schedule="interleaved_1f1b"), 5, 5, 0.0, [(3, 0), (2, 0)]),
        (Layout(pp=2, vpp=2, schedule="zbv"), 5, 5, 0.0, [(3, 0), (2, 0)]),
        (Layout(pp=2), 6, 1, 0.0, [(1, 2), (0, 3)]),  # one dense layer before those with experts
        (Layout(pp=2, stage_layers=(4, 2)), 6, 6, 0.0, [(4, 0), (2, 0)]),
        (Layout(pp=2, vpp=2, schedule="interleaved_1f1b", stage_layers=(4, 3, 2, 1)), 10, 10, 0.0, [(6, 0), (4, 0)]),
        (Layout(pp=2, vpp=2, schedule="zbv", stage_layers=(4, 3, 2, 1)), 10, 10, 0.0, [(5, 0), (5, 0)]),
        (Layout(pp=2, stage_layers="weighed"), 6, 6, 2.0, [(4, 0), (2, 0)]),
    ],
)
def test_layers_of_ranks(layout, layers, dense, head, expected):
    found = stages.held(layout, layers, dense, head)
    assert [(rank.dense, rank.sparse) for rank in found] == expected
    assert found[0].first


@pytest.mark.parametrize(
    ("layout", "last"),
    [
        (Layout(pp=4), 3),
        (Layout(pp=4, vpp=3, schedule="interleaved_1f1b"), 3),
        (Layout(pp=4, vpp=2, schedule="zbv"), 0),  # a V ends where it began
    ],
)
def test_the_head_is_on_the_last_stage_s_rank(layout, last):
    assert [rank.last for rank in stages.held(layout, 24, 24, 0.0)] == [rank == last for rank in range(4)]
