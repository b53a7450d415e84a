"""The examples of the literature in deploy/plans: they plan and place, and what the planner would have chosen instead.

`pytest -s` shows each beside its choice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from api import planview
from api.views import PlanView
from service.contracts.job import parse_job
from service.core.plan import fleetfile

PLANS = Path(__file__).parent.parent.parent / "deploy" / "plans"

TABLE = [
    # job, fleet, GPUs, layers of the largest and the smallest stage
    ("mt-530b-dp35-tp8-pp16", "4480-a100", 4480, (7, 6)),
    ("mt-530b-dp16-tp8-pp35", "4480-a100", 4480, (3, 3)),
    ("llama-70b-dp64-tp8-pp4", "2048-a100", 2048, (20, 20)),
    ("gpt3-175b-dp8-tp8-pp16", "1024-h100", 1024, (6, 6)),
    ("gpt3-175b-dp8-tp8-pp64", "4096-a100", 4096, (2, 1)),
    ("llama3-405b-dp128-tp8-pp16", "16384-h100", 16_384, (2, 1)),
    ("deepseek-v3-dp128-pp16-ep64", "2048-h800", 2048, (2, 1)),
]


def planned(job: str, fleet: str) -> PlanView:
    spec = parse_job(yaml.safe_load((PLANS / f"{job}.yaml").read_text()))
    return planview.made(spec, fleetfile.parse(yaml.safe_load((PLANS / f"{fleet}.yaml").read_text())).fleet())


def stage_sizes(view: PlanView, layers: int) -> tuple[int, int]:
    stages = view.layout.stages
    sizes = view.layout.stage_layers
    if not isinstance(sizes, tuple):
        sizes = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    assert sum(sizes) == layers
    return max(sizes), min(sizes)


@pytest.mark.parametrize(("job", "fleet", "gpus", "sizes"), TABLE)
def test_an_example_plans_and_places(job: str, fleet: str, gpus: int, sizes: tuple[int, int]) -> None:
    text = yaml.safe_load((PLANS / f"{job}.yaml").read_text())
    view = planned(job, fleet)
    one, best = view.estimate, view.others[0]
    assert one is not None
    assert (view.job, view.slots, view.layout.world) == (job, gpus, gpus)
    assert sum(line.slots for line in view.map) == gpus
    assert stage_sizes(view, parse_job(text).model.layers) == sizes
    assert one.fits, f"{max(rank.total for rank in one.memory):.3g} bytes"
    assert 0.05 < one.mfu < 0.7
    assert best.ratio < 1.02  # what others ran is no better than the best that is known here
    print(f"\n{job}: {view.described}: {one.step_s:.3g} s, MFU {one.mfu:.1%}")  # noqa: T201
    print(f"  the planner: {best.described}: {best.step_s:.3g} s, ratio {best.ratio:.2f}; {best.why}")  # noqa: T201
    print(  # noqa: T201
        f"  snapshots every {one.snapshot.every_steps} steps, {one.snapshot.node_bytes / 1e9:.3g} GB a node"
    )


def test_every_file_is_in_the_table() -> None:
    named = {name for job, fleet, *_ in TABLE for name in (job, fleet)}
    assert {path.stem for path in PLANS.glob("*.yaml")} == named


def test_of_two_accounts_of_mt_530b_the_one_that_divides_its_layers_is_faster() -> None:
    sixteen, thirty_five = (planned(job, "4480-a100").estimate for job, *_ in TABLE[:2])
    assert sixteen is not None
    assert thirty_five is not None
    assert thirty_five.step_s < sixteen.step_s
    assert thirty_five.parts["uneven"] < sixteen.parts["uneven"]
