"""How often who may ask."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from api.pace import BURST_S, Pace
from api.rules import Rules
from tests.api.world import TOKEN, World


@pytest.mark.parametrize("per_s", [0.1, 2.0, 100.0])
def test_so_many_at_once_and_then_so_many_a_second(per_s: float) -> None:
    now = [50.0]
    pace = Pace(per_s, lambda: now[0])
    burst = max(1, int(per_s * BURST_S))
    assert [pace.wait_s("a") for _ in range(burst)] == [0] * burst
    wait_s = pace.wait_s("a")
    assert wait_s >= 1 / per_s - 1
    assert pace.wait_s("b") == 0  # everybody has his own
    now[0] += wait_s
    assert pace.wait_s("a") == 0


def test_who_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path)) as world:
        world.stop()
        world.app = create_app(world.store, TOKEN, world.root, Rules(per_s=1.0))
        world.start()
        with httpx.Client(base_url=world.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            answers = [client.get("/v1/jobs") for _ in range(8)]
            refused = [answer for answer in answers if answer.status_code == 429]
            assert len(refused) >= 2
            assert refused[0].json()["reason"] == "too_many"
            assert 1 <= int(refused[0].headers["Retry-After"]) <= 2
            assert client.get("/healthz").status_code == 200
