"""Another size by request: tried without doing it, asked for, refused with what would work."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.contracts import errors
from service.contracts.job import Phase
from tests.api.world import World

LAYOUT = {"parallel": {"dp": 2, "tp": 2}}


def asked(world: World, uid: str) -> list[dict[str, Any]]:
    return [dict(intent.data) for intent in world.store.intents() if intent.job == uid and intent.kind == "rescale"]


def test_a_dry_run_tells_and_changes_nothing(world: World) -> None:
    uid = world.submit(LAYOUT).uid
    with world.client() as client:
        told = client.rescale(uid, 2, dry_run=True)
    assert (told.asked, asked(world, uid)) == (False, [])
    assert told.possible == (told.layout is not None)
    assert told.reason


def test_what_is_asked_is_left_for_the_controller(world: World) -> None:
    uid = world.submit(LAYOUT).uid
    with world.client() as client:
        assert client.rescale(uid, 2).asked
        assert client.rescale(uid, 4, parallel={"dp": 1, "pp": 2, "tp": 2}).asked
    first, second = asked(world, uid)
    assert first == {"slots": 2, "layout": None}
    assert (second["slots"], second["layout"]["pp"]) == (4, 2)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"slots": 3}, "can't be made one of 3 slots by its dp alone"),
        ({"slots": 0}, "slots"),
        ({}, "slots"),
        ({"slots": 4, "other": 1}, "other"),
        ({"slots": 4, "parallel": {"dp": 0}}, "dp"),
    ],
)
def test_a_size_that_can_never_be_is_refused(world: World, http: httpx.Client, body: dict[str, Any], says: str) -> None:
    uid = world.submit(LAYOUT).uid
    answer = http.post(f"/v1/jobs/{uid}:rescale", json=body)
    assert answer.status_code == 422
    assert says in answer.text
    assert asked(world, uid) == []


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.CANCELLING])
def test_a_job_that_ends_keeps_its_size(world: World, phase: Phase) -> None:
    uid = world.submit(LAYOUT).uid
    world.move(uid, phase)
    with world.client() as client, pytest.raises(errors.Conflict, match="can't be rescaled any more"):
        client.rescale(uid, 2)


def test_a_job_that_is_not_there(world: World) -> None:
    with world.client() as client, pytest.raises(errors.NotFound):
        client.rescale("none", 2)
