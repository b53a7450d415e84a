from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from service.contracts.errors import UserError
from service.contracts.job import Cause, InitFrom, JobSpec, Phase, parse_job
from workers.spec import ParallelLayout

GONE = object()
FIELDS = (
    "budgets, checkpoint, data, deadline_s, eval, init_from, labels, model, name, parallel, placement, priority, "
    "queue, resources, runtime, train"
)
LAYOUT = ", ".join(sorted(ParallelLayout.model_fields))


def job(**changes: Any) -> dict[str, Any]:
    """A small job with `changes`; `model__layers` stands for `model.layers`, GONE takes a field out."""
    value: dict[str, Any] = {
        "model": {"layers": 8, "hidden": 64, "heads": 8, "seq_len": 16},
        "data": {},
        "train": {"steps": 10, "global_batch": 16},
        "resources": {"device": "cpu", "slots": 4},
    }
    for path, new in changes.items():
        *parents, name = path.split("__")
        inside = value
        for parent in parents:
            inside = inside.setdefault(parent, {})
        if new is GONE:
            del inside[name]
        else:
            inside[name] = new
    return value


REFUSED = [
    # what was written, the field, what is wrong with it, what would work
    (job(colour=1), "colour", "unknown field 'colour'; ", f"known fields: {FIELDS}"),
    (job(**{"a.b": 1}), "a.b", "unknown field 'a.b'; ", f"known fields: {FIELDS}"),
    (job(priority=1001), "priority", "priority should be less than or equal to 1000", "not 1001"),
    (
        job(model__depth=8),
        "model.depth",
        "unknown field 'depth' in model",
        "heads, hidden, init_std, kv_heads, latent, layers",
    ),
    (job(resources__gpus=8), "resources.gpus", "unknown field 'gpus' in resources", "device, elastic, probe, slots"),
    (job(resources__elastic={}), "resources.elastic.min_slots", "field 'resources.elastic.min_slots' is required", ""),
    (job(budgets__hangs=1), "budgets.hangs", "'hangs' in budgets", "hang, infrastructure, preemption, user_error"),
    (job(parallel__cp=2), "parallel.cp", "unknown field 'cp' in parallel", LAYOUT),
    (job(model=GONE), "model", "field 'model' is required", ""),
    (job(data=GONE), "data", "field 'data' is required", ""),
    (job(train__steps=GONE), "train.steps", "field 'train.steps' is required", ""),
    (job(resources__slots=GONE), "resources.slots", "field 'resources.slots' is required", ""),
    (job(train__betas=[0.9]), "train.betas.1", "field 'train.betas.1' is required", ""),
    (job(model="llama"), "model", "not 'llama'", "model should be a mapping of fields (activation, bias, "),
    (job(train__steps="ten"), "train.steps", "not 'ten'", "train.steps should be a valid integer"),
    (job(train__steps=1.5), "train.steps", "not 1.5", "train.steps should be a valid integer"),
    (job(train__steps=None), "train.steps", "not None", "train.steps should be a valid integer"),
    (job(train__betas=[0.9, "x"]), "train.betas.1", "not 'x'", "train.betas.1 should be a valid number"),
    (job(train__learning_rate="fast"), "train.learning_rate", "not 'fast'", "should be a valid number"),
    (job(train__learning_rate="inf"), "train.learning_rate", "not 'inf'", "should be a finite number"),
    (job(checkpoint__root=5), "checkpoint.root", "not 5", "should be a valid string"),
    (job(model__family="gpt"), "model.family", "'gpt' is neither llama", "as my_package.my_module:MyModel"),
    (job(train__decay="step"), "train.decay", "not 'step'", "should be 'cosine', 'linear', 'wsd' or 'constant'"),
    (job(placement__tp="rack"), "placement.tp", "not 'rack'", "should be 'nvlink', 'node' or 'any'"),
    (job(resources__device="tpu"), "resources.device", "not 'tpu'", "should be 'cpu' or 'gpu'"),
    (job(queue="Fast"), "queue", "String should match pattern", "queue"),
    (job(resources__slots=0), "resources.slots", "not 0", "should be greater than 0"),
    (job(budgets__hang=-2), "budgets.hang", "not -2", "should be greater than or equal to -1"),
    (job(model__hidden=65), "model.head_dim", "hidden 65 is not divisible by heads 8", "try hidden 64"),
    (job(model__kv_heads=3), "model", "heads 8 is not divisible by kv_heads 3", "one of [1, 2, 4, 8]"),
    (job(train__betas=[0.9, 1.5]), "train", "betas (0.9, 1.5)", "must each be in [0, 1)"),
    (job(parallel="manual"), "parallel", "not 'manual'", f"should be 'auto' or a mapping of fields ({LAYOUT})"),
    (job(parallel=3), "parallel", "not 3", f"should be 'auto' or a mapping of fields ({LAYOUT})"),
    (job(parallel=None), "parallel", "not None", f"should be 'auto' or a mapping of fields ({LAYOUT})"),
    (job(parallel=[2, 2]), "parallel", "not [2, 2]", f"should be 'auto' or a mapping of fields ({LAYOUT})"),
    (job(parallel__dp="two"), "parallel.dp", "not 'two'", "should be a valid integer"),
    (job(parallel__dp=0), "parallel.dp", "not 0", "should be greater than 0"),
    (
        job(parallel__schedule="2f2b"),
        "parallel.schedule",
        "not '2f2b'",
        "should be 'gpipe', '1f1b', ",
    ),
    (job(parallel__vpp=2), "parallel", "vpp 2 needs schedule interleaved_1f1b", "interleaved_1f1b"),
    (job(parallel__dp=3), "parallel", "dp 3 x pp 1 x tp 1 uses 3 of 4 slots", "dp 4 x pp 1 x tp 1; dp 2 x pp 2"),
    (job(parallel={"dp": 2, "tp": 3}), "parallel", "needs 6 slots, not 4", "dp 2 x pp 1 x tp 2; "),
    (
        job(parallel={"dp": 2, "tp": 3}, resources__slots=6),
        "parallel",
        "tp 3 does not divide 8 heads",
        "Layouts that work on 6 slots: dp 3 x pp 1 x tp 2; ",
    ),
    (
        job(parallel={"pp": 16}, resources__slots=16),
        "parallel",
        "16 stages (pp 16 x vpp 1) need at least 16 layers; the model has 8",
        "Layouts that work on 16 slots: dp 2 x pp 8 x tp 1",
    ),
]


