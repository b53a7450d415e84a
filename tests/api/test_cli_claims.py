"""`phalanx plan claims`, without an API."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from api.cli.main import app
from service.core.plan import claims


def invoke(*words: str) -> Any:
    done = CliRunner().invoke(app, ["plan", "claims", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_line_for_each_claim() -> None:
    assert invoke().splitlines() == [claim.line for claim in claims.every()]


def test_json_is_one_list() -> None:
    found = json.loads(invoke("--json"))
    assert [one["claim"] for one in found] == [claim.claim for claim in claims.every()]
    assert {one["agreed"] for one in found} == {True, False}
    assert all(one["because"] and one["computed"] for one in found)
