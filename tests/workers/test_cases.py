"""Faults of numerics, parallelism and data that broke other trainers, each a test; T17 to T21 are elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.pool import Pool
from tests.workers import cases, compare, runs
from workers.checkpoint.publisher import Publisher
from workers.checkpoint.storage import Storage
from workers.models.seams import IGNORED
from workers.parallel import pipeline
from workers.reports import Evaluated, Report, Resumed, ShardSaved, StepDone, StepSkipped
from workers.spec import ModelSpec, ParallelLayout, RunSpec, TrainSpec, check_layout

pytestmark = pytest.mark.torch

SGD = {"optimizer": "sgd", "learning_rate": 0.5, "global_batch": 4}
EIGHT = {"dp": 2, "pp": 2, "tp": 2}
EXPERTS = {"count": 4, "top_k": 2, "hidden": 24, "auxiliary": 0.1}


def checked(pool: Pool, layout: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The layout's results, which equal those of one process."""
    changes = {**changes, "train": SGD | changes.get("train", {})}
    run = runs.spec(layout=layout, **changes)
    results = pool.run(run.parallel.world, runs.check, run)
    compare.same(results, pool.run(1, runs.check, runs.spec(**changes))[0])
    return results


def batch(seed: int, samples: int, seq: int, vocabulary: int) -> cases.Batch:
    whole = np.random.default_rng(seed).integers(vocabulary, size=(samples, seq + 1))
    return whole[:, :-1], whole[:, 1:]


def given(pool: Pool, layout: dict[str, Any], vocabulary: int, batches: list[cases.Batch]) -> list[dict[str, Any]]:
    run, one = (runs.spec(layout=each, train=SGD) for each in (layout, {}))
    results = pool.run(run.parallel.world, cases.given, run, vocabulary, batches)
    compare.same(results, pool.run(1, cases.given, one, vocabulary, batches)[0])
    return results


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_T1_two_stages_give_the_raw_gradients_of_one_process(pool: Pool, micro_batches: int) -> None:
    checked(pool, {"pp": 2}, train={"global_batch": micro_batches})


def test_T2_a_tied_embeddings_gradient_is_the_sum_of_both_uses(pool: Pool) -> None:
    checked(pool, {"dp": 2, "pp": 2, "zero": 1}, model={"tied_embedding": True})


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_T3_fewer_key_heads_than_ranks(pool: Pool, kv_heads: int) -> None:
    model = {"kv_heads": kv_heads}
    checked(pool, {"tp": 4}, model=model)
    run = runs.spec(layout={"tp": 4}, train=SGD | {"learning_rate": 0.1, "global_batch": 1}, model=model)
    assert pool.run(4, cases.drifting, run, 50, None) == [[[]]] * 4


def test_T4_every_layer_keeps_its_own_value_at_any_depth_of_pipeline(pool: Pool, tmp_path: Path) -> None:
    resume: tuple[str, ...] = ()
    for step, pp in enumerate((1, 2, 4, 1), 1):
        run = runs.spec(layout={"pp": pp})
        results = pool.run(pp, cases.layers_filled, str(tmp_path), run, step, resume)
        held = {name: values for _, own in results for name, values in own.items()}
        assert len(held) == 4 * 9
        assert all(values == [float(name.split(".")[1])] for name, values in held.items())
        saved = [report for said, _ in results for report in said if isinstance(report, ShardSaved)]
        storage = Storage.open(str(tmp_path)).child("run")
        resume = (Publisher(storage, "run", 1, "test", run).publish(step, saved),)


def test_T5_layers_that_stages_do_not_divide(pool: Pool) -> None:
    layout = ParallelLayout(pp=4)
    assert [len(stage) for stage in pipeline.stage_layers(30, layout)] == [8, 8, 7, 7]
    checked(pool, {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, model={"layers": 5})


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "zero": 2}])
def test_T6_the_mean_is_over_the_worlds_tokens(pool: Pool, layout: dict[str, Any]) -> None:
    tokens, targets = batch(1, 4, 16, 64)
    targets = targets.copy()
    targets[0, 1:] = IGNORED  # the first replica has one target, the second all but one
    targets[1] = IGNORED
    targets[3, 0] = IGNORED
    results = given(pool, layout, 64, [(tokens, targets)])
    assert results[0]["first"][2] == 1 + 31


@pytest.mark.parametrize(("layout", "rank"), [(EIGHT, 2), ({"dp": 2, "pp": 2, "recompute": "full"}, 1)])
def test_T7_all_ranks_skip_the_step_and_name_where_it_began(pool: Pool, layout: dict[str, Any], rank: int) -> None:
    run = runs.spec(layout=layout, train=SGD)
    results = pool.run(run.parallel.world, cases.poisoned, run, 4 + 3)  # the second replica's second micro-batch
    for result in results:
        blame = result["blame"]
        assert (result["finite"], result["same"], result["steps"]) == (False, True, 1)
        assert (blame.where, blame.stage, blame.rank) == ("activations", 0, rank)
        assert (blame.micro_batch, blame.samples) == (1, (7,))


