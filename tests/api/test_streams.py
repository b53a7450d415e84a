"""Events and logs: pages, streams, and streams that are cut: no gap, nothing twice."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.contracts.job import Phase
from tests.api.world import World, read_stream, until

SSE = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def told(world: World) -> str:
    """A job that is over, with events and three chunks of log from two ranks in two attempts."""
    uid = world.submit().uid
    world.say(uid, "one", "two", "three")
    world.log(uid, "logs/1/n1-0.jsonl", [(0, "a"), (1, "b"), (0, "c \u2028 \x85 d")])
    world.log(uid, "logs/1/n2-0.jsonl", [(1, "e")], node="n2")
    world.log(uid, "logs/2/n1-0.jsonl", [(0, "f"), (1, "g")], attempt=2)
    world.move(uid, Phase.SUCCEEDED)
    return uid


TEXTS = ["a", "b", "c \u2028 \x85 d", "e", "f", "g"]


def test_an_events_page(http: httpx.Client, told: str) -> None:
    page = http.get(f"/v1/jobs/{told}/events").json()
    assert [event["reason"] for event in page["events"]][1:] == ["one", "two", "three", "now succeeded"]
    assert page["events"][0]["type"] == "JobSubmitted"
    assert page["after"] == page["events"][-1]["id"]
    empty = http.get(f"/v1/jobs/{told}/events", params={"after": page["after"]}).json()
    assert empty == {"events": [], "after": page["after"]}
    pair = http.get(f"/v1/jobs/{told}/events", params={"after": page["events"][0]["id"], "limit": 2}).json()
    assert pair["events"] == page["events"][1:3]


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ({}, TEXTS),
        ({"rank": 1}, ["b", "e", "g"]),
        ({"attempt": 2}, ["f", "g"]),
        ({"attempt": 1, "rank": 0}, ["a", "c \u2028 \x85 d"]),
        ({"attempt": 9}, []),
    ],
)
def test_a_logs_page_and_stream(http: httpx.Client, told: str, query: dict[str, int], texts: list[str]) -> None:
    page = http.get(f"/v1/jobs/{told}/logs", params=query).json()
    assert [line["text"] for line in page["lines"]] == texts
    stream = read_stream(http.get(f"/v1/jobs/{told}/logs", params=query, headers=SSE).text)
    assert [said.data["text"] for said in stream[:-1]] == texts
    assert (stream[-1].event, stream[-1].data) == ("end", {"phase": "succeeded"})


def test_small_pages_of_a_log_add_up(http: httpx.Client, told: str) -> None:
    found, after = [], "0:0"
    while lines := (page := http.get(f"/v1/jobs/{told}/logs", params={"after": after, "limit": 2}).json())["lines"]:
        found += [line["text"] for line in lines]
        after = page["after"]
    assert found == TEXTS


@pytest.mark.parametrize("feed", ["events", "logs"])
def test_a_stream_cut_anywhere_goes_on_without_gap_or_double(http: httpx.Client, told: str, feed: str) -> None:
    whole = read_stream(http.get(f"/v1/jobs/{told}/{feed}", headers=SSE).text)
    ids = [said.id for said in whole[:-1]]
    assert len(ids) == len(set(ids)) >= 5
    for number, cursor in enumerate(ids, 1):
        by_header = http.get(f"/v1/jobs/{told}/{feed}", headers={**SSE, "Last-Event-ID": cursor}).text
        by_query = http.get(f"/v1/jobs/{told}/{feed}", params={"follow": True, "after": cursor}).text
        assert read_stream(by_header) == read_stream(by_query) == whole[number:]


@pytest.mark.parametrize("feed", ["events", "logs"])
@pytest.mark.parametrize("cursor", ["x", "-1", "1:", "1:2:3", "9" * 30])
def test_a_bad_cursor_is_refused_before_the_stream_begins(
    http: httpx.Client, told: str, feed: str, cursor: str
) -> None:
    for headers in ({}, SSE):
        answer = http.get(f"/v1/jobs/{told}/{feed}", params={"after": cursor}, headers=headers)
        assert (answer.status_code, answer.json()["field"]) == (422, "after")


def test_a_chunk_that_has_expired_is_told_in_one_line(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    for name in ("a", "b", "c"):
        world.log(uid, f"logs/{name}.jsonl", [(0, f"{name}1"), (0, f"{name}2")])
    Path(world.root, uid, "logs/b.jsonl").unlink()
    lines = http.get(f"/v1/jobs/{uid}/logs").json()["lines"]
    assert [line["text"] for line in lines] == [
        "a1",
        "a2",
        "2 lines of n1 are no longer in storage (logs/b.jsonl)",
        "c1",
        "c2",
    ]
    assert lines[2]["rank"] is None


def test_a_chunk_that_was_cut_short_shows_what_it_has(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    world.log(uid, "logs/a.jsonl", [(0, "whole"), (0, "cut")])
    file = Path(world.root, uid, "logs/a.jsonl")
    file.write_text(file.read_text()[:-9])
    first, second = http.get(f"/v1/jobs/{uid}/logs").json()["lines"]
    assert first["text"] == "whole"
    assert (second["rank"], '"stream"' in second["text"]) == (None, True)


def test_events_are_followed_to_the_end_through_a_restart(world: World) -> None:
    uid = world.submit().uid
    with world.client() as client:
        stream = client.events(uid, follow=True)
        world.say(uid, "one")
        found = [next(stream), next(stream)]
        world.stop()
        world.say(uid, "two", "three")
        world.start()
        found += [next(stream)]
        world.say(uid, "four")
        world.move(uid, Phase.FAILED)
        found += list(stream)
    assert found == [*map(type(found[0]).model_validate, client_rows(world, uid))]
    assert [event.reason for event in found[1:]] == ["one", "two", "three", "four", "now failed"]


def client_rows(world: World, uid: str) -> list[dict[str, object]]:
    names = ("id", "job", "at", "type", "reason", "data")
    return [{name: getattr(row, name) for name in names} for row in world.store.events(uid, 0)]


def test_logs_are_followed_to_the_end_through_a_restart(world: World) -> None:
    uid = world.submit().uid
    world.log(uid, "logs/0.jsonl", [(0, "0"), (0, "1"), (0, "2")])
    with world.client() as client:
        stream = client.logs(uid, follow=True)
        found = [next(stream).text, next(stream).text]
        world.stop()  # in the middle of a chunk
        world.log(uid, "logs/1.jsonl", [(0, "3"), (0, "4")])
        world.start()
        found += [next(stream).text for _ in range(3)]
        world.log(uid, "logs/2.jsonl", [(0, "5")])
        world.move(uid, Phase.CANCELLED)
        found += [line.text for line in stream]
    assert found == ["0", "1", "2", "3", "4", "5"]


def test_a_reader_of_a_running_job_without_follow_gets_what_there_is(world: World) -> None:
    uid = world.submit().uid
    world.move(uid, Phase.RUNNING)
    with world.client() as client:
        assert [event.type for event in client.events(uid)] == ["JobSubmitted", "PhaseChanged"]
        assert list(client.logs(uid)) == []


def test_a_reader_that_leaves_frees_its_stream(world: World) -> None:
    uid = world.submit().uid
    for _ in range(20):
        with world.client() as client:
            stream = client.events(uid, follow=True)
            next(stream)
            stream.close()
    world.stop()  # waits for nothing
    world.start()
    with world.client() as client:
        assert client.get(uid).uid == uid


LINES = {"Accept": "application/x-ndjson"}


def in_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize("feed", ["events", "logs"])
def test_lines_of_json_are_the_same_as_messages_and_go_on_at_any_cursor(
    http: httpx.Client, told: str, feed: str
) -> None:
    said = read_stream(http.get(f"/v1/jobs/{told}/{feed}", headers=SSE).text)
    answer = http.get(f"/v1/jobs/{told}/{feed}", headers=LINES)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    *lines, end = in_lines(answer.text)
    assert [(line["cursor"], line["item"]) for line in lines] == [(one.id, one.data) for one in said[:-1]]
    assert end == {"end": "succeeded"}
    for number, line in enumerate(lines, 1):
        rest = http.get(f"/v1/jobs/{told}/{feed}", params={"after": line["cursor"]}, headers=LINES)
        assert in_lines(rest.text) == [*lines[number:], end]


@pytest.mark.parametrize(
    ("query", "reasons"),
    [
        ({"type": "Said"}, ["one", "two", "three"]),
        ({"type": ["Said", "PhaseChanged"]}, ["one", "two", "three", "now succeeded"]),
        ({"type": "Nothing"}, []),
        ({"since": 1e11}, []),
    ],
)
def test_events_of_some_types_or_times(http: httpx.Client, told: str, query: Any, reasons: list[str]) -> None:
    page = http.get(f"/v1/jobs/{told}/events", params=query).json()
    assert [event["reason"] for event in page["events"]] == reasons
    stream = read_stream(http.get(f"/v1/jobs/{told}/events", params={**query, "follow": True}).text)
    assert [said.data["reason"] for said in stream[:-1]] == reasons


TOLD = [
    ("loading", "info"),
    ("DEBUG:torch: cache", "debug"),
    ("[rank0] WARNING: slow", "warning"),
    ("2026-01-01 ERROR disk", "error"),
    ("Traceback (most recent call last):", "error"),
    ("RuntimeError: bad", "error"),
    ("torch.OutOfMemoryError: CUDA", "error"),
    ("no errors here", "info"),
]


def test_lines_have_a_level_and_are_found_by_it(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    world.log(uid, "logs/a.jsonl", [(0, text) for text, _ in TOLD])
    lines = http.get(f"/v1/jobs/{uid}/logs").json()["lines"]
    assert [(line["text"], line["level"]) for line in lines] == TOLD
    grave = http.get(f"/v1/jobs/{uid}/logs", params={"level": "error"}).json()["lines"]
    assert [line["text"] for line in grave] == [text for text, level in TOLD if level == "error"]
    assert http.get(f"/v1/jobs/{uid}/logs", params={"level": "loud"}).status_code == 422
    assert http.get(f"/v1/jobs/{uid}/logs", params={"since": 2.0}).json()["lines"] == []


def test_many_who_follow_hear_all_once_and_soon(world: World) -> None:
    """Each on its own connection; some come while it goes on."""
    uid = world.submit().uid
    heard: dict[int, list[tuple[str, float]]] = {}

    def follow(number: int) -> None:
        with world.client() as client:
            heard[number] = [(event.reason, time.time() - event.at) for event in client.events(uid, follow=True)]

    readers = [threading.Thread(target=follow, args=(number,)) for number in range(40)]
    for number, reader in enumerate(readers):
        reader.start()
        if number % 4 == 0:
            world.say(uid, f"news {number}")
    until(lambda: len(world.app.state.hub._followers.get(uid, ())) == 40)
    for number in range(40, 60):
        world.say(uid, f"news {number}")
    world.move(uid, Phase.SUCCEEDED)
    for reader in readers:
        reader.join(20)
    expected = [row.reason for row in world.store.events(uid, 0)]
    assert len(heard) == 40
    for said in heard.values():
        assert [reason for reason, _ in said] == expected
        assert max(late for reason, late in said if reason in {f"news {number}" for number in range(40, 60)}) < 2.0


def test_who_follows_is_told_when_the_process_is_to_end(http: httpx.Client, world: World) -> None:
    uid = world.submit().uid
    with http.stream("GET", f"/v1/jobs/{uid}/events", params={"follow": True}, headers=LINES) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["item"]["type"] == "JobSubmitted"
        assert http.get("/readyz").status_code == 200
        world.app.state.hub.close()
        assert list(lines) == []  # it is cut, and not at its end
    assert http.get("/readyz").status_code == 503
    assert http.get(f"/v1/jobs/{uid}").status_code == 200
    world.stop()
    world.start()
    assert http.get("/readyz").status_code == 200
