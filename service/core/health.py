"""What is held against a node, and what follows: cooled down, probed, excluded, left. Times come in; knows no layouts.

A node that a gang lost gets a strike; so does one whose rank died or hung, of a quarter of its weight, for that is the
node's fault less often. Errors of the user, of figures and of memory are never held against a node. Strikes are
forgotten after an hour. A node that comes back after a loss cools down, twice as long with each strike, and settles
before a running job grows onto it; at five strikes it is excluded until an operator forgives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from service.contracts import events
from service.contracts.cluster import Fleet, Node, NodeHealth, Strike
from service.core.liveness import Limits
from service.core.state import Incident, State

Health = Mapping[str, NodeHealth]  # by name

WEIGHTS: Mapping[str, float] = MappingProxyType({
    "node_lost": 1.0, "device": 1.0, "corruption": 1.0, "refused": 1.0, "process_died": 0.25, "hang": 0.25,
})  # fmt: skip
"""Of a strike, by the kind of fault. Others are none of the node's."""

NAMED = 3
CLEAN = NodeHealth()


def observed(health: Health, before: Fleet, after: Fleet, at: float, limits: Limits) -> Health:
    """Nodes that come back begin to cool down; a reboot that was waited for is over."""
    known = {node.id for node in before.nodes}
    changed: dict[str, NodeHealth] = {}
    for node in after.nodes:
        own = health.get(node.name)
        if own is None or node.id in known:
            continue
        own = dataclasses.replace(own, strikes=_recent(own.strikes, at, limits))
        if own.reboots:
            own = dataclasses.replace(own, reboots=False, leave=False, excluded="", resets=())
        if any(strike.kind == "node_lost" for strike in own.strikes):
            own = dataclasses.replace(_cooled(own, at, limits), needs_probe=limits.probe or own.needs_probe)
        changed[node.name] = own
    return _with(health, changed)


def blamed(health: Health, incident: Incident, at: float, limits: Limits) -> Health:
    """Strikes for the nodes that an incident is held against. One that may have computed wrong is probed first."""
    names = {incident.node} if incident.kind in WEIGHTS else set()
    names |= {fault.node for fault in incident.faults if fault.kind in ("node_lost", "corruption")}
    changed = {name: struck(health.get(name, CLEAN), incident.kind, at, limits) for name in names if name}
    if incident.kind == "corruption":
        changed = {name: dataclasses.replace(own, needs_probe=True) for name, own in changed.items()}
    return _with(health, changed)


def refused(health: Health, node: str, at: float, limits: Limits) -> Health:
    """A node that looks free and refuses again and again cools down at once."""
    return _with(health, {node: _cooled(struck(health.get(node, CLEAN), "refused", at, limits), at, limits)})


def struck(own: NodeHealth, kind: str, at: float, limits: Limits) -> NodeHealth:
    own = dataclasses.replace(own, strikes=(*_recent(own.strikes, at, limits), Strike(at, kind)))
    if own.excluded or weight(own) < limits.strikes_max:
        return own
    excluded = f"{_strikes(own)} within {limits.strikes_window_s / 60:g} minutes"
    return dataclasses.replace(own, excluded=excluded)


def found(health: Health, event: events.NodeEvent, limits: Limits) -> Health:
    """What a monitor, a probe or an operator says of a node."""
    own = health.get(event.node, CLEAN)
    match event:
        case events.HealthFound(action="reset", devices=devices, message=message):
            own = dataclasses.replace(own, resets=tuple(sorted({*own.resets, *devices})), note=message)
        case events.HealthFound(action="drain", message=message):
            own = dataclasses.replace(own, excluded=own.excluded or message, leave=True, note=message)
        case events.HealthFound(action="reboot", message=message):
            own = dataclasses.replace(own, excluded=own.excluded or message, leave=True, reboots=True, note=message)
        case events.HealthFound(action="restart", message=message, at=at):
            own = dataclasses.replace(own, note=message, acted_at=at if restarts(own, at, limits) else own.acted_at)
        case events.HealthFound(message=message):
            own = dataclasses.replace(own, note=message)
        case events.NodeProbed(passed=True, message=message):
            own = dataclasses.replace(own, needs_probe=False, note=message)
        case events.NodeProbed(message=message):
            own = dataclasses.replace(own, excluded=own.excluded or f"its probe failed: {message}", note=message)
        case events.DevicesReset(devices=devices):
            own = dataclasses.replace(own, resets=tuple(one for one in own.resets if one not in devices))
        case events.NodeForgiven():
            own = CLEAN
    return _with(health, {event.node: own})


