"""Plans over REST, from Python and on the command line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from api import planview
from api.cli import plan as shown
from api.cli.main import app
from api.views import PlanView
from service.contracts import errors
from service.contracts.job import parse_job
from service.core.plan import fleetfile
from service.store.records import NodeRow
from tests.api.world import World
from tests.api.world import job as small
from workers.checkpoint import memory

Run = Callable[..., Any]

FLEET = {"accelerator": "H100", "nodes": 4, "slots": 8, "rack": 2}


def job(**fields: Any) -> dict[str, Any]:
    return {
        "name": "plan",
        "model": {"preset": "llama3-8b"},
        "data": {},
        "train": {"steps": 1000, "global_batch": 64},
        "resources": {"slots": 32},
        **fields,
    }


@pytest.fixture
def run(world: World, tmp_path: Path) -> Run:
    def invoke(*words: str, of: dict[str, Any] | None = None, fleet: dict[str, Any] | None = None, **env: str) -> Any:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(of or job()))
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet or FLEET))
        given = ["--fleet", str(tmp_path / "fleet.yaml")] if fleet is not None else []
        environ = {"PHALANX_HOME": str(world.home), **env}
        return CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml"), *given, *words], env=environ)

    return invoke


@pytest.fixture
def gpus(world: World) -> Iterator[None]:
    """The API sees four nodes of eight H100."""
    rows = [
        NodeRow(f"id{n}", f"n{n}", 8, f"r{n // 2}", "", "gpu", "127.0.0.1", time.time(), accelerator="H100")
        for n in range(4)
    ]
    world.commit(nodes=rows)
    yield
    world.commit(nodes=[])


def local(**fields: Any) -> PlanView:
    return planview.made(parse_job(job(**fields)), fleetfile.parse(FLEET).fleet())


def test_what_a_plan_tells() -> None:
    found = local()
    one = found.estimate
    assert one is not None
    assert found.chosen
    assert found.layout.world == found.slots == 32
    assert found.reason.startswith(found.described)
    assert one.accelerator == "H100-80GB"
    assert one.fits
    assert one.step_s == pytest.approx(sum(one.parts.values()))
    assert one.tokens == 1000 * 64 * 8192
    assert one.days * 86_400 == pytest.approx(1000 * one.step_s)
    assert one.gpu_hours == pytest.approx(one.days * 24 * 32)
    assert [rank.rank for rank in one.memory] == list(range(found.layout.pp))
    for rank in one.memory:
        states = rank.weights + rank.gradients + rank.optimizer
        assert rank.total == pytest.approx(states + rank.activations + rank.logits + rank.overhead)
        assert rank.total <= one.usable_bytes < one.device_bytes
    assert one.snapshot.every_steps >= 1
    assert one.snapshot.share == pytest.approx(one.snapshot.copy_s / one.snapshot.every_steps / one.step_s)
    assert one.snapshot.node_bytes * 4 == pytest.approx(8.03e9 * 12, rel=0.3)  # 32 GPUs have one copy of the state
    assert len(found.others) == 3
    assert [other.ratio for other in found.others] == sorted(other.ratio for other in found.others)
    assert all(other.ratio >= 1 and "slower" in other.why for other in found.others)
    assert sum(line.slots for line in found.map) == 32


def test_beside_a_layout_that_the_job_names_is_what_would_have_been_chosen() -> None:
    chosen, given = local(), local(parallel={"dp": 4, "pp": 1, "tp": 8})
    assert not given.chosen
    assert given.reason == "dp 4 x pp 1 x tp 8 as the job asks"
    assert given.estimate is not None
    assert chosen.estimate is not None
    assert given.others[0].layout == chosen.layout
    assert given.others[0].ratio == pytest.approx(chosen.estimate.step_s / given.estimate.step_s)
    assert "faster: tp -" in given.others[0].why


def test_a_layout_that_does_not_fit_is_told_and_not_refused() -> None:
    one = local(model={"preset": "llama3-70b"}, parallel={"dp": 32}).estimate
    assert one is not None
    assert not one.fits
    assert one.memory[0].total > one.usable_bytes


def test_a_plan_on_two_kinds_of_gpu() -> None:
    racks = [{"nodes": 2, "accelerator": "A100-80GB"}, {"nodes": 2, "accelerator": "H100"}]
    found = planview.made(parse_job(job()), fleetfile.parse({"racks": racks}).fleet())
    assert found.layout.replica_weights is not None
    assert found.layout.replica_weights[0] == 1 > found.layout.replica_weights[-1]
    assert "no kind of GPU has room alone" in found.reason
    old, new = found.map  # the first replicas stand on the faster ones
    assert old.text.startswith("rack r0: nodes n0-n1 of A100-80GB: replicas ")
    assert new.text.startswith("rack r1: nodes n2-n3 of H100: replicas 0-")
    assert found.estimate is not None
    assert 0.2 < found.estimate.mfu < 0.6


@pytest.mark.parametrize(("asked", "every"), [(0, 0), (1, 1), (7, 7)])
def test_snapshots_are_taken_as_the_job_says(asked: int, every: int) -> None:
    one = local(checkpoint={"snapshot_every": asked}).estimate
    assert one is not None
    assert one.snapshot.every_steps == every


def test_snapshots_are_taken_as_the_ranks_would_choose() -> None:
    one = local().estimate
    assert one is not None
    assert one.snapshot.every_steps == memory.interval(one.snapshot.copy_s, one.step_s, 32) > 1


def test_where_no_figures_are_known_there_is_no_estimate(world: World) -> None:
    with world.fleet(2, 2), world.client() as client:
        found = client.plan(small())
    assert found.estimate is None
    assert found.others == ()
    assert "fewest model-parallel ranks" in found.reason
    assert [line.text for line in found.map] == [
        "racks n1-n2: nodes n1-n2: replicas 0-3, pipeline rank 0",
    ]


@pytest.mark.usefixtures("gpus")
def test_the_route_the_client_and_the_command_line_agree(world: World, http: httpx.Client, run: Run) -> None:
    answer = http.post("/v1/plan", json={"job": job(), "tokens": 1e12})
    assert answer.status_code == 200, answer.text
    told = PlanView.model_validate(answer.json())
    assert told.estimate is not None
    assert told.estimate.tokens == 1e12
    with world.client() as client:
        assert client.plan(job(), tokens=1e12) == told
        assert client.plan(job(), fleet=FLEET, tokens=1e12) == told
        assert client.plan(parse_job(job()), tokens=1e12) == told
        assert list(client.list()) == []  # nothing is submitted
    for done in (run("--json", "--tokens", "1e12"), run("--json", "--tokens", "1_000,000_000_000", fleet=FLEET)):
        assert done.exit_code == 0, done.output
        assert PlanView.model_validate_json(done.stdout) == told


def test_with_a_fleet_no_api_is_asked(run: Run) -> None:
    nowhere = {"PHALANX_API_URL": "http://127.0.0.1:1", "PHALANX_TOKEN": "x"}
    assert run("--json", fleet=FLEET, **nowhere).exit_code == 0
    assert run("--json", **nowhere).exit_code == 3


def test_a_plan_for_a_person_to_read(run: Run) -> None:
    text = run(fleet=FLEET).stdout
    found = local()
    assert found.estimate is not None
    for words in (
        f"plan: {found.reason}",
        "MFU",
        "tokens/s",
        "GPU-hours",
        f"every {found.estimate.snapshot.every_steps} steps, waiting",
        "GB a node",
        "P parameters, G gradients, O optimizer",
        "PART OF THE STEP",
        "products",
        "NEXT BEST",
        found.others[2].why,
        found.map[0].text,
    ):
        assert words in text, words
    assert len(re.findall(r"^ *[\d-]+ \|P+.*x+\.*\| +\d+\.\d GB$", text, re.MULTILINE)) == found.layout.pp
    given = run(of=job(parallel={"dp": 4, "tp": 8}), fleet=FLEET).stdout
    assert given.startswith("plan: dp 4 x pp 1 x tp 8, micro-batch 1, as the job asks\n")
    assert "WHAT THE PLANNER WOULD CHOOSE" in given
    full = run(of=job(model={"preset": "llama3-70b"}, parallel={"dp": 32}), fleet=FLEET).stdout
    assert "; more than the 76.8 that can be used" in full
    assert "neither time nor memory is estimated" in run(fleet={"accelerator": "TPU", "nodes": 4}).stdout


@pytest.mark.parametrize("share", [0.01, 0.5, 0.96, 1.5, 30.0])
def test_a_bar_is_as_long_as_what_is_held(share: float) -> None:
    one = local().estimate
    assert one is not None
    scale = share * one.device_bytes / one.memory[0].total
    parts = {name: getattr(one.memory[0], name) * scale for name in (*shown.LETTERS, "total")}
    bar = shown._bar(one.memory[0].model_copy(update=parts), one)
    filled = len(bar.rstrip("."))
    assert filled == min(round(share * shown.WIDTH), 2 * shown.WIDTH)
    assert len(bar) == max(shown.WIDTH, filled + 3 * (share > 2))
    order = "".join(dict.fromkeys(bar.replace(".", "")))
    assert order == "".join(letter for letter in "PGOALx" if letter in order)


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "job", "Field required"),
        ({"job": job(), "colour": 1}, "colour", "Extra inputs"),
        ({"job": job(), "tokens": 0}, "tokens", "greater than 0"),
        ({"job": job(), "tokens": 1e30}, "tokens", "less than or equal"),
        ({"job": job(colour="red"), "fleet": FLEET}, "job.colour", "unknown field 'colour'"),
        ({"job": job(resources={"slots": 64}), "fleet": FLEET}, "resources.slots", "the fleet has 32"),
        ({"job": job(), "fleet": {"nodes": 0}}, "fleet.nodes", "greater than 0"),
        ({"job": job()}, "fleet", "no fleet is known"),
        (
            {"job": job(model={"preset": "llama3-405b"}), "fleet": FLEET},
            "resources.slots",
            "no layout fits the memory of 32",
        ),
    ],
)
def test_what_is_wrong_is_told(http: httpx.Client, body: dict[str, Any], field: str, says: str) -> None:
    answer = http.post("/v1/plan", json=body)
    problem = answer.json()
    assert (answer.status_code, problem["field"]) == (422, field), problem
    assert says in problem["detail"]


def test_submission_refuses_with_the_sizes(world: World) -> None:
    rows = [NodeRow("id0", "n0", 8, "", "", "gpu", "127.0.0.1", time.time(), accelerator="H100")]
    world.commit(nodes=rows)
    with world.client() as client, pytest.raises(errors.UserError, match="no layout fits the memory of 8 H100") as told:
        client.submit(job(model={"preset": "llama3-70b"}, resources={"slots": 8}, data={"source": "builtin:topics"}))
    world.commit(nodes=[])
    assert "resources.slots 24 would do" in told.value.hint


@pytest.mark.parametrize(
    ("words", "fleet", "code", "says"),
    [
        (["--tokens", "many"], FLEET, 2, "--tokens many is no number"),
        (["--tokens", "-1"], FLEET, 2, "--tokens -1 is no number"),
        (["--tokens", "nan"], FLEET, 2, "--tokens nan is no number"),
        ([], {"nodes": 0}, 2, "fleet.nodes"),
        ([], {"nodes": 1}, 2, "needs 32 gpu slots; the fleet has 8"),
        (["--fleet", "/no/such"], None, 2, "can't be read"),
        ([], None, 2, "no fleet is known"),
    ],
)
def test_the_command_line_tells_what_is_wrong(
    run: Run, words: list[str], fleet: dict[str, Any] | None, code: int, says: str
) -> None:
    done = run(*words, fleet=fleet)
    assert done.exit_code == code
    assert says in done.stderr


def test_json_is_one_object(run: Run) -> None:
    assert set(json.loads(run("--json", fleet=FLEET).stdout)) == set(PlanView.model_fields)
