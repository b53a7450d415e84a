"""The cost model against published runs: how far off it is, by source, and how good its choices would have been.

Pure: rows of text in, figures out. A row is never judged with rates that its own family of sources was fitted on:
`fitted.WITHOUT` has those of each family left out, and other sources get `fitted.ALL`, which has none of their rows.
That is as blind as it gets: the priors of the rates and what each stack does were written down by people who had seen
the published table.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from service.core.plan import rows, stack
from service.core.plan.columns import Row, Skipped
from service.core.plan.cost import Estimate, Estimator
from service.core.plan.rows import Case


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    estimate: Estimate

    @property
    def error(self) -> float:
        """Of step time: 0.1 is a tenth too slow."""
        assert self.case.measured_s is not None
        return self.estimate.step_s / self.case.measured_s - 1

    @property
    def memory_error(self) -> float:
        assert self.case.measured_bytes is not None
        return self.estimate.memory_bytes / self.case.measured_bytes - 1


def read(table: Iterable[Row]) -> tuple[list[Case], list[tuple[int, str, str]]]:
    """Cases, and rows that are none: number, source, reason."""
    cases, skipped = [], []
    for number, row in enumerate(table):
        try:
            cases.append(rows.read(number, {column: cell or "" for column, cell in row.items() if column}))
        except Skipped as why:
            skipped.append((number, row.get("source", ""), str(why)))
    return cases, skipped


def judge(case: Case, blind: bool = True) -> Judged:
    """`blind`: with rates that this case's family had no part in."""
    fitted = stack.fit(case.stack, case.family if blind else "")
    estimator = Estimator(case.shape, case.global_batch, case.cluster, fitted, case.precision, case.counted)
    return Judged(case, estimator.estimate(case.layout))


def evaluate(table: Iterable[Row]) -> dict[str, Any]:
    """The figures that `phalanx plan evaluate --json` prints."""
    cases, skipped = read(table)
    return figures([judge(case) for case in cases], skipped)


def figures(judged: Sequence[Judged], skipped: Sequence[tuple[int, str, str]]) -> dict[str, Any]:
    timed = [each for each in judged if each.case.measured_s is not None]
    scope = [each for each in timed if not each.case.out_of_scope]
    stored = [each for each in judged if each.case.measured_bytes is not None]
    inside = [each for each in stored if not each.case.out_of_scope]
    return {
        "rows_used": len(judged),
        "rows_in_scope": len(scope),
        "rows_skipped": len(skipped),
        "skipped": [{"row": number, "source": source, "reason": why} for number, source, why in skipped],
        "out_of_scope": dict(_counts(each.case.out_of_scope for each in timed if each.case.out_of_scope)),
        "step_time": _errors([each.error for each in scope]) | {"kendall_tau": kendall(scope)},
        "regret": regret(scope),
        "probed": probed(scope),
        "memory": _errors([each.memory_error for each in inside]),
        "by_source": by_source(timed, stored),
    }


def by_source(timed: Sequence[Judged], stored: Sequence[Judged]) -> list[dict[str, Any]]:
    """Of every source, rows in scope of the bars and out of it apart."""
    found = []
    names = dict.fromkeys(each.case.source for each in (*timed, *stored))
    for name, inside in itertools.product(names, (True, False)):

        def mine(judged: Sequence[Judged], name: str = name, inside: bool = inside) -> list[Judged]:
            return [each for each in judged if each.case.source == name and inside is not bool(each.case.out_of_scope)]

        times, sizes = mine(timed), mine(stored)
        if times or sizes:
            found.append(
                {
                    "source": name,
                    "in_scope": inside,
                    "rows": len(times),
                    "step_time": _errors([each.error for each in times]),
                    "bias": _rounded(statistics.median(each.error for each in times)) if times else None,
                    "memory_rows": len(sizes),
                    "memory": _errors([each.memory_error for each in sizes]),
                }
            )
    return found


