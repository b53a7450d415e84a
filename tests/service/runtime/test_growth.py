"""The autoscaler is asked for what jobs want: once, and again after a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.core.state import State
from service.runtime import growth
from service.runtime.growth import Growth, Wanted
from tests.e2e.world import until
from tests.service.core import world
from tests.service.core.world import World


class Scaler:
    """Stands for Ray's; it may be away."""

    def __init__(self) -> None:
        self.asked: list[Wanted] = []
        self.away = False

    def __call__(self, wanted: Wanted) -> None:
        if self.away:
            raise ConnectionError("the head is gone")
        self.asked.append(wanted)


@pytest.fixture
def scaler() -> Scaler:
    return Scaler()


@pytest.fixture
def grower(scaler: Scaler) -> Iterator[Growth]:
    made = Growth(scaler)
    yield made
    made.close()


def looked(grower: Growth, state: State) -> None:
    grower.look(state)
    until(lambda: not grower.busy, "answer", 10)


def waiting(slots: int) -> State:
    here = World(world.fleet(1))
    here.submit(job=world.spec(slots=slots))
    return here.state


def test_what_is_wanted_is_asked_for_once(grower: Growth, scaler: Scaler) -> None:
    for state in (State(), waiting(4), waiting(4), State()):
        looked(grower, state)
    assert scaler.asked == [{}, {("cpu", 1): 4}, {}]


def test_a_head_that_was_away_is_asked_again(grower: Growth, scaler: Scaler) -> None:
    scaler.away = True
    looked(grower, waiting(4))
    scaler.away = False
    looked(grower, waiting(4))
    assert scaler.asked == [{("cpu", 1): 4}]


def test_after_a_while_it_is_said_again(grower: Growth, scaler: Scaler, monkeypatch: pytest.MonkeyPatch) -> None:
    looked(grower, waiting(4))
    monkeypatch.setattr(growth, "AGAIN_S", 0.0)
    looked(grower, waiting(4))
    assert len(scaler.asked) == 2


def test_a_gpu_comes_with_a_core_for_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, int]] = []
    monkeypatch.setattr(growth, "request_resources", lambda bundles: said.extend(bundles))
    growth.request(Wanted({("gpu", 8): 2, ("cpu", 1): 1}))
    assert said == [{"GPU": 8, "CPU": 1}, {"GPU": 8, "CPU": 1}, {"CPU": 1}]
