"""How a job comes into the queue, new or forked: checked, once a key, its beginning looked up."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence

from api import checkpoints, checks, door, jobview, runtime, weights
from api.door import Door
from api.principal import Principal
from service.contracts import errors
from service.contracts.job import InitFrom, JobSpec
from service.contracts.status import JobStatus, Progress
from service.store.records import JobRow, NodeRow
from workers import cursor
from workers.spec import ParallelLayout


def submit(
    given: Door, asking: Principal, spec: JobSpec, key: str | None, now: float, project: str | None = None
) -> tuple[JobRow, bool]:
    """The job and whether it is new. Conflict without a field: the key was another request's. NotFound: no such
    project, or not his."""
    found, queues, nodes = given.store.admission(asking.works_in(project))
    project = found.name
    key = None if key is None else f"{project}/{key}"
    digest = hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    # Before the checks: what was accepted once is answered again, also when it would no longer fit.
    if key is not None and (known := given.store.submitted(key, digest, now)):
        return known, False
    spec = checked(given, asking, spec, project, queues, nodes)
    start = spec.init_from
    origin = ""
    if start is not None:
        place = start.huggingface or f"step {start.step} of {start.job}"
        origin = f", to begin at {place}"
    return given.store.submit(
        spec.model_dump(mode="json"),
        spec.name,
        uid=f"{spec.name}-{secrets.token_hex(4)}",
        at=now,
        status=JobStatus(progress=Progress(steps=spec.train.steps)).model_dump(mode="json"),
        key=key,
        digest=digest,
        origin=origin,
        project=project,
    )


def checked(
    given: Door, asking: Principal, spec: JobSpec, project: str, queues: Sequence[str], nodes: Sequence[NodeRow]
) -> JobSpec:
    """The job as it is kept, its beginning and its code looked up. Errors as for `beginning`, and of the checks."""
    checks.submission(spec, nodes, given.roots, given.rules.models, queues)
    spec = runtime.checked(spec, project, given.rules)
    if spec.init_from is None:
        return spec
    if spec.init_from.huggingface is not None:
        weights.check(spec, spec.init_from.huggingface)
        return spec
    return spec.model_copy(update={"init_from": beginning(given, asking, spec, spec.init_from)})


def beginning(given: Door, asking: Principal, spec: JobSpec, start: InitFrom) -> InitFrom:
    """`start` with root and manifest: of a good checkpoint at which this job can begin.

    NotFound and Conflict name the field below `init_from`; UserError where job and checkpoint don't go together.
    """
    uid = start.job or ""
    try:
        parent = given.store.job(door.named(given, asking, uid))
    except errors.NotFound as error:
        raise errors.NotFound(f"there is no job {uid}", hint="phalanx list shows them", field="job") from error
    view = checkpoints.usable(given, parent, start.step, start.attempt)
    root = jobview.root(parent, given.storage_root)
    found = InitFrom(job=uid, step=view.step, attempt=view.attempt, root=root, manifest=view.manifest)
    for field in ("root", "manifest"):  # where others may reach in storage is not for a client to say
        if getattr(start, field) not in (None, getattr(found, field)):
            named, known = getattr(start, field), getattr(found, field)
            hint = "name the job, and its step or none; the rest is found"
            raise errors.Conflict(f"{field} of job {uid} is {known}, not {named}", hint=hint, field=field)
    document = checkpoints.manifest_of(given, parent, view)
    try:
        run = spec.run(ParallelLayout())
        cursor.check_model(document, run)
        cursor.check_order(document, run)
    except ValueError as error:
        hint = "leave model, data and train.seed as they are in the other job"
        raise errors.UserError(f"init_from: {error}", hint=hint, field="init_from") from None
    if spec.train.steps <= view.step and not spec.evaluates_only:
        raise errors.UserError(
            f"train.steps {spec.train.steps} leaves nothing to train after step {view.step}, where the job begins",
            hint=f"set train.steps above {view.step}, or begin at an older step",
            field="train.steps",
        )
    return found
