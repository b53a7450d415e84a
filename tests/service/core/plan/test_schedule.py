import pytest

from service.core.plan import schedule
from service.core.plan.layout import Layout
from service.core.plan.schedule import Times
from workers import bubble
from workers.spec import ParallelLayout

EQUAL = Times(1.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelLayout(),
        ParallelLayout(pp=4),
        ParallelLayout(pp=4, schedule="gpipe"),
        ParallelLayout(pp=4, vpp=2, schedule="interleaved_1f1b"),
        ParallelLayout(pp=4, vpp=2, schedule="interleaved_zb"),
        ParallelLayout(pp=8, vpp=2, schedule="zbv"),
    ],
    ids=lambda parallel: f"{parallel.schedule} {parallel}",
)
def test_equal_ranks_and_passes_wait_as_the_authors_have_it(parallel, count):
    layout = Layout(pp=parallel.pp, vpp=parallel.vpp, schedule=parallel.schedule)
    waiting = schedule.waiting_s(layout, [EQUAL] * parallel.pp, count)
    assert waiting / (waiting + 3 * count) == pytest.approx(bubble.fraction(parallel, count))


def test_the_slowest_rank_sets_the_pace_and_the_others_fill():
    times = [Times(1, 1, 1), Times(2, 2, 2)]
    assert schedule.waiting_s(Layout(pp=2), times, 10) == 3  # one micro-batch on the faster rank


@pytest.mark.parametrize(
    ("layout", "count", "expected"),
    [
        (Layout(), 9, [1]),
        (Layout(pp=4), 9, [4, 3, 2, 1]),
        (Layout(pp=4), 2, [2, 2, 2, 1]),
        (Layout(pp=4, schedule="gpipe"), 9, [9, 9, 9, 9]),
        (Layout(pp=4, vpp=2, schedule="interleaved_1f1b"), 16, [5.5, 4.5, 3.5, 2.5]),  # 2(p-r-1) + (v-1)p + 1 chunks
        (Layout(pp=4, vpp=2, schedule="zbv"), 16, [4, 4, 4, 4]),
        (Layout(pp=4, schedule="zb2"), 16, [7, 5, 3, 1]),
    ],
)
def test_micro_batches_in_flight(layout, count, expected):
    assert [schedule.in_flight(layout, rank, count) for rank in range(layout.pp)] == expected


def test_sends_of_a_step():
    assert schedule.sends(Layout(), 8) == (0, 0)
    assert schedule.sends(Layout(pp=4), 8) == (16, 6)
    assert schedule.sends(Layout(pp=4, vpp=3, schedule="interleaved_1f1b"), 8) == (48, 6)
