"""What a finding about a node's health asks for, by a table of rules. Pure: reads no device, no log and no clock.

One fault shows in many places within moments: a GPU that falls off the bus is followed by a line for every channel that
is torn down behind it. So findings come in storms, and a storm gets one action, its root's; a later finding acts again
only if it asks for what that action does not bring. What the kernel logged before anybody watched asks for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from service.contracts.events import HealthAction

Source = Literal["xid", "ecc", "remap", "recovery_action", "nvlink", "pcie", "thermal", "port", "probe"]
Code = int | str

SOURCES: tuple[Source, ...] = get_args(Source)
ACTIONS: tuple[HealthAction, ...] = get_args(HealthAction)  # from weak to strong

NUMBERED: frozenset[Source] = frozenset({"xid", "recovery_action"})
"""Their codes are NVIDIA's numbers."""

CODES: dict[Source, frozenset[Code]] = {
    "ecc": frozenset({"volatile_uncorrected", "aggregate_uncorrected"}),
    "remap": frozenset({"pending", "failed"}),
    "nvlink": frozenset({"down", "errors"}),
    "pcie": frozenset({"width", "lost", "silent"}),
    "thermal": frozenset({"hw_thermal", "sw_thermal", "power_brake"}),
    "port": frozenset({"down", "flap", "errors"}),
    "probe": frozenset({"wrong", "slow", "failed"}),
}

COVERS: dict[HealthAction, frozenset[HealthAction]] = {
    "log": frozenset({"log"}),
    "restart": frozenset({"log", "restart"}),
    "reset": frozenset({"log", "reset"}),  # waits for a stop, and brings none
    "drain": frozenset({"log", "restart", "reset", "drain"}),
    "reboot": frozenset({"log", "restart", "reset", "drain", "reboot"}),
}
"""What has been done as well once an action is taken."""

NODE_WIDE: frozenset[HealthAction] = frozenset({"drain", "reboot"})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One sign that something of a node is not as it should be."""

    node: str  # name
    device: int | None  # local index; None: no device's, or unknown whose
    source: Source
    code: Code
    at: float
    value: float = 0.0  # how much: errors since the last look, lanes, FLOP/s, ...
    before_boot: bool = False  # logged before anybody watched this node
    message: str = ""
    place: str = ""  # which link, port or check, where there are several

    @property
    def key(self) -> tuple[int | None, Source, Code, str]:
        """What makes two findings the same thing found again."""
        return self.device, self.source, self.code, self.place


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """What is done instead when the same is found in `times` separate moments within `within_s`."""

    times: int
    within_s: float
    action: HealthAction

    def __post_init__(self) -> None:
        if self.times < 2:
            raise ValueError(f"a repeat is 2 times or more, not {self.times}")
        if self.within_s <= 0:
            raise ValueError(f"a repeat needs a window above 0 s, not {self.within_s:g}")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The action for some codes of a source; without codes, for all that have no rule of their own."""

    source: Source
    action: HealthAction
    why: str
    codes: tuple[Code, ...] = ()
    repeat: Repeat | None = None
    at_least: float = 0.0  # a smaller value is no finding
    echo: bool = False  # says only that something else was found: never the root of a storm

    def __post_init__(self) -> None:
        numbered = self.source in NUMBERED
        for code in self.codes:
            if numbered and not isinstance(code, int):
                raise ValueError(f"{code!r} is no code of {self.source}: they are numbers")
            if not numbered and code not in CODES[self.source]:
                raise ValueError(f"{code!r} is no code of {self.source}: known are {', '.join(_names(self.source))}")
        if self.repeat and ACTIONS.index(self.repeat.action) <= ACTIONS.index(self.action):
            raise ValueError(f"a repeat asks for more than {self.action}, not for {self.repeat.action}")


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    rules: tuple[Rule, ...]
    storm_s: float = 30.0  # findings no further apart are of one storm

    def __post_init__(self) -> None:
        if self.storm_s <= 0:
            raise ValueError(f"a storm lasts longer than {self.storm_s:g} s")
        taken: set[tuple[Source, Code | None]] = set()
        for rule in self.rules:
            for code in rule.codes or (None,):
                if (rule.source, code) in taken:
                    raise ValueError(f"two rules for {rule.source}{'' if code is None else f' {code}'}")
                taken.add((rule.source, code))

    def rule(self, finding: Finding) -> Rule:
        of_source = [rule for rule in self.rules if rule.source == finding.source]
        named = [rule for rule in of_source if finding.code in rule.codes]
        general = [rule for rule in of_source if not rule.codes]
        return next(iter(named + general), Rule(finding.source, "log", "no rule names it"))


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A finding of the past: what it asked for, and the action that is in force for it, told then or before."""

    finding: Finding
    rule: Rule
    wanted: HealthAction
    in_force: HealthAction | None
    first: bool  # of its moment: the same was not found within a storm before


History = tuple[Seen, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    action: HealthAction
    sentence: str


def order(policy: Policy, findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one moment, likely roots first: what asks for most, then what came first; echoes last."""

    def place(finding: Finding) -> tuple[bool, int, float]:
        rule = policy.rule(finding)
        return rule.echo, -ACTIONS.index(rule.action), finding.at

    return sorted(findings, key=place)


