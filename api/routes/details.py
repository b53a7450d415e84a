"""A job in more detail: its ranks, its incidents with their evidence, where its time went."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter

from api.door import Door, Given, Uid
from api.views import FaultView, GoodputView, IncidentDetail, Incidents, Problem, Ranks, RankView
from service.contracts import errors
from service.core import accounts, codec, goodput, status
from service.core.state import Job
from service.store.records import TimesRow

router = APIRouter(prefix="/v1/jobs/{uid:word}", tags=["details"])

MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such job"}}


@router.get("/ranks", responses=MISSING)
def ranks(given: Given, uid: Uid) -> Ranks:
    """Where each rank of the newest attempt stands, and which part of the layout it has; none while nothing is held."""
    job = _core(given, uid)
    if job is None or job.placement is None or job.layout is None:
        return Ranks(attempt=0 if job is None else job.attempt, layout=None, ranks=())
    nodes = {node.id: node for node in given.store.nodes()}
    times, found = given.store.times(uid, job.attempt), []
    for rank, slot in enumerate(job.placement.slots):
        pp, dp, tp = job.layout.coordinates(rank)
        node = nodes.get(slot.node)
        rack, zone = (node.rack, node.zone) if node else ("", "")
        place = {"rank": rank, "node": slot.name, "slot": slot.index, "rack": rack, "zone": zone}
        found.append(RankView(**place, pp=pp, dp=dp, tp=tp, **_parts(times, rank)))
    step, at = (times.step, times.at) if times else (None, None)
    return Ranks(attempt=job.attempt, layout=job.layout, ranks=tuple(found), step=step, at=at)


@router.get("/incidents", responses=MISSING)
def incidents(given: Given, uid: Uid) -> Incidents:
    """Oldest first, each with the evidence of it: what ranks said, and their stacks."""
    job = _core(given, uid)
    found = [
        IncidentDetail(
            incident=status.incident(one), faults=tuple(FaultView(**dataclasses.asdict(fault)) for fault in one.faults)
        )
        for one in (job.incidents if job else ())
    ]
    return Incidents(incidents=tuple(found))


@router.get("/goodput", responses=MISSING)
def spent(given: Given, uid: Uid) -> GoodputView:
    """Where the time since its submission went, in seconds that add up."""
    row, job = given.store.job(uid), _core(given, uid)
    end = row.ended_at or time.time()
    if job is None:
        waited = end - row.created_at
        return GoodputView(goodput=0.0, elapsed_s=waited, place_s=waited)
    told = accounts.accounts(job, end)
    parts = {name: value for name, value in dataclasses.asdict(told).items() if name != "spent"}
    share = goodput.goodput(job.productive_s, job.submitted_at, end)
    return GoodputView(goodput=share, elapsed_s=end - job.submitted_at, **parts, **dataclasses.asdict(told.spent))


def _parts(times: TimesRow | None, rank: int) -> dict[str, Any]:
    told = {name: seconds[rank] for name, seconds in (times.parts if times else {}).items()}
    parts = {name: value for name, value in told.items() if value is not None and name != "pulse"}
    return {"parts": parts, "step_s": sum(parts.values()) or None, "pulse_s": told.get("pulse")}


def _core(given: Door, uid: str) -> Job | None:
    core = given.store.core(uid)
    try:
        return codec.load(core) if core else None
    except ValueError as error:
        raise errors.ClusterError(f"job {uid} is of another version of Phalanx", hint=str(error)[:200]) from error
