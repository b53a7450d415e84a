"""Figures, CSV and picture of a simulation."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from service.sim import report, simulate, timeline
from service.sim.ledger import Use
from service.sim.simulate import Result
from service.sim.stretch import Stall
from tests.service.sim import world
from tests.service.sim.world import down, process


@pytest.fixture(scope="module")
def result() -> Result:
    failures = [down(0, 105, 400), process(2, 700), down(3, 900, 5000)]
    return simulate.run(world.scenario(failures, 2000, nodes=5, snapshot=Stall(2, 500_000), elastic=True))


def test_shares_and_seconds_sum_up(result: Result) -> None:
    told = report.figures(result)
    assert sum(told["shares"].values()) == pytest.approx(1, abs=1e-12)
    assert sum(told["seconds"].values()) == pytest.approx(told["elapsed_s"], abs=1e-6)
    assert told["goodput_available"] + sum(told["loss_available"].values()) == pytest.approx(1, abs=1e-12)
    assert told["goodput_fleet"] == told["shares"]["useful"]
    assert told["incidents"] == {"node_lost": 2, "process_died": 1}
    assert told["attempts"] == 4 + told["grown"]
    assert told["phase"] == "running"


def test_the_csv_has_a_row_a_span(result: Result) -> None:
    rows = list(csv.DictReader(io.StringIO(report.as_csv(result))))
    assert tuple(rows[0]) == report.COLUMNS
    assert len(rows) == len(result.ledger.spans)
    assert (float(rows[0]["start_s"]), float(rows[-1]["end_s"])) == (0, 2000)
    assert {row["slots_alive"] for row in rows} == {"4", "5"}
    assert {row["use"] for row in rows} <= {use.value for use in Use}


def test_the_picture_is_drawn_and_says_what_it_shows(result: Result) -> None:
    text = timeline.drawn(result, "a < b", ["one & two"])
    root = ElementTree.fromstring(text)
    words = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "one & two", "training", "restart"} <= set(words)
    fills = Counter(item.get("fill") for item in root.iter("{http://www.w3.org/2000/svg}rect"))
    restarts = 1 + 3 + result.grown  # at the start, after each fault, before each growth
    assert fills[timeline.COLOURS[Use.RESTART]] == restarts + 1, "and in the legend"
    assert fills[timeline.COLOURS[Use.DETECTION]] == 3 + 1
    [alive] = root.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in alive.get("points", "").split()]
    lost = timeline.TOP + timeline.HEIGHT / 5  # one slot of five
    assert (heights[0], heights[-1]) == (timeline.TOP, lost)
    assert all(timeline.TOP <= height <= lost for height in heights)


def test_a_picture_of_a_long_run_stays_small() -> None:
    failures = [process(0, at, f"fault {at}") for at in range(100, 160_000, 400)]
    spec = world.job().model_copy(update={"budgets": world.job().budgets.model_copy(update={"infrastructure": -1})})
    many = simulate.run(world.scenario(failures, 160_000, spec=spec, snapshot=Stall(1, 0)))
    assert len(many.ledger.spans) > 2000
    assert len(timeline.drawn(many, "long")) < 400_000