def decide(policy: Policy, history: History, finding: Finding) -> tuple[History, Decision | None]:
    """What to do about `finding`, and the history with it. None: it is old, or its storm has had its action."""
    rule = policy.rule(finding)
    if finding.before_boot or finding.value < rule.at_least:
        return history, None
    near = [seen for seen in history if abs(finding.at - seen.finding.at) <= policy.storm_s]
    if rule.echo and any(not seen.rule.echo for seen in near):
        return history, None
    moments = [seen.finding for seen in history if seen.first and seen.finding.key == finding.key]
    first = all(abs(finding.at - moment.at) > policy.storm_s for moment in moments)
    wanted, times = rule.action, 1
    if rule.repeat is not None:
        times = first + sum(finding.at - moment.at < rule.repeat.within_s for moment in moments)
        wanted = rule.repeat.action if times >= rule.repeat.times else wanted
    covers = [seen.in_force for seen in near if seen.in_force and _covered(seen, seen.in_force, finding, wanted)]
    if not covers:
        seen = Seen(finding, rule, wanted, wanted, first)
        return _with(policy, history, seen), Decision(wanted, _sentence(finding, rule, wanted, times))
    strongest = max(covers, key=ACTIONS.index)
    prolongs = wanted != "log" or strongest == "log"  # a note prolongs no storm but its own
    return _with(policy, history, Seen(finding, rule, wanted, strongest if prolongs else None, first)), None


def _covered(seen: Seen, in_force: HealthAction, finding: Finding, wanted: HealthAction) -> bool:
    """Whether the action in force for `seen` is also `finding`'s."""
    if wanted not in COVERS[in_force]:
        return False
    if in_force == "log":
        return seen.finding.key == finding.key
    return in_force in NODE_WIDE or seen.finding.device == finding.device


def _with(policy: Policy, history: History, new: Seen) -> History:
    """Without what counts no longer: of each moment the first finding counts, and of each thing found the newest."""
    at, key = new.finding.at, new.finding.key
    kept = (
        seen
        for seen in history
        if (seen.first or seen.finding.key != key) and at - seen.finding.at <= _counts_s(policy, seen.rule)
    )
    return (*kept, new)


def _counts_s(policy: Policy, rule: Rule) -> float:
    return max(policy.storm_s, rule.repeat.within_s if rule.repeat else 0.0)


def _sentence(finding: Finding, rule: Rule, action: HealthAction, times: int) -> str:
    place = f" {finding.place}" if finding.place else ""
    where = f"GPU {finding.device} of {finding.node}" if finding.device is not None else finding.node
    count = ""
    if rule.repeat and action == rule.repeat.action:
        count = f", {times} times within {rule.repeat.within_s:g} s, the limit is {rule.repeat.times}"
    said = f" ({finding.message.strip()[:200]})" if finding.message.strip() else ""
    return f"{finding.source} {finding.code}{place} on {where}{count}: {action}: {rule.why}{said}"


def _names(source: Source) -> Sequence[str]:
    return sorted(map(str, CODES[source]))
