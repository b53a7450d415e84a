from __future__ import annotations

from typing import Any

import pytest

from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused, UserError
from service.core.plan import search
from tests.service.core import world

MODEL = {"layers": 8, "hidden": 64, "heads": 8, "seq_len": 16}


def train(batch: int) -> dict[str, int]:
    return {"steps": 10, "global_batch": batch}


@pytest.mark.parametrize(
    ("slots", "batch", "fleet", "chosen"),
    [
        (8, 16, world.fleet(4), "dp 8 x pp 1 x tp 1"),
        (8, 12, world.fleet(4), "dp 4 x pp 1 x tp 2"),
        (8, 12, world.fleet(8, slots=1), "dp 4 x pp 2 x tp 1"),
        (8, 12, world.fleet(3, slots=3), "dp 4 x pp 2 x tp 1"),  # it holds three pairs
        (8, 6, world.fleet(2, slots=4), "dp 2 x pp 1 x tp 4"),
        (8, 6, world.fleet(4), "dp 2 x pp 2 x tp 2"),
        (1, 1, world.fleet(1), "dp 1 x pp 1 x tp 1"),
    ],
)
def test_chooses_the_fewest_model_parallel_ranks_that_fit(slots: int, batch: int, fleet: Fleet, chosen: str) -> None:
    layout, reason = search.choose(world.job_spec(slots, train=train(batch)), fleet)
    assert str(layout) == chosen
    assert reason.startswith(f"{chosen} uses all {slots} slots with the fewest model-parallel ranks")


def test_an_explicit_layout_is_taken() -> None:
    layout, reason = search.choose(world.job_spec(8, parallel={"dp": 2, "pp": 2, "tp": 2}), world.fleet(4))
    assert (layout.world, reason) == (8, "dp 2 x pp 2 x tp 2 as the job asks")


@pytest.mark.parametrize(
    ("slots", "batch", "fleet", "message"),
    [
        (7, 4, world.fleet(4), "no layout of this model and batch uses all 7 slots"),
        (8, 1, world.fleet(4), "needs 1 node with 8 free slots for tp 8; there are 0 among 8 free slots"),
    ],
)
def test_refuses_what_can_not_be_chosen(slots: int, batch: int, fleet: Fleet, message: str) -> None:
    with pytest.raises(PlacementRefused) as refused:
        search.choose(world.job_spec(slots, train=train(batch)), fleet)
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("slots", "fields", "fleet"),
    [
        (8, {}, world.fleet(4)),
        (8, {}, Fleet()),  # nothing is known of the fleet yet
        (8, {"parallel": {"dp": 2, "tp": 4}, "placement": {"tp": "any"}}, world.fleet(4)),
        (8, {"parallel": {"pp": 4, "tp": 2}}, world.fleet(3, 1)),
    ],
)
def test_fits(slots: int, fields: dict[str, Any], fleet: Fleet) -> None:
    search.check_fits(world.job_spec(slots, **fields), fleet)


@pytest.mark.parametrize(
    ("slots", "fields", "fleet", "field", "message", "hint"),
    [
        (9, {}, world.fleet(4), "resources.slots",
         "needs 9 cpu slots; the fleet has 8",
         "set resources.slots to 8 or less"),
        (4, {"device": "gpu"}, world.fleet(4), "resources.device",
         "needs 4 gpu slots; no node of the fleet has any",
         "resources.device cpu has 8 slots"),
        (8, {"parallel": {"dp": 2, "tp": 4}}, world.fleet(4), "parallel.tp",
         "tp 4 needs a node with 4 cpu slots; the largest has 2",
         "layouts that fit: dp 8 x pp 1 x tp 1; dp 4 x pp 1 x tp 2; dp 4 x pp 2 x tp 1"),
        (7, {"train": train(4)}, world.fleet(4), "resources.slots",
         "no layout of this model and batch uses all 7 slots",
         "resources.slots 6 would work"),
        (8, {"train": train(1)}, world.fleet(4), "resources.slots",
         "needs 1 node with 8 free slots for tp 8; there are 0 among 8 free slots",
         "layouts that fit: none; use fewer slots, or lift placement.tp or pp to any"),
        (8, {"parallel": {"pp": 4, "tp": 2}, "placement": {"pp": "rack"}}, world.fleet(3, 1), "parallel",
         "needs 4 nodes with 2 free slots for tp 2 in one rack; the largest rack has 3",
         "layouts that fit: dp 8 x pp 1 x tp 1; dp 4 x pp 1 x tp 2; dp 4 x pp 2 x tp 1"),
    ],
)  # fmt: skip
def test_refuses_at_submission_what_can_never_fit(
    slots: int, fields: dict[str, Any], fleet: Fleet, field: str, message: str, hint: str
) -> None:
    with pytest.raises(UserError) as refused:
        search.check_fits(world.job_spec(slots, **fields), fleet)
    assert (refused.value.field, refused.value.message, refused.value.hint) == (field, message, hint)
