from __future__ import annotations

from pathlib import Path

import pytest

from service import health_policy
from service.contracts.errors import UserError
from service.core import policy
from service.core.policy import CODES, Finding, History


def wanted(source: policy.Source, code: policy.Code, *ats: float) -> list[str]:
    """What the shipped policy does about the same finding at these times."""
    shipped, history = health_policy.read(), ()
    actions: list[str] = []
    for at in ats or (0.0,):
        finding = Finding("n1", 0, source, code, at, value=1e9)
        decided: tuple[History, policy.Decision | None] = policy.decide(shipped, history, finding)
        history = decided[0]
        actions.append(decided[1].action if decided[1] else "-")
    return actions


F10 = [
    ((48,), ["drain"]),
    ((79,), ["reboot"]),
    ((63,), ["reset"]),
    ((94,), ["restart"]),
    ((74, 0.0, 600.0), ["reset", "drain"]),
]


@pytest.mark.parametrize(("found", "actions"), F10, ids=[f"F10-{row[0][0]}" for row in F10])
def test_F10_the_shipped_policy_has_the_right_action(found: tuple[float, ...], actions: list[str]) -> None:
    assert wanted("xid", int(found[0]), *found[1:]) == actions


@pytest.mark.parametrize(
    ("source", "code", "action"),
    [
        ("xid", 13, "log"),
        ("xid", 31, "log"),
        ("xid", 43, "log"),
        ("xid", 45, "log"),
        ("xid", 62, "drain"),
        ("xid", 64, "drain"),
        ("xid", 92, "log"),
        ("xid", 95, "drain"),
        ("xid", 109, "drain"),
        ("xid", 119, "drain"),
        ("xid", 120, "drain"),
        ("xid", 140, "drain"),
        ("xid", 154, "log"),
        ("xid", 4711, "log"),
        ("recovery_action", 1, "drain"),
        ("recovery_action", 2, "reboot"),
        ("recovery_action", 4, "reset"),
        ("recovery_action", 99, "drain"),
        ("remap", "pending", "reset"),
        ("remap", "failed", "drain"),
        ("pcie", "lost", "reboot"),
    ],
)
def test_what_the_shipped_policy_does(source: policy.Source, code: policy.Code, action: str) -> None:
    assert wanted(source, code) == [action]


def test_every_code_that_can_be_found_has_a_rule() -> None:
    shipped = health_policy.read()
    for source, codes in CODES.items():
        for code in codes:
            assert shipped.rule(Finding("n1", 0, source, code, 0.0)).why != "no rule names it", (source, code)


WRONG = [
    ("", "line 1: the file is no mapping with rules", ""),
    ("rules: 3", "line 1: rules: Input should be a valid tuple", "rules"),
    ("rules: []\nstorms: 3", "line 2: storms: Extra inputs are not permitted", "storms"),
    ("storm_s: 0\nrules: []", "line 1: storm_s: Input should be greater than 0", "storm_s"),
    ("rules:\n- source: xid\n  action: stop\n  why: x", "line 3: rules.0.action: Input should be", "rules.0.action"),
    ("rules:\n- {source: xid, action: log}", "line 2: rules.0.why: Field required", "rules.0.why"),
    ("rules:\n- {source: gpu, action: log, why: x}", "line 2: rules.0.source: Input should be", "rules.0.source"),
    (
        "rules:\n- {source: xid, action: log, why: x}\n- source: port\n  codes: [79]\n  action: log\n  why: x",
        "line 3: rules.1: 79 is no code of port: known are down, errors, flap",
        "rules.1",
    ),
    (
        "rules:\n- source: xid\n  action: log\n  why: x\n  repeat:\n    times: 1\n    within_s: 1\n    action: drain",
        "line 6: rules.0.repeat.times: Input should be greater than or equal to 2",
        "rules.0.repeat.times",
    ),
    (
        "rules:\n- {source: xid, action: log, why: x}\n- {source: xid, action: log, why: x}",
        "line 1: the file: two rules for xid",
        "",
    ),
    ("rules: [", "is no YAML: while parsing", ""),
]


@pytest.mark.parametrize(("text", "message", "field"), WRONG, ids=[row[2] or row[1] for row in WRONG])
def test_a_mistake_is_named_with_its_line_and_field(tmp_path: Path, text: str, message: str, field: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        health_policy.read(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert caught.value.field == field


def test_a_file_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        health_policy.read(tmp_path / "none.yaml")


def test_another_file_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("storm_s: 3\nrules:\n- {source: xid, codes: [48], action: reboot, why: ours}\n")
    mine = health_policy.read(path)
    assert (mine.storm_s, mine.rule(Finding("n1", 0, "xid", 48, 0.0)).action) == (3.0, "reboot")
