"""Alive is one thing, able to serve another; and what is said when the inside fails."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import httpx
import pytest

from api import logs
from tests.api.world import TOKEN, World


def test_healthy(world: World) -> None:
    for path in ("/healthz", "/readyz"):
        answer = httpx.get(world.url + path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_store_that_is_gone_is_told_and_the_process_stays_alive(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        world.store.close()
        for file in tmp_path.glob("store.sqlite3*"):
            file.write_bytes(b"not a database" * 100)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/readyz", "/v1/jobs", "/v1/jobs/x-1/events?follow=true"):
            answer = httpx.get(world.url + path, headers=headers)
            assert (answer.status_code, answer.json()["reason"]) == (503, "store_unavailable")
            assert int(answer.headers["Retry-After"]) > 0
        assert "sqlite" not in httpx.get(world.url + "/readyz").text  # asked without a token
        assert httpx.get(world.url + "/healthz").status_code == 200
    finally:
        world.close()


def test_an_unforeseen_error_tells_nothing_but_where_to_look(
    world: World, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    uid = world.submit().uid
    row = {"at": 1.0}  # a line that lacks what every line has
    world.log(uid, "logs/a.jsonl", [(0, "x")])
    Path(world.root, uid, "logs/a.jsonl").write_text(json.dumps(row) + "\n")
    answer = http.get(f"/v1/jobs/{uid}/logs", headers={"X-Request-Id": "broken-1"})
    assert (answer.status_code, answer.headers["Content-Type"]) == (500, "application/problem+json")
    assert (answer.json()["reason"], answer.headers["X-Request-Id"]) == ("internal", "broken-1")
    assert "KeyError" not in answer.text
    assert any("KeyError" in (record.exc_text or "") or record.exc_info for record in caplog.records)


def test_a_log_line_is_one_json_object() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("phalanx.api", logging.ERROR, "", 0, "it %s", ("broke",), sys.exc_info())
    record.data = {"request_id": "r1"}
    text = logs.JsonLines().format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["message"], line["request_id"]) == ("error", "it broke", "r1")
    assert "ValueError" in line["traceback"]
