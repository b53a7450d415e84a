"""Fits the planner's few rates on published runs, and again without each family of sources; prints or writes them.

    python -m tests.bench.planner_fit --runs published_runs.csv --layers layer_times.csv [--write]

Residuals are logarithms of predicted over measured seconds, of 16-bit dense runs of more than one rank a replica and of
single layers. A family of sources has an error of its own (its software, `FAMILY`) beside that of each row (`ROW`), so
that many rows of one source do not count as many sources. Each rate is held to its prior by its spread
(`service/core/plan/stack.py`). Gauss-Newton on the logarithms of the rates; seconds on one core.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Sequence

from service.core.plan import kernels, layer, network, rows, stack
from service.core.plan.cluster import Cluster
from service.core.plan.cost import Estimator
from service.core.plan.layout import Layout, Recompute
from service.core.plan.rows import Case, Skipped
from service.core.plan.shape import Shape
from service.core.plan.stack import PRIOR, SPREAD, Rates

ROW, FAMILY = 0.15, 0.08
OUTLIER = 3.0  # residuals beyond so many standard deviations of both count no more than this
NAMES = tuple(field.name for field in dataclasses.fields(Rates))
FITTED = pathlib.Path(stack.__file__).with_name("fitted.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measured time and how to predict it."""

    family: str
    measured: float
    predict: Callable[[Rates], float]


def run(case: Case) -> Point:
    def predict(rates: Rates) -> float:
        known = dataclasses.replace(case.stack, rates=rates)
        estimator = Estimator(case.shape, case.global_batch, case.cluster, known, case.precision, case.counted)
        return estimator.estimate(case.layout).step_s

    return Point(case.family, case.measured_s or 0.0, predict)


LAYER = Shape(48, 6144, 64, 64, 96, 24576, 51200, 2048, gated=False, dropout=True, tied=True)
"""The GPT of 22 billion parameters whose layer arXiv 2205.05198 times in table 4."""


def single_layer(row: dict[str, str]) -> Point:
    name = row["experiment"].lower()
    recompute: Recompute = "full" if "full" in name else "attention" if "selective" in name else "none"
    layout = Layout(
        tp=int(row["tp"]), micro_batch=int(row["mbs"]), sequence_parallel="sequence" in name, recompute=recompute
    )
    cluster = Cluster.of(row["gpu"], layout.tp)

    def predict(rates: Rates) -> float:
        known = dataclasses.replace(stack.STACKS["megatron-2022"], rates=rates)
        device = kernels.device(cluster.gpu, known)
        bus = network.bus(cluster, known, layout.tp, 1)
        tokens = float(layout.micro_batch * LAYER.seq_len)
        passes = layer.layer(layer.Rank(LAYER, layout, device, cluster, bus, tokens), False)
        return sum(each.seconds for each in (passes.forward, passes.inputs, passes.weights, passes.again))

    return Point(rows.family(row["source"]), float(row["combined_ms"]) / 1000, predict)


def points(runs: str, layers: str) -> list[Point]:
    found = []
    with pathlib.Path(runs).open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                case = rows.read(number, row)
            except Skipped:
                continue
            if case.measured_s and not case.out_of_scope and not case.doubtful:
                found.append(run(case))
    with pathlib.Path(layers).open() as file:
        found += [single_layer(row) for row in csv.DictReader(file)]
    return found


def rates(logs: Sequence[float]) -> Rates:
    """By logarithms of their ratios to the priors."""
    return Rates(**{name: getattr(PRIOR, name) * math.exp(value) for name, value in zip(NAMES, logs, strict=True)})


def residuals(known: Sequence[Point], logs: Sequence[float]) -> list[float]:
    current = rates(logs)
    return [math.log(point.predict(current) / point.measured) for point in known]