@pytest.mark.parametrize(("value", "field", "wrong", "works"), REFUSED)
def test_a_refusal_names_the_field_what_is_wrong_and_what_would_work(
    value: dict[str, Any], field: str, wrong: str, works: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_job(value)
    error = refused.value
    assert error.field == field
    assert wrong in error.message
    assert works in error.message
    told = f"{error.message} {error.hint}"
    assert not any(word in told for word in ("Input", "function-after", "literal[", "ParallelLayout", "Spec", "\n"))


@pytest.mark.parametrize("value", [None, "job", ["job"], 3])
def test_a_job_is_a_mapping(value: Any) -> None:
    with pytest.raises(UserError, match="a job is a mapping of fields") as refused:
        parse_job(value)
    assert FIELDS in refused.value.hint


def test_the_next_problems_are_in_the_hint() -> None:
    with pytest.raises(UserError, match="field 'model' is required") as refused:
        parse_job(job(model=GONE, train__steps=0, colour=1, parallel="manual", queue="Fast"))
    assert [sentence.split(" ")[0] for sentence in refused.value.hint.split("; ")[:2]] == ["train.steps", "parallel"]
    assert "queue" in refused.value.hint


def test_a_layout_is_not_judged_against_fields_that_are_wrong() -> None:
    with pytest.raises(UserError) as refused:
        parse_job(job(resources__slots=0, parallel={"dp": 3}))
    assert (refused.value.field, refused.value.hint) == ("resources.slots", "")


@pytest.mark.parametrize("written", ["auto", {"dp": 2, "pp": 2}, ParallelLayout(dp=2, pp=2)])
def test_a_layout_that_works_is_taken(written: Any) -> None:
    spec = parse_job(job(parallel=written))
    assert spec.parallel == ("auto" if written == "auto" else ParallelLayout(dp=2, pp=2))


def test_what_is_left_out() -> None:
    spec = parse_job(job(resources={"slots": 4}))
    assert (spec.name, spec.parallel, spec.queue) == ("job", "auto", "default")
    assert (spec.resources.device, spec.placement.tp, spec.placement.pp) == ("gpu", "nvlink", "prefer-rack")
    assert [spec.budgets.of(cause) for cause in Cause] == [3, 100, -1, 10]


@pytest.mark.parametrize("name", ["a", "7", "llama-8b", "a--b", "a" * 63])
def test_names(name: str) -> None:
    assert parse_job(job(name=name)).name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a b", "a/b", "ä", "a\n", "a" * 64])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="name should be 1 to 63 lower-case letters, digits and dashes"):
        parse_job(job(name=name))


@pytest.mark.parametrize("cause", Cause)
def test_a_budget_for_each_cause(cause: Cause) -> None:
    spec = parse_job(job(budgets={cause.value: 7}))
    assert [spec.budgets.of(other) == 7 for other in Cause] == [other is cause for other in Cause]


@pytest.mark.parametrize(
    "value",
    [
        job(),
        job(parallel={"dp": 2, "pp": 2}),
        job(parallel={"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "dp": 2}, name="interleaved"),
        job(train__betas=[0.8, 0.9], train__learning_rate="3e-4", budgets={"hang": -1}, checkpoint={"root": "s3://b"}),
    ],
)
def test_through_json_and_back(value: dict[str, Any]) -> None:
    spec = parse_job(value)
    text = json.dumps(spec.model_dump(mode="json"), allow_nan=False)
    assert parse_job(json.loads(text)) == spec
    assert JobSpec.model_validate_json(text) == spec


def test_what_the_ranks_are_told() -> None:
    spec, layout = parse_job(job(checkpoint={"every_steps": 5})), ParallelLayout(tp=2, pp=2)
    run = spec.run(layout)
    assert (run.model, run.data, run.train, run.checkpoint) == (spec.model, spec.data, spec.train, spec.checkpoint)
    assert run.parallel == layout


def test_terminal_phases() -> None:
    assert [phase for phase in Phase if phase.terminal] == [Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED]


@pytest.mark.parametrize(
    ("start", "origin"),
    [
        ({"root": "/srv/runs", "manifest": "manifests/0000000004-000001.json"}, "/srv/runs/b-1"),
        ({"root": "s3://bucket/runs/", "manifest": "manifests/0000000004-000001.json"}, "s3://bucket/runs/b-1"),
        ({"root": "/srv/runs"}, None),
        ({"manifest": "manifests/0000000004-000001.json"}, None),
        ({}, None),
    ],
)
def test_where_a_job_begins(start: dict[str, Any], origin: str | None) -> None:
    begin = InitFrom(job="b-1", **start)
    if origin is None:
        with pytest.raises(UserError, match="job b-1 was not looked up"):
            _ = begin.origin
    else:
        assert begin.origin == (origin, start["manifest"])


@pytest.mark.parametrize(
    "start",
    [
        {"job": "../b"},
        {"job": ""},
        {"job": "b", "step": -1},
        {"job": "b", "manifest": "../../etc/passwd"},
        {"job": "b", "manifest": "manifests/0000000004-000001.json\n"},
        {"job": "b", "colour": "red"},
    ],
)
def test_a_beginning_that_can_not_be(start: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        InitFrom(**start)