@pytest.mark.parametrize(
    ("policy", "steps", "skipped", "ledger"),
    [
        ("skip", [1, 2, 3, 4, 5, 6], [4], [(0, 12), (16, 28)]),
        ("rollback", [1, 2, 3, 1, 2, 3, 4, 5, 6], [4], [(16, 40)]),
    ],
)
def test_T7_the_job_says_what_becomes_of_the_run(
    pool: Pool, tmp_path: Path, policy: str, steps: list[int], skipped: list[int], ledger: list[tuple[int, int]]
) -> None:
    train = SGD | {"steps": 6, "non_finite": policy}
    run = runs.spec(layout={"dp": 2, "pp": 2}, train=train, checkpoint={"every_steps": 100})
    first, *others = pool.run(4, cases.poisoned_run, str(tmp_path), run, 13)  # step 4 has samples 12 to 15
    told = [report for report in first if isinstance(report, StepSkipped)]
    assert [report.step for report in told] == skipped
    assert told[0].action == policy
    assert told[0].samples == (13,)
    assert "activations of stage 0 on rank 0, micro-batch 1 (samples [13])" in told[0].reason
    assert [report.step for report in first if isinstance(report, StepDone)] == steps
    (saved,) = (report for report in first if isinstance(report, ShardSaved))
    assert [(entry["start"], entry["end"]) for entry in saved.header["ledger"]] == ledger
    assert not [report for said in others for report in said if isinstance(report, StepSkipped)]


def test_T7_a_rollback_goes_to_the_newest_checkpoint(pool: Pool, tmp_path: Path) -> None:
    train = SGD | {"horizon": 6, "non_finite": "rollback"}
    (_, path), _ = resumed(pool, tmp_path, runs.spec(train=train | {"steps": 2}), 1, ())
    run = runs.spec(layout={"dp": 2}, train=train | {"steps": 6}, checkpoint={"every_steps": 100})
    first, _ = pool.run(2, cases.poisoned_run, str(tmp_path), run, 13, (path,))
    assert [report for report in first if isinstance(report, Resumed)] == [Resumed(2, path)] * 2
    assert [report.step for report in first if isinstance(report, StepDone)] == [3, 3, 4, 5, 6]
    (saved,) = (report for report in first if isinstance(report, ShardSaved))
    assert [(entry["start"], entry["end"]) for entry in saved.header["ledger"]] == [(0, 8), (16, 32)]


def test_T7_by_default_the_run_stops(pool: Pool, tmp_path: Path) -> None:
    run = runs.spec(layout={"dp": 2, "pp": 2}, train=SGD | {"steps": 6})
    raised = pool.run(4, cases.poisoned_run, str(tmp_path), run, 13)
    assert len(set(raised)) == 1
    assert re.fullmatch(
        r"loss nan, gradient norm nan at step 4: first in activations of stage 0 on rank 0.*", raised[0]
    )


@pytest.mark.parametrize("at", [0, 3, 7])
def test_T8_all_ranks_agree_on_the_loss_scale(pool: Pool, at: int) -> None:
    run = runs.spec(layout=EIGHT, train=SGD | {"precision": "fp16"})
    results = pool.run(8, cases.overflowing, run, at)
    assert len({repr(result) for result in results}) == 1
    assert results[0]["finite"] == (False, True)
    assert results[0]["excused"]
    assert results[0]["scales"] == [2.0**16, 2.0**15]
    assert results[0]["steps"] == 1
    exact = pool.run(1, runs.steps, runs.spec(train=SGD), 1)[0]["outcomes"][0][0]
    assert results[0]["loss"] == pytest.approx(exact, rel=1e-3)


def test_T8_a_loss_that_is_no_number_is_not_the_scales_fault(pool: Pool) -> None:
    run = runs.spec(layout={"dp": 2, "pp": 2}, train=SGD | {"precision": "fp16"})
    results = pool.run(4, cases.poisoned, run, 4 + 3)
    assert {(result["finite"], result["excused"], result["scale"]) for result in results} == {(False, False, 2.0**16)}


