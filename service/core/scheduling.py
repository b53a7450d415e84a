"""The scheduling pass: after every event, who gets which slots, who moves, and who keeps what nobody works on.

Slots go in the order of `queue`. A job that can't have all it wants, and may be smaller, is. What no rank stands on,
spares and what is left of a gang that lost a node, gives way to a job that could run with it; a broken job may always
go back to what is kept of it, which takes nothing from anyone. The first job that is short of slots gives up what is
kept of it, so that nothing is half held, and has those give way that come after it: by `preemption` such of lower
priority, and such as fill in. Jobs behind it fill in on slots that it can't use yet: a pause costs seconds, so that
they yield when it can, and it never waits for them to end. Then gangs leave nodes that are to be left, change their
size, and get their spares and standbys.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import Phase
from service.core import elastic, health, moving, preemption, queue, rules, spares, sticky
from service.core.elastic import Fit
from service.core.health import Health
from service.core.liveness import Limits
from service.core.moving import MoveDecided
from service.core.outcome import Outcome
from service.core.rules import SlotsFound
from service.core.state import Job, MoveKind, Placement, Taken
from service.core.suspending import YieldDecided

NAMED_NODES = 3
MORE = "more is free"

CHATTER = (
    events.StepsCompleted,
    events.StepsRecalled,
    events.SnapshotHeld,
    events.CheckpointPublished,
    events.Evaluated,
    events.LossSpiked,
    events.GangStarted,
    events.GangResumed,
)
"""After these no slot is freer than before: nothing is looked at anew, but for a gang that begins."""

FILLS = 32
"""Jobs behind the head of which it is looked in one pass whether they could fill in."""


class Turn(Protocol):
    """What one event has changed so far."""

    jobs: dict[str, Job]
    fleet: Fleet
    health: Health
    since: Mapping[str, float]
    queues: Mapping[str, int]
    quotas: Mapping[str, int]
    at: float
    limits: Limits

    def tell(self, job: Job, event: SlotsFound | MoveDecided | YieldDecided) -> None: ...

    def take(self, outcome: Outcome) -> None: ...


def run(turn: Turn, event: Any) -> None:
    fresh = any(job.unraised for job in turn.jobs.values())
    if isinstance(event, CHATTER) and not fresh:
        return
    usable = health.usable(turn.fleet, turn.health, turn.at)
    barred = health.barred(turn.fleet, turn.health)
    first = _place(turn, usable, barred)
    going = [job for job in turn.jobs.values() if job.phase is Phase.RUNNING]
    for job in sorted(going, key=lambda job: job.seq):
        if not _leaves(turn, job) and not _resizes(turn, job, usable, barred, first):
            _backs(turn, job, usable, barred, first is not None)


def _place(turn: Turn, usable: Fleet, barred: Taken) -> Job | None:
    """Offer free slots in order. The first job that is left without, though it might run."""
    head: Job | None = None  # the first that is left without
    first: Job | None = None  # and that might run
    short = False  # the head is: it does not only stop or back off
    fills, ahead = FILLS, 0
    free: Counter[str] | None = None  # slots that nobody holds, by device; None: to be counted
    for uid in [job.uid for job in queue.order(turn.jobs.values(), turn.queues)]:
        job = turn.jobs[uid] = _at(turn.jobs[uid], ahead + 1)
        allowed = _allowed(turn, job)
        if job.placement is not None or turn.at < job.not_before:
            head, first = head or job, first or job  # its reason says so already
        elif allowed is not None and allowed < elastic.least(job):  # no one waits for that
            _waits(turn, job, queue.over_quota(job, allowed, turn.quotas))
        elif head is None:
            if refusal := _offer(turn, job, usable, barred):
                possible = _possible(job, usable, barred)
                _waits(turn, job, refusal if possible else f"{refusal}; it would not fit if all were free")
                head, short = turn.jobs[uid], True
                first = head if possible else None
                fills = 0 if possible and (_changing(turn) or _preempts(turn, head, usable, barred)) else fills
        elif not _goes_back(turn, job, usable, barred):
            free = _unheld(turn, usable, barred) if free is None else free
            own = len(job.kept.held) if job.kept else 0
            looks = short and fills > 0 and free[job.spec.resources.device] + own >= elastic.least(job)
            fills -= looks
            if not looks or not _fills(turn, job, head, usable, barred):
                _behind(turn, job, head, short)
                first = first or job
            free = None if looks or own else free
        else:
            free = None
        ahead += turn.jobs[uid].phase in queue.WAITING
    return first


def _unheld(turn: Turn, usable: Fleet, barred: Taken) -> Counter[str]:
    devices = {node.id: node.device for node in usable.nodes}
    free = Counter[str]()
    for node in usable.nodes:
        free[node.device] += node.slots
    free.subtract(Counter(devices[node] for node, _ in queue.taken(turn.jobs.values()) | barred if node in devices))
    return free


def _behind(turn: Turn, job: Job, head: Job, short: bool) -> None:
    behind = queue.behind(head)
    if short:
        turn.take(moving.released(job, behind, turn.at))
    turn.take(rules.waiting(turn.jobs[job.uid], behind, turn.at))


def _at(job: Job, position: int) -> Job:
    return job if job.position == position or job.placement else dataclasses.replace(job, position=position)


def _waits(turn: Turn, job: Job, reason: str) -> None:
    """It gives up what is kept of it, so that nothing is half held."""
    turn.take(moving.released(job, reason, turn.at))
    turn.take(rules.waiting(turn.jobs[job.uid], reason, turn.at))


def _changing(turn: Turn) -> bool:
    """Whether some gang is about to give slots back: until then nobody fills in, and nobody more has to yield."""
    return any(job.placement is not None and (job.stopping or job.pause is not None) for job in turn.jobs.values())


def _preempts(turn: Turn, head: Job, usable: Fleet, barred: Taken) -> bool:
    """Have others give way to the head, where that makes room for it."""
    chosen, smaller = preemption.victims(head, turn.jobs.values(), turn.queues, usable, barred)
    for job in chosen:
        own, first = (queue.priority(one, turn.queues) for one in (job, head))
        why = f"of priority {first[0] or first[1]}" if own < first else "which it only filled in for"
        if smaller:
            reason = f"goes on with fewer slots: {head.uid} needs them, {why}"
            turn.tell(job, MoveDecided(job.uid, "yielded", reason, turn.at))
        else:
            reason = f"preempted: {head.uid} needs its slots, {why}"
            turn.tell(job, YieldDecided(job.uid, reason, turn.at))
    return bool(chosen)


def _fills(turn: Turn, job: Job, head: Job, usable: Fleet, barred: Taken) -> bool:
    """Let it run on what the head can't have yet. It yields as soon as the head could have it."""
    found = preemption.fit(job, usable, _held(turn, job) | barred, _allowed(turn, job))
    if found is None:
        return False
    why = f"{found.why}; fills in while {head.uid} waits"
    turn.tell(job, SlotsFound(job.uid, found.layout, found.placement, why, turn.at, backfilled=True))
    return True


