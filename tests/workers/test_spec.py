"""What can be built can be run: sizes that are derived, what is refused and with which hint, and which layouts work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.spec import ModelSpec, ParallelLayout, RunSpec, Spec, TrainSpec, check_layout, layout_problem, layouts

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn_hidden": 48, "seq_len": 16}
TRAIN = {"steps": 10, "global_batch": 12}


def refusal(spec: type[Spec], value: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        spec.model_validate(value)
    return "\n".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in caught.value.errors())


@pytest.mark.parametrize(
    ("given", "kv_heads", "ffn_hidden"),
    [
        ({}, 8, 176),  # 8/3 of 64 is 170.7
        ({"kv_heads": 0, "ffn_hidden": 0}, 8, 176),
        ({"kv_heads": 2, "ffn_hidden": 48}, 2, 48),
        ({"heads": "8", "hidden": "64"}, 8, 176),  # as a form or a template may write numbers
        ({"heads": 8.0, "kv_heads": "0"}, 8, 176),
        ({"hidden": 6144, "heads": 48}, 48, 16384),  # 8/3 of it is whole
    ],
)
def test_sizes_are_derived(given: dict[str, Any], kv_heads: int, ffn_hidden: int) -> None:
    model = ModelSpec.model_validate({"layers": 1, "hidden": 64, "heads": 8, "seq_len": 16} | given)
    assert (model.kv_heads, model.ffn_hidden) == (kv_heads, ffn_hidden)
    assert ModelSpec.model_validate(model.model_dump()) == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 60}, "hidden 60 is not divisible by heads 8; name head_dim, or try hidden 64"),
        ({"hidden": 4}, "hidden 4 is not divisible by heads 8; name head_dim, or try hidden 16"),
        ({"hidden": 24}, "head size 3 (hidden / heads) is odd; rotary positions need it even: try hidden 32"),
        ({"kv_heads": 3}, "heads 8 is not divisible by kv_heads 3; kv_heads may be one of [1, 2, 4, 8]"),
        ({"kv_heads": 16}, "heads 8 is not divisible by kv_heads 16; kv_heads may be one of [1, 2, 4, 8]"),
        ({"heads": 0, "kv_heads": 0}, "heads: Input should be greater than 0"),
        ({"layers": 0}, "layers: Input should be greater than 0"),
        ({"rope_theta": float("inf")}, "rope_theta: Input should be a finite number"),
        ({"width": 3}, "width: Extra inputs are not permitted"),
        (
            {"family": "mamba"},
            "family: Value error, 'mamba' is neither llama nor an import path as my_package",
        ),
    ],
)
def test_impossible_models(change: dict[str, Any], message: str) -> None:
    assert message in refusal(ModelSpec, MODEL | change)


@pytest.mark.parametrize("change", [{"hidden": 60}, {"hidden": 4}, {"hidden": 24}, {"hidden": 1000, "heads": 24}])
def test_the_hint_for_hidden_works(change: dict[str, Any]) -> None:
    model = MODEL | change
    hint = refusal(ModelSpec, model).rpartition("try hidden ")[2]
    assert ModelSpec.model_validate(model | {"hidden": int(hint)}).hidden == int(hint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: Input should be greater than 0"),
        ({"warmup_steps": 11}, "warmup_steps 11 is longer than the horizon of 10 steps"),
        ({"warmup_steps": 6, "horizon": 5}, "warmup_steps 6 is longer than the horizon of 5 steps"),
        ({"learning_rate": 1e-3, "min_learning_rate": 1e-2}, "min_learning_rate 0.01 is above learning_rate 0.001"),
        ({"learning_rate": float("inf")}, "learning_rate: Input should be a finite number"),
        ({"betas": (0.9, 1.0)}, "betas (0.9, 1.0) must each be in [0, 1)"),
        ({"seed": 2**63}, "seed: Input should be less than 9223372036854775808"),
        ({"precision": "fp8"}, "precision: Input should be 'bf16', 'fp16', 'fp32' or 'float64'"),
    ],
)
def test_impossible_training(change: dict[str, Any], message: str) -> None:
    assert message in refusal(TrainSpec, TRAIN | change)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"vpp": 2, "pp": 2}, "vpp 2 needs schedule interleaved_1f1b or interleaved_zb, not 1f1b"),
        ({"schedule": "interleaved_1f1b", "pp": 2}, "interleaved_1f1b needs pp > 1 and vpp > 1; use 1f1b"),
        ({"schedule": "interleaved_1f1b", "vpp": 2}, "interleaved_1f1b needs pp > 1 and vpp > 1; use 1f1b"),
        ({"schedule": "zbv", "vpp": 3, "pp": 2}, "schedule zbv needs vpp 2, not 3"),
        (
            {"schedule": "zbv", "vpp": 2, "pp": 2, "zero": 2},
            "zero 2 reduces each micro-batch, which schedule zbv",
        ),
        ({"dp": 4, "replicate": 3}, "replicate 3 does not divide dp 4; try [1, 2, 4]"),
        ({"pp": 2, "stage_layers": [4]}, "stage_layers names 1 stages; pp x vpp makes 2"),
        ({"dp": 0}, "dp: Input should be greater than 0"),
    ],
)
def test_impossible_layouts(layout: dict[str, Any], message: str) -> None:
    assert message in refusal(ParallelLayout, layout)


INTERLEAVED = {"vpp": 2, "schedule": "interleaved_1f1b"}


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        ({"tp": 3}, {}, "tp 3 does not divide 8 heads"),
        ({"tp": 4}, {"heads": 24, "hidden": 96, "kv_heads": 6}, "tp 4 and 6 kv_heads: one must divide the other"),
        ({"tp": 8}, {"ffn_hidden": 44}, "tp 8 does not divide ffn_hidden 44"),
        ({"tp": 8}, {"vocab_size": 9}, "tp 8 leaves ranks without a part of 9 tokens; try model.vocab_size 16"),
        ({"pp": 5}, {}, "5 stages (pp 5 x vpp 1) need at least 5 layers; the model has 4"),
        ({"pp": 3} | INTERLEAVED, {}, "6 stages (pp 3 x vpp 2) need at least 6 layers; the model has 4"),
        ({"dp": 13}, {}, "12 micro-batches are too few for 13 replicas"),
        ({"dp": 2, "micro_batch": 5}, {}, "global_batch 12 is not divisible by micro_batch 5"),
        ({"dp": 4, "micro_batch": 4}, {}, "3 micro-batches are too few for 4 replicas"),
        ({"pp": 2, "stage_layers": [1, 2]}, {}, "stage_layers (1, 2) sum to 3; the model has 4 layers"),
        ({"tp": 2, "sequence_parallel": True}, {"seq_len": 7}, "sequence_parallel needs seq_len 7 divisible by tp 2"),
    ],
)
def test_layouts_that_do_not_fit(layout: dict[str, Any], model: dict[str, Any], message: str) -> None:
    value = {"model": MODEL | model, "data": {}, "train": TRAIN, "parallel": layout}
    said = refusal(RunSpec, value)
    assert message in said
    assert "Layouts that work on " in said


@pytest.mark.parametrize(
    ("layout", "slots", "message"),
    [
        (
            {"tp": 5},
            5,
            "tp 5 does not divide 8 heads. Layouts that work on 5 slots: "
            "dp 5 x pp 1 x tp 1; dp 1 x pp 1 x tp 4; dp 2 x pp 1 x tp 2",
        ),
        (
            {"dp": 2, "pp": 2},
            8,
            "dp 2 x pp 2 x tp 1 uses 4 of 8 slots. Layouts that work on 8 slots: "
            "dp 2 x pp 2 x tp 2; dp 4 x pp 2 x tp 1; dp 2 x pp 4 x tp 1",
        ),
        (
            {"dp": 4},
            2,
            "dp 4 x pp 1 x tp 1 needs 4 slots, not 2. Layouts that work on 2 slots: "
            "dp 2 x pp 1 x tp 1; dp 1 x pp 2 x tp 1; dp 1 x pp 1 x tp 2",
        ),
        (
            {"micro_batch": 5},
            1,
            "global_batch 12 is not divisible by micro_batch 5. "
            "Layouts that work on 1 slots with micro_batch 1 and schedule 1f1b: dp 1 x pp 1 x tp 1",
        ),
    ],
)
def test_the_nearest_working_layouts_are_named(layout: dict[str, Any], slots: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_layout(ParallelLayout(**layout), ModelSpec(**MODEL), TrainSpec(**TRAIN), slots)
    assert str(caught.value) == message


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    heads = draw(st.integers(1, 24))
    return ModelSpec(
        layers=draw(st.integers(1, 12)),
        hidden=heads * draw(st.sampled_from([2, 4, 6])),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        ffn_hidden=draw(st.integers(1, 96)),
        seq_len=8,
        vocab_size=draw(st.sampled_from([0, 7, 32])),
    )


@given(models(), st.integers(1, 48), st.integers(1, 24))
def test_every_layout_found_works(model: ModelSpec, batch: int, slots: int) -> None:
    train = TrainSpec(steps=1, global_batch=batch)
    found = list(layouts(slots, model, train))
    for layout in found:
        check_layout(layout, model, train)
        assert layout.world <= slots
    order = [(-layout.world, layout.tp, layout.pp) for layout in found]
    assert order == sorted(set(order))


@given(models(), st.integers(1, 12), st.integers(1, 8))
def test_no_layout_is_missed(model: ModelSpec, batch: int, slots: int) -> None:
    train = TrainSpec(steps=1, global_batch=batch)
    sizes = itertools.product(range(1, slots + 1), repeat=3)
    every = {ParallelLayout(dp=dp, pp=pp, tp=tp) for dp, pp, tp in sizes if dp * pp * tp <= slots}
    filled = {layout for layout in every if min(layout.micro_batches(batch)) >= layout.pp}
    working = {layout for layout in filled if layout_problem(layout, model, train) is None}
    assert set(layouts(slots, model, train)) == working


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_every_rank_has_its_own_coordinates(dp: int, pp: int, tp: int) -> None:
    layout = ParallelLayout(dp=dp, pp=pp, tp=tp)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert places == list(itertools.product(range(pp), range(dp), range(tp)))  # pp outermost, tp innermost


JOB = {
    "name": "topics",
    "model": MODEL,
    "data": {"source": "builtin:topics"},
    "train": TRAIN,
    "parallel": {"dp": 2, "pp": 2},
    "resources": {"device": "cpu", "slots": 4},
    "placement": {"tp": "node"},
    "checkpoint": {"every_steps": 5},
    "budgets": {"hang": 1},
    "queue": "default",
    "priority": 3,
}


def test_the_run_in_a_job_file() -> None:
    run = RunSpec.from_job(JOB)
    assert run.parallel == ParallelLayout(dp=2, pp=2)
    assert run.checkpoint.every_steps == 5
    assert run.model_dump().keys() == {"model", "data", "train", "parallel", "checkpoint", "eval"}


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (JOB | {"resource": {}}, "resource: Extra inputs are not permitted"),
        (JOB | {"train": TRAIN | {"lr": 1.0}}, "train.lr: Extra inputs are not permitted"),
        ({"train": TRAIN, "data": {}}, "model: Field required"),
    ],
)
def test_a_job_file_with_unknown_or_missing_fields(job: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.from_job(job)
    assert [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in caught.value.errors()] == [message]


def test_values_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ParallelLayout().dp = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layout", "batch", "counts", "runs"),
    [
        ({"dp": 3}, 7, (3, 2, 2), (3, 2, 2)),
        ({"dp": 3, "zero": 2}, 7, (3, 2, 2), (3, 3, 3)),
        ({"dp": 3, "micro_batch": 2}, 14, (3, 2, 2), (3, 2, 2)),
        ({"dp": 2, "pp": 4}, 5, (3, 2), (4, 4)),
        ({"dp": 2, "pp": 2, "schedule": "gpipe"}, 3, (2, 1), (2, 1)),
        ({"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, 7, (4, 3), (4, 4)),
        ({"dp": 2, "pp": 2, "vpp": 2, "schedule": "zbv"}, 7, (4, 3), (4, 3)),
    ],
)
def test_micro_batches_of_each_replica_and_what_it_runs(
    layout: dict[str, Any], batch: int, counts: tuple[int, ...], runs: tuple[int, ...]
) -> None:
    made = ParallelLayout(**layout)
    assert made.micro_batches(batch) == counts
    assert made.runs(batch) == runs