def test_T9_a_vocabulary_that_tp_does_not_divide(pool: Pool) -> None:
    results = given(pool, {"tp": 4}, 53, [batch(2, 4, 16, 53)])
    tensors = runs.merged(results)
    assert tensors["model.embedding.weight"].shape == tensors["model.head.weight"].shape == (53, 32)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_T10_experts_gradients_are_the_same_at_any_ep(pool: Pool, ep: int) -> None:
    with_loss = checked(pool, {"dp": 2, "tp": 2, "ep": ep}, model={"experts": EXPERTS})
    run = runs.spec(layout={"dp": 2, "tp": 2, "ep": ep}, train=SGD, model={"experts": EXPERTS | {"auxiliary": 0.0}})
    without = runs.merged(pool.run(4, runs.check, run), "gradients")
    for name, gradient in runs.merged(with_loss, "gradients").items():
        if name.endswith("router.weight"):
            assert np.abs(gradient - without[name]).max() > 1e-3 * np.abs(without[name]).max()


@pytest.mark.parametrize("starved", [1, 2], ids=["one expert", "all of the first rank"])
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "ep": 2}, {"dp": 2, "pp": 2, "ep": 2}])
def test_T11_an_expert_without_a_token_has_a_gradient_of_zero(pool: Pool, layout: dict[str, Any], starved: int) -> None:
    model = {"experts": EXPERTS | {"bias_rate": 0.01}}
    run = runs.spec(layout=layout, train={"global_batch": 4}, model=model)
    results = pool.run(run.parallel.world, cases.starved, run, starved)
    for name, gradient in runs.merged(results, "gradients").items():
        if ".experts." in name:
            assert not np.abs(gradient[:starved]).any(), name
            assert all(np.abs(one).any() for one in gradient[starved:]), name
    assert all(steps == 1.0 for result in results for steps in result["steps"])
    alone = pool.run(1, cases.starved, runs.spec(train={"global_batch": 4}, model=model), starved)
    compare.same_tensors(runs.merged(results), runs.merged(alone))


@pytest.mark.parametrize("layout", [{"pp": 2}, EIGHT, {"pp": 2, "vpp": 2, "schedule": "zbv"}])
def test_T12_the_length_of_samples_changes_between_steps(pool: Pool, layout: dict[str, Any]) -> None:
    given(pool, layout, 64, [batch(seed, 4, seq, 64) for seed, seq in enumerate((8, 16, 4, 8, 16))])


def resumed(pool: Pool, root: Path, run: RunSpec, attempt: int, resume: tuple[str, ...]) -> tuple[Any, list[int]]:
    """(reports and newest manifest, ids of the samples in no order) of a run of the trainer."""
    results = pool.run(run.parallel.world, cases.traced, str(root), run, attempt, resume)
    said = [reports for reports, _ in results]
    saved = [report for reports in said for report in reports if isinstance(report, ShardSaved)]
    last = max(record.step for record in saved)
    publisher = Publisher(Storage.open(str(root)).child("run"), "run", attempt, "test", run)
    path = publisher.publish(last, [record for record in saved if record.step == last])
    return (said, path), [sample for _, ids in results for sample in ids]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 3), (2, 1)])
def test_T13_each_sample_once_when_dp_changes(pool: Pool, tmp_path: Path, before: int, after: int) -> None:
    train = {"global_batch": 12, "steps": 3, "horizon": 6}
    (_, path), first = resumed(pool, tmp_path, runs.spec(layout={"dp": before}, train=train), 1, ())
    more = runs.spec(layout={"dp": after}, train=train | {"steps": 6})
    _, then = resumed(pool, tmp_path, more, 2, (path,))
    alone = runs.spec(train=train | {"steps": 6})
    _, wanted = resumed(pool, tmp_path / "alone", alone, 1, ())
    assert Counter(first + then) == Counter(wanted)
    assert max(Counter(first + then).values()) == 1


def test_T14_resumed_in_the_middle_of_the_second_epoch(pool: Pool, tmp_path: Path) -> None:
    text = tmp_path / "small.txt"
    text.write_text("".join(chr(97 + n * 7 % 26) for n in range(16 * 10 + 1)))  # 10 samples: 12 a step
    data = {"source": str(text)}
    train = {"global_batch": 12, "horizon": 5}
    (_, path), first = resumed(pool, tmp_path, runs.spec(data=data, train=train | {"steps": 1}), 1, ())
    _, then = resumed(pool, tmp_path, runs.spec(data=data, train=train | {"steps": 5}), 2, (path,))
    _, wanted = resumed(pool, tmp_path / "alone", runs.spec(data=data, train=train | {"steps": 5}), 1, ())
    assert first + then == wanted
    assert set(Counter(wanted[:50]).values()) == {5}


def losses(said: list[list[Report]]) -> dict[int, float]:
    return {report.step: report.loss for reports in said for report in reports if isinstance(report, StepDone)}


