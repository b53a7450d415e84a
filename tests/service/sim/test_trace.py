"""Recorded faults, in small files of each form, and on fleets of other sizes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from service.contracts.errors import UserError
from service.sim import clock, trace
from service.sim.trace import Outage, Trace
from tests.service.sim import world

DAY = clock.DAY


def event(node: str, at: float, end: bool = False, cause: str = "GPU") -> dict[str, object]:
    kind = {"Level": "Hardware Failure", "Class": cause, "Desc": ""}
    return {"node_id": node, "event_time": at, "event_type": "fault_end" if end else "fault_start", "fault_type": kind}


def hours(*spans: tuple[float, float]) -> tuple[Outage, ...]:
    return tuple(Outage(round(a * clock.HOUR), round(b * clock.HOUR), "preemption") for a, b in spans)


def test_faults_and_repairs_of_named_nodes(tmp_path: Path) -> None:
    """Two faults of one node that overlap are one outage."""
    path = tmp_path / "trace.json"
    events = [
        event("a", 1, cause="NIC"), event("b", 1), event("a", 1.5), event("a", 2, True), event("a", 2.5, True),
        event("b", 4, True),
    ]  # fmt: skip
    path.write_text(json.dumps(events))
    found = trace.read(path)
    assert len(found.nodes) == trace.INFINITE_HBD_NODES
    assert found.nodes[:3] == ((Outage(DAY, 5 * DAY // 2, "NIC"),), (Outage(DAY, 4 * DAY, "GPU"),), ())
    assert (found.span, found.outages) == (4 * DAY, 2)


def test_spot_instances_by_name(tmp_path: Path) -> None:
    """Seats: one instance comes at once, another after an hour; the first goes after two, a third comes after three."""
    path = tmp_path / "spot.csv"
    hour = 3_600_000
    rows = [
        (0, "add", "a"),
        (hour, "add", "b"),
        (2 * hour, "remove", "a"),
        (3 * hour, "add", "c"),
        (4 * hour, "remove", "b"),
    ]
    path.write_text("".join(f"{at},{what},{name}\n" for at, what, name in rows))
    found = trace.read(path)
    assert found.nodes[0] == hours((2, 3))
    assert [(one.start, one.end) for one in found.nodes[1]] == [(0, clock.HOUR)]
    assert found.span == 4 * clock.HOUR


def test_spot_instances_by_count(tmp_path: Path) -> None:
    path = tmp_path / "spot.txt"
    rows = [("10:00:00", 3), ("11:00:00", 1), ("11:30:00", 1), ("12:00:00", 2), ("14:00:00", 3)]
    path.write_text("".join(f"2021-12-11, {time}, {count}\n" for time, count in rows))
    found = trace.read(path)
    spans = sorted((one.start, one.end) for node in found.nodes for one in node)
    assert spans == [(clock.HOUR, 2 * clock.HOUR), (clock.HOUR, 4 * clock.HOUR)]
    assert found.span == 4 * clock.HOUR


@pytest.mark.parametrize("text", ["", "hello", "[]", "[1]", "1,2\n", "0,add,a\n", "x,remove,y\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    with pytest.raises(UserError):
        trace.read(path)
    with pytest.raises(UserError):
        trace.read(tmp_path / "none")


SMALL = Trace(
    tuple((Outage(hour * clock.HOUR, (hour + 2) * clock.HOUR, "fan"),) if hour % 2 else () for hour in range(1, 9)),
    10 * clock.HOUR,
)


def test_a_fleet_of_the_traces_size_has_its_nodes() -> None:
    found = trace.spread(SMALL, 8, 10 * clock.HOUR, seed=5)
    assert [(one.at // clock.HOUR, one.node, one.back // clock.HOUR) for one in found] == [
        (1, 0, 3), (3, 2, 5), (5, 4, 7), (7, 6, 9),
    ]  # fmt: skip
    again = trace.spread(SMALL, 8, 25 * clock.HOUR, seed=5)
    assert [one.at // clock.HOUR for one in again if one.node == 0] == [1, 11, 21]


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_a_larger_fleet_fails_at_the_traces_rate(copies: int, seed: int) -> None:
    """In as long as the trace takes each copy has each outage once; one that its beginning cuts is in two parts."""
    found = trace.spread(SMALL, 8 * copies, SMALL.span, seed)
    downtime = sum(min(one.back, SMALL.span) - one.at for one in found)
    assert downtime == copies * 4 * 2 * clock.HOUR
    assert sum(one.at > 0 for one in found) == pytest.approx(copies * SMALL.outages, abs=1)
    assert {one.node // 8 for one in found} == set(range(copies))
    assert len({one.at for one in found if one.at > 0}) > SMALL.outages, "copies don't fail together"


def test_a_smaller_fleet_is_a_sample() -> None:
    """Each node is in 3 of 8 samples."""
    many = [trace.spread(SMALL, 3, SMALL.span, seed) for seed in range(400)]
    assert sum(one.at > 0 for found in many for one in found) == pytest.approx(400 * 3 / 8 * SMALL.outages, rel=0.1)


@pytest.mark.skipif(not world.TRACES.exists(), reason="the recorded faults are not beside the repository")
@pytest.mark.parametrize(
    ("name", "nodes", "outages", "days"),
    [
        ("infinitehbd/fault_trace.json", 400, 582, 348.98),  # 584 faults, of which two overlap others
        ("bamboo/traces/p3-trace.csv", 32, 180, 0.474),
        ("bamboo/traces/gcloud/a100x1-east1b.txt", 64, 163, 1.12),
    ],
)
def test_recorded_ones_are_read(name: str, nodes: int, outages: int, days: float) -> None:
    found = trace.read(world.TRACES / name)
    assert (len(found.nodes), found.outages) == (nodes, outages)
    assert found.span / DAY == pytest.approx(days, rel=0.01)
    for node in found.nodes:
        assert all(outage.start <= outage.end for outage in node)
        assert all(one.end < other.start for one, other in itertools.pairwise(node))


@pytest.mark.skipif(not world.TRACES.exists(), reason="the recorded faults are not beside the repository")
def test_the_recorded_rate_is_reproduced_on_2048_nodes() -> None:
    """5.12 copies in as long as the trace: 582 outages each, and 48 of 400 nodes' of the last."""
    recorded = trace.read(world.TRACES / "infinitehbd/fault_trace.json")
    found = trace.spread(recorded, 2048, recorded.span, seed=0)
    assert sum(one.at > 0 for one in found) == pytest.approx(582 * 2048 / 400, rel=0.03)
    moments = Counter(one.at for one in found if one.at > 0)
    assert len(moments) == pytest.approx(527 * 2048 / 400, rel=0.05), "copies don't fail together"
