"""Progress in closed form equals progress step by step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sim.stretch import Parts, Stall, Stretch

TIMES = st.integers(0, 400)


def walked(stretch: Stretch, until: int) -> tuple[int, int | None, Parts]:
    """The last step completed, the newest multiple of 3 that was saved, the parts: one microsecond at a time."""
    step, held, again, fresh, stalled = stretch.first, None, 0, 0, 0
    working, left = True, stretch.step_us
    for _ in range(stretch.begun, until):
        left -= 1
        if working:
            again, fresh = (again + 1, fresh) if step + 1 <= stretch.high else (again, fresh + 1)
        else:
            stalled += 1
        if left:
            continue
        if working:
            step, working = step + 1, False
            left = sum(stall.us for stall in stretch.stalls if stall.every and step % stall.every == 0)
            if left:
                continue
        if step % 3 == 0:
            held = step
        working, left = True, stretch.step_us
    return step, held, Parts(again, fresh, stalled)


STRETCHES = st.builds(
    Stretch,
    first=st.integers(0, 9),
    begun=st.integers(0, 20),
    high=st.integers(0, 20),
    step_us=st.integers(1, 12),
    stalls=st.tuples(
        st.builds(Stall, st.integers(0, 4), st.integers(0, 5)), st.builds(Stall, st.integers(0, 7), st.integers(0, 9))
    ),
)


@given(STRETCHES, TIMES)
def test_closed_form_and_walk_agree(stretch: Stretch, time: int) -> None:
    until = stretch.begun + time
    step, held, parts = walked(stretch, until)
    assert stretch.completed(until) == step
    assert stretch.parts(until) == parts
    assert stretch.held(until, 3) == held
    assert stretch.held(until, 0) is None


@given(STRETCHES, st.lists(TIMES, min_size=1))
def test_parts_of_consecutive_spans_add_up(stretch: Stretch, times: list[int]) -> None:
    edges = [stretch.begun, *sorted(stretch.begun + time for time in times)]
    pieces = [stretch.parts(end) - stretch.parts(start) for start, end in itertools.pairwise(edges)]
    assert sum(part.again + part.fresh + part.stalled for part in pieces) == edges[-1] - edges[0]
    assert all(min(part.again, part.fresh, part.stalled) >= 0 for part in pieces)


@pytest.mark.parametrize(
    ("at", "unfinished"),
    # steps 3, 4 are old: completed at 20, 30; a stall of 5 after step 4; step 5 is new, from 35 to 45
    [(12, 0), (25, 0), (30, 0), (33, 0), (35, 0), (41, 6), (45, 0), (47, 2)],
)
def test_only_a_new_step_that_is_cut_off_is_unfinished(at: int, unfinished: int) -> None:
    assert Stretch(2, 10, 4, 10, (Stall(4, 5),)).unfinished(at) == unfinished
