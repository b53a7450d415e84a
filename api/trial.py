"""What a job would come to if it were submitted now: the core decides, on what the store tells; nothing is kept."""

from __future__ import annotations

from api import checks, planview
from api.door import Door
from api.views import Trial
from service.contracts import events
from service.contracts.job import JobSpec, Phase, parse_job
from service.core import codec, machine
from service.core.state import State
from service.core.status import status

UID = "trial"


def made(given: Door, spec: JobSpec, now: float) -> Trial:
    """Of a job that the door would let in."""
    nodes, known = given.store.nodes(), given.store.unfinished()
    cores = {row.uid: codec.load(core) for row, core in known if core}
    state = State(cores, checks.fleet(nodes), codec.load_health(given.store.health()))
    for row, core in known:
        if core is None:  # accepted, and not yet seen by the controller: it comes first
            taken_up = events.JobSubmitted(row.uid, row.seq, parse_job(row.spec), row.created_at)
            state = machine.decide(state, taken_up).state
    last = max((row.seq for row, _ in known), default=0)
    job = machine.decide(state, events.JobSubmitted(UID, last + 1, spec, now)).state.jobs[UID]
    found = status(job)
    return Trial(
        starts=job.phase is not Phase.QUEUED,
        reason=job.reason,
        layout=found.layout,
        placement=found.placement,
        plan=planview.made(spec, state.fleet) if nodes else None,
    )
