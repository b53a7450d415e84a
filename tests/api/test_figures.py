"""Metrics and nodes as they are told."""

from __future__ import annotations

import httpx
import pytest

from service.contracts.errors import NotFound
from service.store.records import MetricRow
from tests.api.world import World


def test_metrics_go_by_step_and_by_page(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    rows = [MetricRow(uid, step, 1, float(step), {"loss": 6.0 - step, "tokens": 512}) for step in (1, 2, 3)]
    world.commit(metrics=rows)
    world.commit(metrics=[MetricRow(uid, 3, 2, 9.0, {"loss": float("nan"), "tokens": 512})])
    page = http.get(f"/v1/jobs/{uid}/metrics").json()
    assert page["steps"][0] == {"step": 1, "attempt": 1, "at": 1.0, "loss": 5.0, "tokens": 512}
    assert page["steps"][2] == {"step": 3, "attempt": 2, "at": 9.0, "loss": None, "tokens": 512}
    rest = http.get(f"/v1/jobs/{uid}/metrics", params={"after_step": 1, "limit": 1}).json()
    assert (rest["steps"], rest["after_step"]) == (page["steps"][1:2], 2)
    with world.client() as client:
        assert [(row.step, row.loss) for row in client.metrics(uid)] == [(1, 5.0), (2, 4.0), (3, None)]


def test_nodes(world: World) -> None:
    with world.client() as client, world.fleet(4, 2):
        assert [(node.name, node.slots, node.device) for node in client.nodes()] == [
            ("n1", 4, "cpu"),
            ("n2", 2, "cpu"),
        ]


def test_a_node_is_forgiven_once_the_controller_says_so(http: httpx.Client, world: World) -> None:
    with world.client() as client, world.fleet(4, 2):
        world.commit(health={"n2": {"excluded": "5 losses within 60 minutes"}})
        assert [node.barred for node in client.nodes()] == [
            None,
            "n2 is excluded: 5 losses within 60 minutes",
        ]
        client.forgive("n2")
        client.forgive("n2")  # twice is once
        assert world.store.forgiven() == ["n2"]
        world.commit(health={}, forgiven=["n2"])
        assert world.store.forgiven() == []
        assert [node.barred for node in client.nodes()] == [None, None]
        with pytest.raises(NotFound, match="no node n3"):
            client.forgive("n3")


def test_all_steps_in_few_points(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    assert http.get(f"/v1/jobs/{uid}/metrics", params={"max_points": 10}).json()["steps"] == []
    spike = {500: 99.0, 777: float("nan")}
    rows = [MetricRow(uid, n, 1, float(n), {"loss": spike.get(n, 2.0 - n / 1000)}) for n in range(1, 1001)]
    world.commit(metrics=rows)
    with world.client() as client:
        found = client.sampled(uid, 10)
    assert [row.step for row in found] == [100 * n for n in range(1, 11)]
    assert sum(row.steps for row in found) == 1000
    assert max(row.loss_max for row in found) == 99.0
    assert found[0].loss_min == pytest.approx(1.9)
    assert found[2].loss == pytest.approx(1.7)
    few = http.get(f"/v1/jobs/{uid}/metrics", params={"max_points": 5000}).json()["steps"]
    assert [row["step"] for row in few] == list(range(1, 1001))
    later = http.get(f"/v1/jobs/{uid}/metrics", params={"max_points": 2, "after_step": 900}).json()["steps"]
    assert [row["step"] for row in later] == [950, 1000]