def _held(turn: Turn, job: Job) -> set[tuple[str, int]]:
    """Slots of all others."""
    return queue.taken(other for other in turn.jobs.values() if other.uid != job.uid)


def _allowed(turn: Turn, job: Job) -> int | None:
    return queue.allowance(job, turn.jobs.values(), turn.quotas)


def _goes_back(turn: Turn, job: Job, usable: Fleet, barred: Taken) -> bool:
    """Place it on what is kept of it, whoever comes first."""
    if job.kept is None or job.layout is None or job.layout.world < elastic.least(job):
        return False
    again = sticky.whole(job.kept, usable, barred)
    if again is None:
        return False
    why = f"{job.layout} as before, on what was kept of it"
    turn.tell(job, SlotsFound(job.uid, job.layout, again, why, turn.at))
    return True


def _offer(turn: Turn, job: Job, usable: Fleet, barred: Taken) -> str | None:
    """Place the job, or say why not."""
    others = [other for other in turn.jobs.values() if other.uid != job.uid]
    alive = {node.id for node in usable.nodes}
    taken, firm = queue.taken(others) | barred, queue.firm(others, alive) | barred
    least, wants, allowed = elastic.least(job), elastic.slots(job), _allowed(turn, job)
    within = allowed is None or wants <= allowed
    refusal = "" if within or allowed is None else queue.over_quota(job, allowed, turn.quotas)
    for held in (taken, firm) if len(firm) < len(taken) else (taken,):
        if not within or _free(job, usable, held) < wants:
            continue
        try:
            fit = elastic.wanted(job, usable, held)
        except PlacementRefused as refused:
            refusal = refusal or refused.message
        else:
            _take(turn, job, fit)
            return None
    bars = health.sentence(turn.fleet, turn.health, turn.at, job.spec.resources.device)
    refusal = (queue.shortage(job, turn.jobs.values(), usable, barred) or refusal or "too few slots are free") + bars
    if least < wants:
        why = _lost(job) or refusal
        below = wants if within or allowed is None else allowed + 1
        if smaller := elastic.largest(job, usable, firm, least - 1, below, why):
            _take(turn, job, smaller)
            return None
        refusal += f"; {least} would do, and do not fit"
    return refusal


