"""The scheduling pass: after every event, who gets which slots, who moves, and who keeps what nobody works on.

Slots go in the order of `queue`. A job that can't have all it wants, and may be smaller, is. What no rank stands on,
spares and what is left of a gang that lost a node, gives way to a job that could run with it; a broken job may always
go back to what is kept of it, which takes nothing from anyone. The first job that is short of slots holds up the
others, and gives up what is kept of it, so that nothing is half held; one that no free fleet of this size could hold
lets the others go first after a while. Then gangs leave nodes that are to be left, change their size, and get their
spares and standbys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.errors import PlacementRefused
from service.contracts.job import Phase
from service.core import elastic, health, moving, queue, rules, spares, sticky
from service.core.elastic import Fit
from service.core.health import Health
from service.core.liveness import Limits
from service.core.moving import MoveDecided
from service.core.outcome import Outcome
from service.core.rules import SlotsFound
from service.core.state import Job, MoveKind, Placement, Taken

NAMED_NODES = 3
MORE = "more is free"

CHATTER = (
    events.StepsCompleted,
    events.StepsRecalled,
    events.SnapshotHeld,
    events.CheckpointPublished,
    events.Evaluated,
    events.GangStarted,
    events.GangResumed,
)
"""After these no slot is freer than before: sizes and spares are not looked at anew, but for a gang that begins."""


class Turn(Protocol):
    """What one event has changed so far."""

    jobs: dict[str, Job]
    fleet: Fleet
    health: Health
    since: Mapping[str, float]
    at: float
    limits: Limits

    def tell(self, job: Job, event: SlotsFound | MoveDecided) -> None: ...

    def take(self, outcome: Outcome) -> None: ...


def run(turn: Turn, event: Any) -> None:
    fresh = any(job.unraised for job in turn.jobs.values())
    if isinstance(event, CHATTER) and not fresh and not any(job.phase in queue.WAITING for job in turn.jobs.values()):
        return
    usable = health.usable(turn.fleet, turn.health, turn.at)
    barred = health.barred(turn.fleet, turn.health)
    waits = _place(turn, usable, barred)
    going = [job for job in turn.jobs.values() if job.phase is Phase.RUNNING]
    if not isinstance(event, CHATTER) or fresh:
        for job in sorted(going, key=lambda job: job.seq):
            if not _leaves(turn, job) and not _resizes(turn, job, usable, barred, waits):
                _backs(turn, job, usable, barred, waits)


def _place(turn: Turn, usable: Fleet, barred: Taken) -> bool:
    """Offer free slots in order; whether anyone who could be placed is left without."""
    head: Job | None = None
    short = False  # the head is: it does not only stop or back off
    for uid in [job.uid for job in queue.order(turn.jobs.values())]:
        job = turn.jobs[uid]
        if job.placement is not None or turn.at < job.not_before:
            head = head or job  # its reason says so already
        elif head is not None:
            if not _goes_back(turn, job, usable, barred):
                behind = queue.behind(head)
                if short:
                    turn.take(moving.released(job, behind, turn.at))
                turn.take(rules.waiting(turn.jobs[uid], behind, turn.at))
        elif refusal := _offer(turn, job, usable, barred):
            turn.take(moving.released(job, refusal, turn.at))
            alone = not any(other.held for other in turn.jobs.values() if other.uid != uid)
            possible = not alone and _possible(job, usable, barred)
            more = "" if possible else "; it would not fit if all were free"
            turn.take(rules.waiting(turn.jobs[uid], refusal + more, turn.at))
            if possible or turn.at - job.phase_since < turn.limits.infeasible_s:
                head, short = turn.jobs[uid], True
    return head is not None


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
    refusal = ""
    for held in (taken, firm) if len(firm) < len(taken) else (taken,):
        if _free(job, usable, held) < elastic.slots(job):
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
    least, wants = elastic.least(job), elastic.slots(job)
    if least < wants:
        why = _lost(job) or refusal
        if smaller := elastic.largest(job, usable, firm, least - 1, wants, why):
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


def _resizes(turn: Turn, job: Job, usable: Fleet, barred: Taken, waits: bool) -> bool:
    """Another size by request; or a larger one, where there is room and it pays."""
    if job.layout is None or job.placement is None:
        return False
    others = [other for other in turn.jobs.values() if other.uid != job.uid]
    if job.rescale is not None:
        return _meets(turn, job, usable, queue.taken(others) | barred)
    goal = elastic.slots(job) if waits else elastic.most(job)
    if job.spec.resources.elastic is None or job.layout.world >= goal:
        return False
    taken = queue.taken(others) | barred
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
        others = queue.taken(other for other in turn.jobs.values() if other.uid != job.uid)
        after = spares.filled(job, after, usable, others | barred)
    if after != job.placement or job.unraised:
        turn.take(rules.backed(job, after, "", turn.at))
