"""Which smaller layout a job asks for, and when it grows."""

from __future__ import annotations

import pytest

from service.contracts.cluster import Fleet
from service.contracts.job import JobSpec
from service.core import placement
from service.core.plan import search
from service.sim import pace
from service.sim.elastic import Elastic
from service.sim.fleet import FleetSpec
from tests.service.sim import world
from workers.spec import ParallelLayout


def elastic(spec: JobSpec, min_slots: int = 1, payback_s: float = 3600) -> Elastic:
    assert isinstance(spec.parallel, ParallelLayout)
    return Elastic(spec, pace.made(spec, spec.parallel, 10), min_slots, payback_s)


def nodes(count: int, slots: int = 1, rack: int = 0, nvlink: int = 0) -> Fleet:
    return Fleet(FleetSpec(nodes=count, slots=slots, rack=rack, nvlink=nvlink).made())


@pytest.mark.parametrize(
    ("batch", "dp", "pp", "alive", "chosen"),
    [
        (12, 4, 1, 4, 4),
        (12, 4, 1, 9, 4),  # never more than it asked for
        (12, 4, 1, 3, 3),
        (16, 5, 1, 5, 5),  # what was asked for is kept, though 4 replicas are as fast
        (14, 6, 1, 5, 5),  # 3 micro-batches at 5 replicas
        (14, 7, 1, 6, 5),  # 3 as well at 6: the smallest of the fastest
        (12, 4, 2, 7, 3),
        (12, 4, 2, 1, 4),  # no room for any: it waits for what it asked for
    ],
)
def test_the_fastest_and_of_those_the_smallest(batch: int, dp: int, pp: int, alive: int, chosen: int) -> None:
    found = elastic(world.job(dp=dp, pp=pp, batch=batch)).fitted(nodes(alive))
    assert isinstance(found.parallel, ParallelLayout)
    assert (found.parallel.dp, found.parallel.pp) == (chosen, pp)
    assert found.resources.slots == chosen * pp
    assert found.train.global_batch == batch


def test_no_fewer_slots_than_the_least() -> None:
    assert elastic(world.job(), min_slots=3).fitted(nodes(2)).resources.slots == 4
    assert elastic(world.job(), min_slots=2).fitted(nodes(2)).resources.slots == 2


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("rule", [{"tp": "node"}, {"tp": "nvlink"}, {"tp": "any"}, {"pp": "rack"}, {"pp": "any"}])
@pytest.mark.parametrize("nvlink", [0, 2])
@pytest.mark.parametrize("alive", range(1, 9))
def test_what_it_asks_for_has_room(tp: int, rule: dict[str, str], nvlink: int, alive: int) -> None:
    """As many replicas as placement finds room for, in racks of three nodes of four slots."""
    spec = JobSpec.model_validate(
        {
            "model": {"layers": 8, "hidden": 96, "heads": 12, "kv_heads": 12, "ffn_hidden": 96, "seq_len": 12},
            "data": {},
            "train": {"steps": 1, "global_batch": 5040},
            "resources": {"slots": 12 * 2 * tp},
            "parallel": {"dp": 12, "pp": 2, "tp": tp},
            "placement": rule,
        }
    )
    fleet = nodes(alive, slots=4, rack=3, nvlink=nvlink)
    found = elastic(spec).fitted(fleet)
    layout, _ = search.choose(found, fleet)

    def fits(dp: int) -> bool:
        try:
            placement.place(layout.model_copy(update={"dp": dp}), fleet, frozenset(), spec.placement, "gpu")
        except placement.PlacementRefused:
            return False
        return True

    most = max((dp for dp in range(1, 13) if fits(dp)), default=12)
    assert layout.dp == most


@pytest.mark.parametrize(
    ("dp", "alive", "pause_s", "grows"),
    [
        (3, 4, 60, True),  # a quarter of 3,540 s is gained
        (3, 4, 900, False),
        (3, 3, 60, False),
        (4, 9, 60, False),
        (2, 3, 0.1, True),
    ],
)
def test_it_grows_where_that_pays(dp: int, alive: int, pause_s: float, grows: bool) -> None:
    policy = elastic(world.job())
    assert policy.grows(ParallelLayout(dp=dp), nodes(alive), pause_s) is grows


def test_it_does_not_grow_into_what_is_no_faster() -> None:
    policy = elastic(world.job(dp=7, batch=14))
    assert not policy.grows(ParallelLayout(dp=5), nodes(6), 1)
    assert policy.grows(ParallelLayout(dp=5), nodes(7), 1)