def _free(job: Job, fleet: Fleet, taken: Taken) -> int:
    """Slots that the job could have, wherever they are."""
    there = {node.id: node.slots for node in fleet.nodes if node.device == job.spec.resources.device}
    return sum(there.values()) - sum(node in there for node, _ in taken)


def _take(turn: Turn, job: Job, fit: Fit) -> None:
    """Those whose spares or kept slots it needs give them up first."""
    needed = {(slot.node, slot.index) for slot in fit.placement.held}
    for other in list(turn.jobs.values()):
        if other.uid != job.uid and not needed.isdisjoint((slot.node, slot.index) for slot in other.held):
            why = f"{job.uid} comes first and needs them"
            turn.take(moving.released(other, why, turn.at))
            left = turn.jobs[other.uid]
            if left.placement is not None:
                turn.take(rules.backed(left, spares.without(left.placement, needed), why, turn.at))
    turn.tell(job, SlotsFound(job.uid, fit.layout, fit.placement, fit.why, turn.at))


def _possible(job: Job, usable: Fleet, barred: Taken) -> bool:
    """Whether it could run on these nodes if it were alone."""
    least, wants = elastic.least(job), elastic.slots(job)
    if _free(job, usable, barred) >= wants:
        try:
            elastic.wanted(job, usable, barred)
        except PlacementRefused:
            pass
        else:
            return True
    return least < wants and elastic.largest(job, usable, barred, least - 1, wants, "") is not None


def _lost(job: Job) -> str:
    """Which nodes the job lost, where that is why it has to be placed again."""
    if not job.incidents or job.incidents[-1].recover_s is not None:
        return ""
    last = job.incidents[-1]
    gone = [fault.node for fault in last.faults if fault.kind in ("node_lost", "preempted") and fault.node]
    names = list(dict.fromkeys(gone)) or ([last.node] if last.kind == "drain" and last.node else [])
    if not names:
        return ""
    more = f" and {len(names) - NAMED_NODES} more" if len(names) > NAMED_NODES else ""
    nodes = f"node{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED_NODES])}{more}"
    return f"{nodes} {'are' if len(names) > 1 else 'is'} gone and no spare is left"


def _leaves(turn: Turn, job: Job) -> bool:
    """Move it off a node that goes, or is to be drained."""
    leaving = health.left(turn.fleet, turn.health)
    for slot in job.placement.slots if job.placement and leaving else ():
        if slot.node in leaving:
            why, deadline = leaving[slot.node]
            kind: MoveKind = "drain" if deadline is None else "preempted"
            reason = f"{why}; the job moves away from it"
            turn.tell(job, MoveDecided(job.uid, kind, reason, turn.at, slot.name, deadline))
            return True
    return False


