"""`phalanx plan evaluate`: the cost model against runs that others measured; as figures, a table, a picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.contracts import errors
from service.core.plan import evaluate as evaluation
from service.core.plan import scatter
from service.core.plan.evaluate import Judged

BEGIN, END = "<!-- evaluation: phalanx plan evaluate RUNS --readme README.md -->", "<!-- /evaluation -->"
PICTURE = "service/core/plan/evaluation.svg"

Out = Annotated[Path | None, typer.Option(metavar="FILE")]


def evaluate(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="CSV, a run a row")],
    as_json: Annotated[bool, typer.Option("--json", help="end with the figures as one line of JSON")] = False,
    svg: Annotated[Path | None, typer.Option(help="write a picture: predicted over measured step times")] = None,
    readme: Annotated[Path | None, typer.Option(help="write table and picture into this file's marked place")] = None,
) -> None:
    """Predict published runs from what was not fitted on them, and tell how far off that is."""
    judged, figures = _judged(runs)
    for line in evaluation.lines(figures):
        typer.echo(line)
    scope = [each for each in judged if each.case.measured_s is not None and not each.case.out_of_scope]
    if svg is not None:
        _drawn(scope, svg)
    if readme is not None:
        _written(figures, scope, readme)
    if as_json:
        typer.echo(json.dumps(figures))


def _judged(runs: Path) -> tuple[list[Judged], dict[str, Any]]:
    try:
        with runs.open(newline="", encoding="utf-8") as file:
            cases, skipped = evaluation.read(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise errors.UserError(f"{runs} can't be read: {error}", hint="name a CSV file with a run a row") from None
    if not cases:
        why = f"; the first was left out because of {skipped[0][2]}" if skipped else ""
        raise errors.UserError(
            f"{runs} has no run that can be judged{why}",
            hint="a row needs source, sizes of the model, gpu, n_gpus, tp, pp, dp, gbs, mbs, and iter_time_s or memory",
        )
    judged = [evaluation.judge(case) for case in cases]
    return judged, evaluation.figures(judged, skipped)


def _drawn(scope: list[Judged], to: Path) -> None:
    if not scope:
        raise errors.UserError("no run is in scope of the picture", hint="16-bit dense runs with tp x pp > 1 are")
    to.write_text(scatter.drawn(scope), encoding="utf-8")


def _written(figures: dict[str, Any], scope: list[Judged], readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    head, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        raise errors.UserError(f"{readme} has no place for the table", hint=f"it goes between {BEGIN} and {END}")
    _drawn(scope, readme.parent / PICTURE)
    tail = rest.partition(END)[2]
    readme.write_text(f"{head}{BEGIN}\n{_table(figures)}\n{END}{tail}", encoding="utf-8")


def _table(figures: dict[str, Any]) -> str:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}%"

    step, regret, probe, memory = (figures[name] for name in ("step_time", "regret", "probed", "memory"))
    rows = [_row(f"all {figures['rows_in_scope']}", step, memory)]
    for each in figures["by_source"]:
        if each["in_scope"] and each["rows"]:
            rows.append(_row(f"{each['rows']} of {each['source']}", each["step_time"], each["memory"]))
    told = (
        f"With one measured run of a source as a probe: mean {_percent(probe['mean'])}, p90 {_percent(probe['p90'])}.",
        f"In {regret['groups']} sweeps of layouts the chosen one was {_percent(regret['mean'])} slower than the best",
        f"measured in the mean, {_percent(regret['worst'])} at worst; Kendall's tau {step['kendall_tau']}.",
        f"{figures['rows_used']} runs were used, {figures['rows_skipped']} skipped, each with its reason (`--json`).",
    )
    return "\n".join(
        [
            f"![predicted over measured step times]({PICTURE})",
            "",
            "| runs (16-bit, dense, tp x pp > 1) | step time, mean error | p90 | memory, mean error |",
            "|---|---|---|---|",
            *rows,
            "",
            *told,
        ]
    )


def _row(what: str, times: dict[str, Any], memory: dict[str, Any]) -> str:
    return f"| {what} | {_percent(times['mean'])} | {_percent(times['p90'])} | {_percent(memory['mean'])} |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"