@pytest.mark.parametrize("layout", [{}, {"dp": 3}, {"tp": 2, "pp": 2}, {"tp": 2, "sequence_parallel": False}])
def test_T15_dropout_is_the_same_in_any_layout_and_after_a_stop(
    pool: Pool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    changes = {"model": {"dropout": 0.1}, "train": SGD | {"global_batch": 6, "horizon": 20, "steps": 20}}
    (whole, _), _ = resumed(pool, tmp_path / "whole", runs.spec(**changes), 1, ())
    half = changes | {"train": changes["train"] | {"steps": 10}}
    (first, path), _ = resumed(pool, tmp_path / "halves", runs.spec(**half), 1, ())
    (then, _), _ = resumed(pool, tmp_path / "halves", runs.spec(layout=layout, **changes), 2, (path,))
    assert losses(first) | losses(then) == pytest.approx(losses(whole), rel=1e-9)
    plain = runs.spec(train=changes["train"] | {"steps": 1})
    (without, _), _ = resumed(pool, tmp_path / "without", plain, 1, ())
    assert losses(without)[1] != pytest.approx(losses(whole)[1], rel=1e-4)


@pytest.mark.parametrize(("layout", "at"), [({"tp": 2}, 1), (EIGHT, 5), ({"dp": 2, "replicate": 2}, 0)])
def test_T16_copies_that_drift_are_found(pool: Pool, layout: dict[str, Any], at: int) -> None:
    name = "layers.3.ffn_norm.weight"
    run = runs.spec(layout=layout, train=SGD | {"learning_rate": 0.1, "global_batch": 2})
    found = pool.run(run.parallel.world, cases.drifting, run, 50, (at, name))
    assert all(before == [] for before, _ in found)
    assert {after for _, afters in found for after in afters} == {f"model.{name}"}


def test_T16_the_running_job_stops_at_drift(pool: Pool, tmp_path: Path) -> None:
    run = runs.spec(layout={"tp": 2, "pp": 2}, train={"steps": 9, "drift_every": 3, "global_batch": 4})
    raised = pool.run(4, cases.drifts, str(tmp_path), run)
    assert set(raised) == {"after step 3 copies that must be equal are not: model.layers.0.ffn_norm.weight on rank 0"}


@pytest.mark.parametrize(
    ("layout", "slots", "problem"),
    [
        ({"tp": 3}, 3, "tp 3 does not divide 8 heads"),
        ({"dp": 2, "micro_batch": 5}, 2, "global_batch 12 is not divisible by micro_batch 5"),
        ({"dp": 3, "tp": 2}, 7, "dp 3 x pp 1 x tp 2 uses 6 of 7 slots"),
    ],
)
def test_T22_an_impossible_layout_is_refused_with_those_that_work(
    layout: dict[str, Any], slots: int, problem: str
) -> None:
    model, train = ModelSpec(**runs.MODEL), TrainSpec(**runs.TRAIN)
    with pytest.raises((ValueError, ValidationError)) as raised:
        check_layout(ParallelLayout(**layout), model, train, slots)
    assert problem in str(raised.value)
    named = re.findall(r"dp (\d+) x pp (\d+) x tp (\d+)", str(raised.value).partition("Layouts that work")[2])
    assert named
    for dp, pp, tp in named:
        works = ParallelLayout(dp=int(dp), pp=int(pp), tp=int(tp))
        check_layout(works, model, train, works.world)


def test_an_evaluation_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("It was a bright cold day. " * 100)
    asked = {"data": [{"source": str(text)}], "every": 2, "batches": 2}
    changes = {"train": {"steps": 6}, "model": {"dropout": 0.1}}
    found = {}
    for name, layout in {
        "one": {},
        "eight": EIGHT,
        "v": {"pp": 2, "vpp": 2, "schedule": "zbv"},
        "zero": {"dp": 3, "zero": 3},
    }.items():
        run = runs.spec(layout=layout, eval=asked, **changes)
        said = pool.run(run.parallel.world, runs.train, str(tmp_path / name), run, 1, ())
        figures = [(report.step, report.loss, report.tokens) for report in said[0] if isinstance(report, Evaluated)]
        assert [(step, tokens) for step, _, tokens in figures] == [(step, 2 * 12 * 16) for step in (2, 4, 6)]
        found[name] = {step: loss for step, loss, _ in figures} | {100 + k: v for k, v in losses(said).items()}
    for figures in found.values():
        assert figures == pytest.approx(found["one"], rel=1e-9)
    plain = pool.run(1, runs.train, str(tmp_path / "plain"), runs.spec(**changes), 1, ())
    assert {100 + k: v for k, v in losses(plain).items()}.items() <= found["one"].items()
    assert [report for report in plain[0] if isinstance(report, Evaluated | Resumed)] == [Resumed(0, None)]
