import dataclasses

import pytest

from service.core.plan import evaluate
from service.core.plan.evaluate import Judged
from tests.service.core.plan.test_rows import ROW

SWEEP = [
    {**ROW, "tp": tp, "pp": pp, "vpp": "", "schedule": "1F1B", "iter_time_s": seconds, "mem_gb_per_gpu": "40"}
    for tp, pp, seconds in (("8", "2", "13"), ("8", "4", "14"), ("8", "8", "16"), ("1", "1", "99"))
]
BROKEN = {**ROW, "hidden": ""}


def judged(*pairs: tuple[float, float], sources: str = "aaaaaaaa") -> list[Judged]:
    """Measured and estimated seconds, of one sweep a source."""
    case = evaluate.read([ROW])[0][0]
    known = evaluate.judge(case)
    out = []
    for place, ((measured, estimated), source) in enumerate(zip(pairs, sources, strict=False)):
        layout = dataclasses.replace(case.layout, accumulation=place + 1)
        other = dataclasses.replace(case, measured_s=measured, layout=layout, source=source)
        out.append(Judged(other, dataclasses.replace(known.estimate, step_s=estimated)))
    return out


def test_figures_of_a_table():
    found = evaluate.evaluate([*SWEEP, BROKEN])
    assert (found["rows_used"], found["rows_in_scope"], found["rows_skipped"]) == (4, 3, 1)
    assert found["skipped"] == [{"row": 4, "source": ROW["source"], "reason": "hidden is not given"}]
    assert found["out_of_scope"] == {"neither tensor nor pipeline parallel": 1}
    assert found["regret"] == {"mean": 0.0, "worst": 0.0, "groups": 1}
    assert found["step_time"]["kendall_tau"] == 1.0
    assert 0 < found["step_time"]["median"] <= found["step_time"]["p90"] <= found["step_time"]["worst"]
    assert found["memory"]["mean"] is not None
    assert [(each["in_scope"], each["rows"]) for each in found["by_source"]] == [(True, 3), (False, 1)]


def test_a_table_for_people_says_all():
    text = "\n".join(evaluate.lines(evaluate.evaluate([*SWEEP, BROKEN])))
    assert "4 rows used, 3 of them in scope of the bars; 1 skipped" in text
    assert "(out of scope)" in text
    assert f"   1 skipped, hidden is not given: {ROW['source']}" in text
    assert evaluate.lines(evaluate.evaluate([]))[0].startswith("0 rows used")


def test_cells_that_are_missing_are_empty():
    short = dict.fromkeys(("source", "notes", "model", "doubtful", "zero_note", "schedule"))
    cases, skipped = evaluate.read([{**ROW, **short}, {**ROW, "zero_stage": "1.0", "seq_parallel": "yes"}])
    assert not skipped
    assert cases[1].layout.zero == 1
    assert cases[1].layout.sequence_parallel


def test_an_empty_table_has_no_figures():
    found = evaluate.evaluate([])
    assert found["rows_used"] == 0
    assert found["step_time"]["mean"] is None
    assert found["regret"] == {"mean": None, "worst": None, "groups": 0}


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 0.3333),
        ([(1, 10), (1, 20)], None),  # measured alike: nothing to order
    ],
)
def test_kendall(pairs, tau):
    assert evaluate.kendall(judged(*pairs)) == tau


@pytest.mark.parametrize(
    ("pairs", "mean", "groups"),
    [
        ([(10, 1), (11, 2), (12, 3)], 0.0, 1),
        ([(10, 3), (11, 1), (12, 2)], 0.1, 1),  # the pick is 11, the best 10
        ([(10, 1), (11, 2)], None, 0),  # two layouts are no sweep
    ],
)
def test_regret(pairs, mean, groups):
    found = evaluate.regret(judged(*pairs))
    assert (found["mean"], found["groups"]) == (mean, groups)


def test_sweeps_of_two_sources_are_not_compared():
    assert evaluate.regret(judged((1, 9), (2, 8), (3, 7), sources="aab"))["groups"] == 0


def test_a_probe_takes_a_source_s_bias_away():
    assert evaluate.probed(judged((1, 2), (2, 4), (4, 8))) == {"mean": 0.0, "p90": 0.0}
    assert evaluate.probed(judged((1, 2), (2, 2)))["mean"] == 0.5
    assert evaluate.probed(judged((1, 2)))["mean"] is None


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2.5), (0.9, 3.7), (1.0, 4)])
def test_quantile(share, value):
    assert evaluate.quantile([1, 2, 3, 4], share) == pytest.approx(value)


def test_a_family_is_judged_with_rates_it_had_no_part_in():
    case = evaluate.read([{**ROW, "source": "NVIDIA/dgxc-benchmarking v25.04.02"}])[0][0]
    assert evaluate.judge(case).estimate.step_s != evaluate.judge(case, blind=False).estimate.step_s
