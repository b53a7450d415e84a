"""What breaks when: a failure of one node of a fleet, or of a process on it; and failures drawn from rates."""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.resources
import itertools
import random
from collections.abc import Sequence
from typing import Literal

from service.contracts.errors import UserError
from service.sim import clock

Kind = Literal["node", "process", "hang"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Failure:
    at: int  # microseconds
    node: int  # index in the fleet
    kind: Kind = "node"
    cause: str = ""
    back: int = 0  # when the node is up again; for kind "node"


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Of one cause. Failures come at exponential times, and so do repairs."""

    cause: str
    kind: Kind
    per_slot_hour: float = 0.0
    per_node_hour: float = 0.0
    repair_h: float = 0.0  # mean, of a node


@functools.cache
def tables() -> dict[str, tuple[Rate, ...]]:
    """The rates that come with the package, by the name of where they were counted. Sources are in the file."""
    text = importlib.resources.files("service.sim").joinpath("failure_rates.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, list[Rate]] = {}
    for row in rows:
        rate = Rate(
            row["cause"],
            _kind(row["kind"]),
            float(row["per_million_slot_hours"] or 0) / 1e6,
            float(row["per_thousand_node_days"] or 0) / 1e3 / 24,
            float(row["repair_h"] or 0),
        )
        found.setdefault(row["counted"], []).append(rate)
    return {name: tuple(rates) for name, rates in found.items()}


def table(name: str) -> tuple[Rate, ...]:
    if name not in tables():
        raise UserError(f"no failure rates are known of {name!r}", hint=f"there are {', '.join(tables())}")
    return tables()[name]


def drawn(rates: Sequence[Rate], slots: Sequence[int], span: int, seed: int) -> list[Failure]:
    """Of a fleet whose nodes have so many slots, in `span` microseconds, in the order of time."""
    failures: list[Failure] = []
    by_slot = list(itertools.accumulate(slots))
    by_node = list(range(1, len(slots) + 1))
    for rate in rates:
        for weights, each in ((by_slot, rate.per_slot_hour), (by_node, rate.per_node_hour)):
            if each:
                failures += _of_cause(rate, each / clock.HOUR, weights, span, random.Random(f"{seed} {rate.cause}"))
    return sorted(failures)


def _of_cause(rate: Rate, each: float, weights: Sequence[int], span: int, chance: random.Random) -> list[Failure]:
    failures, at = [], 0.0
    while (at := at + chance.expovariate(each * weights[-1])) < span:
        [node] = chance.choices(range(len(weights)), cum_weights=weights)
        repair = chance.expovariate(1 / rate.repair_h) * clock.HOUR if rate.kind == "node" and rate.repair_h else 0
        failures.append(Failure(round(at), node, rate.kind, rate.cause, round(at + repair)))
    return failures


def _kind(text: str) -> Kind:
    kinds: dict[str, Kind] = {"node": "node", "process": "process", "hang": "hang"}
    return kinds[text]
