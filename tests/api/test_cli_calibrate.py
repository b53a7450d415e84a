"""`phalanx plan calibrate`, and plans with what it wrote. The probe in one test is real, of this machine's CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from api.views import PlanView
from service.store.records import NodeRow
from tests.api.world import World
from tests.service.core.plan.test_calibration import made
from workers.timings import Probe

Run = Callable[..., Any]

JOB = {
    "name": "probed",
    "model": {"preset": "llama3-8b"},
    "data": {},
    "train": {"steps": 10, "global_batch": 64},
    "resources": {"slots": 32},
}
GPUS = {"accelerator": "H100", "nodes": 4}
SMALL = JOB | {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64},
    "train": {"steps": 10, "global_batch": 8, "precision": "fp32"},
    "resources": {"device": "cpu", "slots": 2},
}
CPUS = {"device": "cpu", "nodes": 1, "slots": 2}


def invoke(*words: str, **environ: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words], env=environ)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`phalanx plan` of a job on a fleet with a probe, which is a mapping, or the text of its file."""

    def plan(job: dict[str, Any], fleet: dict[str, Any] | None, probe: Any = None, *words: str, **environ: str) -> Any:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        given = ["--fleet", str(tmp_path / "fleet.yaml")] if fleet is not None else []
        if probe is not None:
            (tmp_path / "probe.json").write_text(probe if isinstance(probe, str) else json.dumps(probe))
            given += ["--probe", str(tmp_path / "probe.json")]
        return invoke(str(tmp_path / "job.yaml"), *given, *words, **environ)

    return plan


def planned(done: Any) -> PlanView:
    assert done.exit_code == 0, done.output
    return PlanView.model_validate_json(done.stdout)


def step_s(found: PlanView) -> float:
    assert found.estimate is not None
    return found.estimate.step_s


@pytest.mark.parametrize("parallel", ["auto", {"dp": 4, "tp": 8}])
def test_half_the_flops_make_steps_slower(run: Run, parallel: Any) -> None:
    job = JOB | {"parallel": parallel}
    usual = step_s(planned(run(job, GPUS, None, "--json")))
    same = step_s(planned(run(job, GPUS, made(), "--json")))
    half = step_s(planned(run(job, GPUS, made(products=2.0, attention=2.0), "--json")))
    assert same == pytest.approx(usual, rel=0.01)
    assert 1.4 * usual < half < 2 * usual


def test_what_would_be_chosen_is_judged_by_the_probe_too(run: Run) -> None:
    given = planned(run(JOB | {"parallel": {"dp": 4, "tp": 8}}, GPUS, made(products=2.0), "--json"))
    chosen = planned(run(JOB, GPUS, made(products=2.0), "--json"))
    assert given.others[0].layout == chosen.layout
    assert given.others[0].step_s == pytest.approx(step_s(chosen))


def test_a_slow_link_changes_what_is_chosen(run: Run) -> None:
    """Of a model that no GPU holds: stages, which say little to each other, in place of shards."""
    job = JOB | {"model": {"preset": "llama3-70b"}, "train": {"steps": 10, "global_batch": 256}}
    fast = planned(run(job, GPUS, made(), "--json"))
    slow = planned(run(job, GPUS, made(nvlink=30.0), "--json"))
    assert slow.layout.pp > fast.layout.pp


def test_a_real_probe_of_this_machine_gives_its_cpus_figures(run: Run, tmp_path: Path) -> None:
    file, job = tmp_path / "cpu.json", tmp_path / "small.yaml"
    job.write_text(yaml.safe_dump(SMALL))
    done = invoke("calibrate", str(job), "--device", "cpu", "--out", str(file), "--json")
    assert done.exit_code == 0, done.output
    probe = json.loads(done.stdout)
    assert Probe.model_validate(probe) == Probe.model_validate_json(file.read_text())
    assert planned(run(SMALL, CPUS, None, "--json")).estimate is None
    found = planned(run(SMALL, CPUS, probe, "--json"))
    assert found.estimate is not None
    assert found.estimate.accelerator == "cpu"
    assert found.estimate.device_bytes == probe["memory"]
    assert found.layout.world == 2
    slower = probe | {"products": [one | {"seconds": 2 * one["seconds"]} for one in probe["products"]]}
    named = SMALL | {"parallel": found.layout.model_dump()}
    before, after = (planned(run(named, CPUS, one, "--json")) for one in (probe, slower))
    assert before.estimate is not None
    assert after.estimate is not None
    assert after.estimate.parts["products"] == pytest.approx(2 * before.estimate.parts["products"], rel=0.1)
    assert step_s(after) > step_s(before)


def test_without_a_fleet_the_nodes_are_asked_of_the_api(run: Run, world: World) -> None:
    world.commit(
        nodes=[NodeRow(f"i{n}", f"n{n}", 8, "", "", "gpu", "", time.time(), accelerator="H100") for n in range(4)]
    )
    given = planned(run(JOB, GPUS, made(products=2.0), "--json"))
    asked = planned(run(JOB, None, made(products=2.0), "--json", PHALANX_HOME=str(world.home)))
    world.commit(nodes=[])
    assert (asked.layout, step_s(asked)) == (given.layout, pytest.approx(step_s(given)))


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ("{", "is no probe: it is not JSON"),
        ("[]", "a probe is a mapping of fields"),
        ("{}", "probe.device: Field required"),
        ("[" * 100_000, "is no probe"),
        (made() | {"products": [{"precision": "bf16", "m": 0, "n": 1, "k": 1, "seconds": 1}]}, "probe.products.0.m"),
        (made("A100-80GB"), "the probe is of a A100-80GB; the fleet's gpu slots are H100"),
        (made("cpu", "fp32"), "the probe has nothing in bf16, only fp32"),
        (made() | {"device": "Abacus"}, "no figures are known"),
    ],
)
def test_a_probe_that_is_of_no_use_is_an_error(run: Run, probe: Any, says: str) -> None:
    done = run(JOB, GPUS, probe)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_file_that_is_not_there_is_an_error(run: Run) -> None:
    done = run(JOB, GPUS, None, "--probe", "/no/such")
    assert done.exit_code == 2
    assert "/no/such can't be read" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/no/such/job"], "nothing was probed: /no/such/job"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_what_can_not_be_probed_is_told(words: list[str], says: str, tmp_path: Path) -> None:
    done = invoke("calibrate", *words, "--out", str(tmp_path / "o.json"))
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (tmp_path / "o.json").exists()