def _errors(errors: Sequence[float]) -> dict[str, float | None]:
    if not errors:
        return {"mean": None, "median": None, "p90": None, "worst": None}
    sizes = sorted(abs(error) for error in errors)
    return {
        "mean": _rounded(statistics.fmean(sizes)),
        "median": _rounded(statistics.median(sizes)),
        "p90": _rounded(quantile(sizes, 0.9)),
        "worst": _rounded(sizes[-1]),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _rounded(value: float) -> float:
    return round(value, 4)


def _counts(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for value in values:
        counts[value] += 1
    return counts


def _sweeps(judged: Sequence[Judged], least: int) -> list[list[Judged]]:
    groups: dict[tuple[object, ...], list[Judged]] = defaultdict(list)
    for each in judged:
        groups[each.case.sweep].append(each)
    return [group for group in groups.values() if len({each.case.layout for each in group}) >= least]


def kendall(judged: Sequence[Judged]) -> float | None:
    """Tau-a over all pairs of layouts within a source's sweeps; pairs measured alike are left out."""
    agree = total = 0
    for group in _sweeps(judged, 2):
        for one, other in itertools.combinations(group, 2):
            measured = (one.case.measured_s or 0.0) - (other.case.measured_s or 0.0)
            said = one.estimate.step_s - other.estimate.step_s
            if measured and one.case.layout != other.case.layout:
                total += 1
                agree += 1 if measured * said > 0 else -1
    return _rounded(agree / total) if total else None


def regret(judged: Sequence[Judged]) -> dict[str, Any]:
    """In each sweep of three layouts or more: what the layout said to be fastest lost to the best."""
    losses = []
    for group in _sweeps(judged, 3):
        chosen = min(group, key=lambda each: each.estimate.step_s)
        best = min(each.case.measured_s or 0.0 for each in group)
        losses.append((chosen.case.measured_s or 0.0) / best - 1)
    return {
        "mean": _rounded(statistics.fmean(losses)) if losses else None,
        "worst": _rounded(max(losses)) if losses else None,
        "groups": len(losses),
    }


def probed(judged: Sequence[Judged]) -> dict[str, float | None]:
    """Errors after the first row of each source and GPU has set a scale; that row is left out, and so are sources with
    one row."""
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for each in judged:
        groups[each.case.source, each.case.cluster.gpu.name].append(each)
    errors = []
    for group in groups.values():
        probe = group[0]
        errors += [(1 + each.error) / (1 + probe.error) - 1 for each in group if each is not probe]
    found = _errors(errors)
    return {"mean": found["mean"], "p90": found["p90"]}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as a table for people."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    step, regrets, probe, memory = (figures[name] for name in ("step_time", "regret", "probed", "memory"))
    rows_ = [
        f"{figures['rows_used']} rows used, {figures['rows_in_scope']} of them in scope of the bars; "
        f"{figures['rows_skipped']} skipped",
        f"step time: mean {percent(step['mean'])}, median {percent(step['median'])}, p90 {percent(step['p90'])}, "
        f"worst {percent(step['worst'])}, Kendall's tau {step['kendall_tau']}",
        f"with one probe a source: mean {percent(probe['mean'])}, p90 {percent(probe['p90'])}",
        f"regret: mean {percent(regrets['mean'])}, worst {percent(regrets['worst'])} in {regrets['groups']} sweeps",
        f"memory: mean {percent(memory['mean'])}, p90 {percent(memory['p90'])}, worst {percent(memory['worst'])}",
        "",
        "rows  mean   p90   bias  memory  source",
    ]
    for each in figures["by_source"]:
        times, sizes = each["step_time"], each["memory"]
        scope = "" if each["in_scope"] else " (out of scope)"
        rows_.append(
            f"{each['rows']:4} {percent(times['mean']):>6} {percent(times['p90']):>6} {percent(each['bias']):>6} "
            f"{percent(sizes['mean']):>6}  {each['source']}{scope}"
        )
    reasons = _counts(f"{each['reason']}: {each['source']}" for each in figures["skipped"])
    return [*rows_, "", *(f"{count:4} skipped, {reason}" for reason, count in reasons.items())]