def restarts(own: NodeHealth, at: float, limits: Limits) -> bool:
    """Whether a restart that is asked for now is another one, and no echo of the last."""
    return at - own.acted_at >= limits.storm_s


def bar(node: Node, health: Health, at: float) -> str | None:
    """Why nothing is placed on this node now, or None. The same words for as long as it is the same."""
    if node.draining is not None:
        return f"{node.name} is about to go"
    own = health.get(node.name)
    if own is None:
        return None
    if own.excluded:
        return f"{node.name} is excluded: {own.excluded}"
    if own.cooldown_until > at:
        return f"{node.name} cools down for {own.cooldown_s:g} s after {_strikes(own)}"
    return f"{node.name} is to be probed" if own.needs_probe else None


def usable(fleet: Fleet, health: Health, at: float) -> Fleet:
    """The nodes that may be placed on."""
    if not health and all(node.draining is None for node in fleet.nodes):
        return fleet
    return Fleet(tuple(node for node in fleet.nodes if bar(node, health, at) is None))


def barred(fleet: Fleet, health: Health) -> set[tuple[str, int]]:
    """(node id, device index) of devices that wait for their reset."""
    if not health:
        return set()
    return {(node.id, index) for node in fleet.nodes for index in health.get(node.name, CLEAN).resets}


def resettable(state: State) -> dict[str, tuple[int, ...]]:
    """Name of each node -> its devices that wait for their reset and that no gang stands on."""
    used = {(slot.name, slot.index) for job in state.jobs.values() for slot in job.held}
    free = {
        node.name: tuple(index for index in own.resets if (node.name, index) not in used)
        for node in state.fleet.nodes
        if (own := state.health.get(node.name)) is not None
    }
    return {name: devices for name, devices in free.items() if devices}


def left(fleet: Fleet, health: Health) -> dict[str, tuple[str, float | None]]:
    """Id of each node that running jobs are to leave -> why, and the deadline where there is one."""
    leaving: dict[str, tuple[str, float | None]] = {}
    for node in fleet.nodes:
        if node.draining is not None:
            leaving[node.id] = (f"node {node.name} is about to go", node.draining)
        elif (own := health.get(node.name)) is not None and own.leave:
            leaving[node.id] = (f"node {node.name} is drained: {own.excluded}", None)
    return leaving


def settled(node: Node, health: Health, since: Mapping[str, float], at: float, limits: Limits) -> bool:
    """Whether it has been there for long enough that a running job may grow onto it."""
    return at - since.get(node.id, at) >= settle_s(health.get(node.name, CLEAN), at, limits)


def settle_s(own: NodeHealth, at: float, limits: Limits) -> float:
    return limits.settle_s * 2.0 ** min(len(_recent(own.strikes, at, limits)), 16)


def cooldown_s(own: NodeHealth, limits: Limits) -> float:
    return limits.cooldown_s * 2.0 ** min(max(0, len(own.strikes) - 1), 16)


def sentence(fleet: Fleet, health: Health, at: float, device: str) -> str:
    """Which nodes are of no use now and why; empty when there are none."""
    reasons = [why for node in fleet.nodes if node.device == device and (why := bar(node, health, at))]
    more = [f"{len(reasons) - NAMED} more nodes are of no use"] if len(reasons) > NAMED else []
    return "".join(f"; {why}" for why in reasons[:NAMED] + more)


def weight(own: NodeHealth) -> float:
    return sum(WEIGHTS.get(strike.kind, 0.0) for strike in own.strikes)


def _recent(strikes: Iterable[Strike], at: float, limits: Limits) -> tuple[Strike, ...]:
    return tuple(strike for strike in strikes if at - strike.at < limits.strikes_window_s)


def _cooled(own: NodeHealth, at: float, limits: Limits) -> NodeHealth:
    lasts = cooldown_s(own, limits)
    return dataclasses.replace(own, cooldown_until=at + lasts, cooldown_s=lasts)


def _strikes(own: NodeHealth) -> str:
    losses = sum(strike.kind == "node_lost" for strike in own.strikes)
    if losses == len(own.strikes):
        return f"{losses} loss{'es' if losses > 1 else ''}"
    return f"{len(own.strikes)} strikes"


def _with(health: Health, changed: Mapping[str, NodeHealth]) -> Health:
    """Nothing is kept of a node that nothing is held against."""
    if all(health.get(name, CLEAN) == own for name, own in changed.items()):
        return health
    merged = {name: own for name, own in {**health, **changed}.items() if own != CLEAN}
    return MappingProxyType(merged)
