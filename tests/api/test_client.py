"""The client: answers as views, problems as errors again."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import api.wire
from api.client import Client
from api.wire import Patience
from service.contracts import errors
from service.contracts.job import Phase, parse_job
from tests.api.world import TOKEN, World, job


def test_a_job_goes_there_and_back(world: World) -> None:
    with world.client() as client:
        made = client.submit(parse_job(job()), key="k")
        assert client.submit(job(), key="k").uid == made.uid
        assert client.get(made.uid).spec == made.spec
        assert client.cancel(made.uid).cancel_requested


class Narrower(errors.UserError):
    """Of another part of the program, without a code of its own."""


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        (errors.NotFound, lambda client: client.get("nobody-00000000")),
        (errors.NotFound, lambda client: next(client.logs("nobody-00000000"))),
        (errors.UserError, lambda client: client.submit({**job(), "colour": "red"})),
        (errors.UserError, lambda client: client.submit({**job(), "name": {1, 2}})),
        (errors.UserError, lambda client: next(client.list(phase="lost"))),
    ],
)
def test_problems_are_errors_again(world: World, kind: type[errors.PhalanxError], ask: object) -> None:
    with world.client() as client, pytest.raises(errors.PhalanxError) as raised:
        ask(client)
    assert type(raised.value) is kind
    assert raised.value.message


def test_a_wrong_token_is_told(world: World) -> None:
    with Client(world.url, "wrong") as client, pytest.raises(errors.Unauthorized, match="not the one"):
        client.get("x")


def test_the_field_and_the_hint_come_through(world: World) -> None:
    with world.client() as client, pytest.raises(errors.UserError) as raised:
        client.submit(job({"data.source": "/no/such.txt"}))
    assert raised.value.field == "data.source"
    assert "builtin:topics" in raised.value.hint


def test_what_is_over_is_a_conflict(world: World) -> None:
    uid = world.submit().uid
    world.move(uid, Phase.SUCCEEDED)
    with world.client() as client, pytest.raises(errors.Conflict, match="succeeded"):
        client.cancel(uid)


def test_the_list_hides_its_pages(world: World) -> None:
    made = [world.submit({"name": f"listed{number}"}).uid for number in range(5)]
    with world.client() as client:
        assert [view.uid for view in client.list(page_size=2)][:5] == made[::-1]


def test_wait_sees_the_end_through_a_restart(world: World) -> None:
    uid = world.submit().uid
    found = []
    with world.client() as client:
        waiter = threading.Thread(target=lambda: found.append(client.wait(uid, timeout_s=20)))
        waiter.start()
        world.stop()
        world.move(uid, Phase.SUCCEEDED)
        world.start()
        waiter.join(20)
    assert [view.phase for view in found] == [Phase.SUCCEEDED]


def test_wait_says_where_the_job_is_when_it_gives_up(world: World) -> None:
    uid = world.submit().uid
    with world.client() as client, pytest.raises(errors.ClusterError, match="is queued, not over, after 0 s"):
        client.wait(uid, timeout_s=0)


def test_an_api_that_is_away_is_told(world: World) -> None:
    with Client("http://127.0.0.1:9", TOKEN) as client, pytest.raises(errors.ClusterError) as raised:
        client.get("x")
    assert "http://127.0.0.1:9 does not answer" in raised.value.message
    assert "phalanx up" in raised.value.hint


def test_a_stream_that_stays_away_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.wire, "PATIENCE_S", 0.0)
    uid = world.submit().uid
    with world.client() as client:
        stream = client.events(uid, follow=True)
        next(stream)
        world.stop()
        with pytest.raises(errors.ClusterError, match=r"does not answer|before the job was over"):
            next(stream)
    world.start()


def test_patience_counts_from_the_first_failure_after_a_sign_of_life() -> None:
    patience, error = Patience(60.0), errors.ClusterError("away")
    patience.lose(error, now=1000.0)  # however long it was quiet before
    patience.lose(error, now=1059.0)
    assert list(patience.hearing(iter([": alive"]))) == [": alive"]
    patience.lose(error, now=1100.0)
    with pytest.raises(errors.ClusterError, match="away"):
        patience.lose(error, now=1160.0)


def test_find_reads_the_home_and_is_overruled(world: World, tmp_path: Path) -> None:
    with Client.find(world.home) as client:
        assert list(client.nodes()) == []
    with pytest.raises(errors.ClusterError, match="no API is known"):
        Client.find(tmp_path)
    (tmp_path / "api.json").write_text(json.dumps({"url": "http://127.0.0.1:9"}))
    with pytest.raises(errors.Unauthorized, match="no token"):
        Client.find(tmp_path)
    with Client.find(tmp_path, url=world.url + "/", token=TOKEN) as client:
        assert list(client.nodes()) == []