def _resizes(turn: Turn, job: Job, usable: Fleet, barred: Taken, head: Job | None) -> bool:
    """A new start, where its spec changed; another size by request; a larger one, where there is room and it pays."""
    if job.layout is None or job.placement is None:
        return False
    if job.stale:
        reason = "is started again, to go on as its spec says now"
        turn.tell(job, MoveDecided(job.uid, "restart", reason, turn.at))
        return True
    taken = _held(turn, job) | barred
    if job.rescale is not None:
        return _meets(turn, job, usable, taken)
    goal = _goal(turn, job, head)
    if job.spec.resources.elastic is None or job.layout.world >= goal:
        return False
    enough = job.layout.world + job.layout.pp * job.layout.tp
    if _free(job, usable, taken) < enough:
        return False
    own = {slot.node for slot in job.placement.held}
    calm = Fleet(tuple(
        node for node in usable.nodes
        if node.id in own or health.settled(node, turn.health, turn.since, turn.at, turn.limits)
    ))  # fmt: skip
    if _free(job, calm, taken) < enough:
        return False
    fit = _larger(job, calm, taken, goal)
    if fit is None or not elastic.pays(job, fit.layout):
        return False
    gain, pause = elastic.gain_s(job, fit.layout), elastic.pause_s(job)
    reason = (
        f"grows from {job.layout.world} to {fit.layout.world} slots, {fit.layout}: "
        f"the remaining steps gain {gain:.0f} s for a pause of {pause:.1f} s"
    )
    turn.tell(job, MoveDecided(job.uid, "rescale", reason, turn.at))
    return True


def _goal(turn: Turn, job: Job, head: Job | None) -> int:
    """Slots that it may grow to: not past the first that waits, nor past its quota."""
    if head is None:
        goal = elastic.most(job)
    elif job.backfilled or queue.first(head, job, turn.queues):
        return 0
    else:
        goal = elastic.slots(job)
    allowed = _allowed(turn, job)
    return goal if allowed is None or job.placement is None else min(goal, allowed - len(job.placement.spares))


def _larger(job: Job, calm: Fleet, taken: Taken, goal: int) -> Fit | None:
    assert job.layout is not None
    wants, now = elastic.slots(job), job.layout.world
    if goal > wants and (fit := elastic.largest(job, calm, taken, max(wants, now), goal + 1, MORE)):
        return fit
    if now >= wants:
        return None
    try:
        return elastic.wanted(job, calm, taken)
    except PlacementRefused:
        return elastic.largest(job, calm, taken, now, wants, MORE)


def _meets(turn: Turn, job: Job, usable: Fleet, taken: Taken) -> bool:
    """Begin to be what was asked for, or say once why it can't be yet."""
    assert job.layout is not None
    try:
        fit = elastic.wanted(job, usable, taken)
    except PlacementRefused as refused:
        turn.take(moving.unmet(job, refused.message, turn.at))
        return False
    if fit.layout == job.layout:
        turn.take(moving.met(job))
        return False
    reason = f"goes from {job.layout.world} to {fit.layout.world} slots, {fit.layout}, by request"
    turn.tell(job, MoveDecided(job.uid, "rescale", reason, turn.at))
    return True


def _backs(turn: Turn, job: Job, usable: Fleet, barred: Taken, waits: bool) -> None:
    """Standbys for a gang that begins; spares where some are missing and nobody waits."""
    assert job.placement is not None
    after: Placement = spares.left(job.placement, usable)
    if spares.short(job, after) > 0 and not waits:
        filled = spares.filled(job, after, usable, _held(turn, job) | barred)
        allowed = _allowed(turn, job)
        after = filled if allowed is None or len(filled.held) <= allowed else after
    if after != job.placement or job.unraised:
        turn.take(rules.backed(job, after, "", turn.at))