def whitened(known: Sequence[Point], values: Sequence[float]) -> list[float]:
    """In standard deviations, a family's common part by its own."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, point in enumerate(known):
        groups[point.family].append(index)
    out = [0.0] * len(known)
    for members in groups.values():
        mean = sum(values[index] for index in members) / len(members)
        share = ROW / math.hypot(ROW, FAMILY * math.sqrt(len(members)))
        for index in members:
            out[index] = (values[index] - (1 - share) * mean) / ROW
    return out


def jacobian(
    known: Sequence[Point], logs: Sequence[float], base: Sequence[float], step: float = 0.02
) -> list[list[float]]:
    """By column."""
    columns = []
    for place in range(len(logs)):
        moved = [value + step * (index == place) for index, value in enumerate(logs)]
        columns.append([(after - before) / step for after, before in zip(residuals(known, moved), base, strict=True)])
    return columns


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss elimination of a small positive definite system."""
    size = len(right)
    rows_ = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for other in range(pivot + 1, size):
            factor = rows_[other][pivot] / rows_[pivot][pivot]
            rows_[other] = [a - factor * b for a, b in zip(rows_[other], rows_[pivot], strict=True)]
    out = [0.0] * size
    for pivot in reversed(range(size)):
        rest = sum(rows_[pivot][index] * out[index] for index in range(pivot + 1, size))
        out[pivot] = (rows_[pivot][size] - rest) / rows_[pivot][pivot]
    return out


def fit(known: Sequence[Point], logs: Sequence[float], rounds: int) -> list[float]:
    """Gauss-Newton from `logs`; priors are rows of their own."""
    spreads = [getattr(SPREAD, name) for name in NAMES]
    logs = list(logs)
    for _ in range(rounds):
        base = residuals(known, logs)
        columns = [whitened(known, column) for column in jacobian(known, logs, base)]
        errors = whitened(known, base)
        weights = [min(1.0, OUTLIER / max(abs(error), 1e-9)) for error in errors]
        size = len(logs)
        matrix = [
            [
                sum(w * a * b for w, a, b in zip(weights, columns[i], columns[j], strict=True))
                + (spreads[i] ** -2 if i == j else 0.0)
                for j in range(size)
            ]
            for i in range(size)
        ]
        right = [
            -sum(w * a * e for w, a, e in zip(weights, columns[i], errors, strict=True)) - logs[i] * spreads[i] ** -2
            for i in range(size)
        ]
        logs = [value + change for value, change in zip(logs, solve(matrix, right), strict=True)]
    return logs


def named(logs: Sequence[float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(rates(logs)).items()}


def written(everything: dict[str, float], without: dict[str, dict[str, float]]) -> str:
    def table(values: dict[str, float], indent: str) -> str:
        return "".join(f'{indent}"{name}": {value!r},\n' for name, value in values.items())

    parts = "".join(f'    "{family}": {{\n{table(values, " " * 8)}    }},\n' for family, values in without.items())
    return (
        '"""Rates fitted on published runs. Written by `python -m tests.bench.planner_fit --write`; '
        'change nothing by hand."""\n\n'
        f"ALL: dict[str, float] = {{\n{table(everything, ' ' * 4)}}}\n"
        '"""On all families of sources below."""\n\n'
        f"WITHOUT: dict[str, dict[str, float]] = {{\n{parts}}}\n"
        '"""By the family that was left out: what judges its rows."""\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", required=True)
    parser.add_argument("--layers", required=True)
    parser.add_argument("--write", action="store_true", help=f"{FITTED.name} of the package")
    options = parser.parse_args()
    known = points(options.runs, options.layers)
    families = list(dict.fromkeys(point.family for point in known))
    start = fit(known, [0.0] * len(NAMES), 4)
    without = {
        family: named(fit([point for point in known if point.family != family], start, 2)) for family in families
    }
    if options.write:
        FITTED.write_text(written(named(start), without))
    for family in families:
        print(f"{sum(point.family == family for point in known):4} rows of {family}")
    print("rate".ljust(18), "prior".rjust(9), "fitted".rjust(9), " without each family in that order")
    for name in NAMES:
        values = [named(start)[name], *(without[family][name] for family in families)]
        print(name.ljust(18), f"{getattr(PRIOR, name):9.4g}", *(f"{value:9.4g}" for value in values))


if __name__ == "__main__":
    main()
