from __future__ import annotations

from typing import Any

import pytest

from service.core import policy
from service.core.policy import Decision, Finding, History, Policy, Repeat, Rule

POLICY = Policy(
    (
        Rule("xid", "log", "an echo", (45,), echo=True),
        Rule("xid", "drain", "broken memory", (48,)),
        Rule("xid", "reset", "a row to remap", (63,)),
        Rule("xid", "reset", "a link", (74,), Repeat(2, 3600.0, "drain")),
        Rule("xid", "reboot", "off the bus", (79,)),
        Rule("xid", "restart", "contained", (94,)),
        Rule("xid", "log", "anything else"),
        Rule("nvlink", "log", "a bad link", ("errors",), at_least=100.0),
        Rule("thermal", "log", "hot", (), Repeat(3, 300.0, "drain")),
    ),
    storm_s=10.0,
)


def xid(code: int, at: float = 0.0, device: int | None = 0, **fields: Any) -> Finding:
    return Finding("n1", device, "xid", code, at, **fields)


def hot(at: float) -> Finding:
    return Finding("n1", 0, "thermal", "hw_thermal", at)


def told(*findings: Finding) -> list[tuple[float, str]]:
    """When something was told, and what, of findings that come in this order."""
    history: History = ()
    actions = []
    for finding in findings:
        history, decision = policy.decide(POLICY, history, finding)
        if decision:
            actions.append((finding.at, decision.action))
    return actions


TABLE = [
    ("one of each", [xid(48)], [(0, "drain")]),
    ("no rule of its own", [xid(999)], [(0, "log")]),
    ("another node's device", [xid(94, device=1), xid(94, device=2)], [(0, "restart"), (0, "restart")]),
    ("again within the storm", [xid(94, 0), xid(94, 5), xid(94, 10)], [(0, "restart")]),
    ("again after it", [xid(94, 0), xid(94, 11)], [(0, "restart"), (11, "restart")]),
    ("a storm that goes on", [xid(79, float(at)) for at in range(0, 100, 9)], [(0, "reboot")]),
    ("45 behind a 79", [xid(79), *(xid(45, 0.1 * n, device=n % 8) for n in range(50))], [(0, "reboot")]),
    ("45 behind what is another device's", [xid(94), xid(45, 1, device=3)], [(0, "restart")]),
    ("45 alone", [xid(45, 0.1 * n) for n in range(50)], [(0, "log")]),
    ("45 long after a 79", [xid(79), xid(45, 60)], [(0, "reboot"), (60, "log")]),
    ("weaker behind stronger", [xid(48), xid(63, 1), xid(94, 1), xid(999, 1)], [(0, "drain")]),
    ("stronger behind weaker", [xid(94), xid(48, 1), xid(79, 2)], [(0, "restart"), (1, "drain"), (2, "reboot")]),
    ("a reset waits for a stop", [xid(63), xid(94, 1)], [(0, "reset"), (1, "restart")]),
    ("a node is drained once", [xid(48, device=0), xid(48, 1, device=3)], [(0, "drain")]),
    ("74 once", [xid(74)], [(0, "reset")]),
    ("74 in one burst", [xid(74, 0.1 * n) for n in range(20)], [(0, "reset")]),
    ("74 twice in an hour", [xid(74), xid(74, 600)], [(0, "reset"), (600, "drain")]),
    ("74 twice in two hours", [xid(74), xid(74, 3600)], [(0, "reset"), (3600, "reset")]),
    ("74 on two devices", [xid(74, device=0), xid(74, 600, device=1)], [(0, "reset"), (600, "reset")]),
    ("74 all the time", [xid(74, float(at)) for at in range(0, 60, 5)], [(0, "reset"), (15, "drain")]),
    ("before this watch", [xid(79, before_boot=True)], []),
    ("old ones don't count", [xid(74, before_boot=True), xid(74, 600)], [(600, "reset")]),
    ("too little", [Finding("n1", 0, "nvlink", "errors", 0, 99.0)], []),
    ("enough", [Finding("n1", 0, "nvlink", "errors", 0, 100.0)], [(0, "log")]),
    ("a note prolongs no storm", [xid(94), *(hot(float(at)) for at in range(1, 19)), xid(94, 19)],
     [(0, "restart"), (11, "log"), (19, "restart")]),
    ("hot for long", [hot(float(at)) for at in range(40)], [(0, "log"), (22, "drain")]),
    ("hot now and then", [hot(float(at)) for at in range(0, 1000, 200)], [(at, "log") for at in range(0, 1000, 200)]),
]  # fmt: skip


@pytest.mark.parametrize(("findings", "actions"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_storm_has_one_action(findings: list[Finding], actions: list[tuple[float, str]]) -> None:
    assert told(*findings) == actions


def test_the_history_of_a_flood_stays_small() -> None:
    history: History = ()
    for at in range(4_000):
        history, _ = policy.decide(POLICY, history, xid(74, at * 0.5))
    assert len(history) < 400  # of 180 storms


def test_of_one_moment_the_root_comes_first() -> None:
    moment = [xid(45, 0.0), xid(94, 0.1), xid(999, 0.2), xid(79, 0.3), xid(48, 0.2)]
    assert [finding.code for finding in policy.order(POLICY, moment)] == [79, 48, 94, 999, 45]


def test_the_sentence_says_what_where_how_often_and_why() -> None:
    history, first = policy.decide(POLICY, (), xid(74, 0.0, 3, message="NVRM: Xid (PCI:0000:3e:00): 74, link 4\n"))
    _, second = policy.decide(POLICY, history, xid(74, 600.0, 3))
    assert first == Decision("reset", "xid 74 on GPU 3 of n1: reset: a link (NVRM: Xid (PCI:0000:3e:00): 74, link 4)")
    assert second
    assert second.sentence == ("xid 74 on GPU 3 of n1, 2 times within 3600 s, the limit is 2: drain: a link")
    _, port = policy.decide(POLICY, (), Finding("n1", None, "port", "down", 0.0, place="mlx5_0/1"))
    assert port
    assert port.sentence == "port down mlx5_0/1 on n1: log: no rule names it"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rule("xid", "log", "x", ("79",)), "'79' is no code of xid: they are numbers"),
        (lambda: Rule("port", "log", "x", ("gone",)), "'gone' is no code of port: known are down, errors, flap"),
        (lambda: Rule("xid", "drain", "x", (1,), Repeat(2, 1.0, "reset")), "a repeat asks for more than drain"),
        (lambda: Repeat(1, 1.0, "drain"), "a repeat is 2 times or more, not 1"),
        (lambda: Repeat(2, 0.0, "drain"), "a repeat needs a window above 0 s"),
        (lambda: Policy((Rule("xid", "log", "x", (1, 2)), Rule("xid", "log", "y", (2,)))), "two rules for xid 2"),
        (lambda: Policy((Rule("xid", "log", "x"), Rule("xid", "log", "y"))), "two rules for xid"),
        (lambda: Policy((), storm_s=0.0), "a storm lasts longer than 0 s"),
    ],
)
def test_a_wrong_policy_is_not_built(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        build()
