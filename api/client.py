"""The API from Python: `Client(url, token)`. Answers are the API's own views; its problems are errors again.

Knows HTTP and nothing of the store; reads no environment.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.views import (
    Asked,
    AuditPage,
    AuditView,
    Checkpoints,
    CheckpointView,
    EventsPage,
    EventView,
    GoodputView,
    Hooks,
    HookView,
    IncidentDetail,
    Incidents,
    JobsPage,
    LogLine,
    MadeToken,
    ManifestView,
    MetricsPage,
    Nodes,
    NodeView,
    PlanView,
    Projects,
    ProjectView,
    Queues,
    QueueView,
    Ranks,
    Rescaled,
    StepView,
    Tokens,
    TokenView,
    Trial,
    Usage,
    UsageView,
)
from api.wire import Wire, json_of, read
from service.contracts import errors
from service.contracts.job import JobSpec, Phase
from service.contracts.status import JobView
from service.store.records import Scope

POLL_S = 0.3


class Client(Wire):
    """Safe for one thread. Raises UserError (and NotFound, Conflict, Unauthorized) or ClusterError."""

    def submit(self, spec: JobSpec | Mapping[str, Any], key: str | None = None, project: str | None = None) -> JobView:
        """Put a job into the queue. With the same `key` it is submitted once, however often it is called. `project`:
        default the token's own."""
        job = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
        return self._created("/v1/jobs", job, key, _given(project=project))

    def dry_run(self, spec: JobSpec | Mapping[str, Any], project: str | None = None) -> Trial:
        """What the job would come to if it were submitted now. Nothing is kept."""
        job = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
        return self._post(Trial, "/v1/jobs", {"dry_run": "true", **_given(project=project)}, job)

    def get(self, uid: str) -> JobView:
        return self._get(JobView, _path(uid))

    def list(
        self,
        phase: Phase | str | Sequence[Phase | str] = (),
        page_size: int = 50,
        *,
        name: str = "",
        labels: Mapping[str, str | None] | None = None,
        oldest: bool = False,
    ) -> Iterator[JobView]:
        """Newest first, or `oldest`; pages are asked for as they are needed. Only jobs in one of the phases, with this
        name (`run-*`: that begin so) and these labels (None: whatever its value)."""
        phases = [phase] if isinstance(phase, str) else phase
        query: dict[str, Any] = {"limit": page_size, "order": "created" if oldest else "-created"}
        query |= {"phase": [str(one) for one in phases], "name": name}
        query["label"] = [key if value is None else f"{key}={value}" for key, value in (labels or {}).items()]
        while True:
            page = self._get(JobsPage, "/v1/jobs", query)
            yield from page.jobs
            if page.next_page is None:
                return
            query["page"] = page.next_page

    def cancel(self, uid: str, graceful: bool = False) -> JobView:
        """`graceful`: after the step under way, which becomes a checkpoint."""
        return self._post(JobView, f"{_path(uid)}:cancel", {"graceful": "true"} if graceful else {})

    def remove(self, uid: str, data: bool = False) -> None:
        """Forget a job that has ended; `data`: what it has in storage too."""
        self._send(self._http.build_request("DELETE", _path(uid), params={"data": data}))

    def suspend(self, uid: str) -> JobView:
        """Have the job hold nothing until it is resumed; the step under way becomes a checkpoint."""
        return self._post(JobView, f"{_path(uid)}:suspend")

    def resume(self, uid: str) -> JobView:
        return self._post(JobView, f"{_path(uid)}:resume")

    def save(self, uid: str) -> JobView:
        """Have the step under way of a running job become a checkpoint."""
        return self._post(JobView, f"{_path(uid)}:checkpoint")

    def restart(self, uid: str, step: int | None = None, skip_samples: int = 0) -> JobView:
        """Have the gang of a running job end after the step under way and start again; or with `step` go back to its
        checkpoint, and leave out so many samples after it."""
        body = None if step is None and not skip_samples else _given(step=step, skip_samples=skip_samples)
        return self._post(JobView, f"{_path(uid)}:restart", body=body)

    def change(self, uid: str, patch: Mapping[str, Any], generation: int | None = None) -> JobView:
        """Change priority, queue, labels, elastic bounds, checkpoint policy or budgets: a JSON merge patch of the spec.
        `generation`: of the job as it was read; Changed when it has another one. Default: whichever it has."""
        headers = {"If-Match": "*" if generation is None else f'"{generation}"', "Content-Type": "application/json"}
        request = self._http.build_request("PATCH", _path(uid), content=json_of(dict(patch)), headers=headers)
        return read(JobView, self._send(request))

    def rescale(
        self, uid: str, slots: int, parallel: Mapping[str, Any] | None = None, dry_run: bool = False
    ) -> Rescaled:
        """Have the job run on so many slots; `dry_run` only tells what that would come to now."""
        query = {"dry_run": "true"} if dry_run else {}
        return self._post(Rescaled, f"{_path(uid)}:rescale", query, {"slots": slots, **_given(parallel=parallel)})

    def wait(self, uid: str, timeout_s: float | None = None) -> JobView:
        """The job once it is over. An API that is away is waited for; ClusterError after the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                view = self.get(uid)
                if view.phase.terminal:
                    return view
                state = f"job {uid} is {view.phase}, not over"
            except errors.ClusterError as error:
                state = error.message
            if deadline is not None and time.monotonic() > deadline:
                raise errors.ClusterError(f"{state}, after {timeout_s:g} s", hint=f"phalanx events {uid}")
            time.sleep(POLL_S)

    def events(self, uid: str, after: int = 0, follow: bool = False) -> Iterator[EventView]:
        """Oldest first. With `follow` until the job is over; a cut stream is taken up where it was cut."""
        for _, data in self._stream(f"{_path(uid)}/events", str(after), {"follow": follow}):
            yield EventView.model_validate_json(data)

    def events_page(self, uid: str, after: int = 0) -> EventsPage:
        return self._get(EventsPage, f"{_path(uid)}/events", {"after": after})

    def logs(
        self,
        uid: str,
        after: str = "0:0",
        follow: bool = False,
        rank: int | None = None,
        attempt: int | None = None,
    ) -> Iterator[LogLine]:
        """In the order in which the lines reached storage; `follow` as for `events`."""
        query = {"follow": follow, "rank": rank, "attempt": attempt}
        for _, data in self._stream(f"{_path(uid)}/logs", after, query):
            yield LogLine.model_validate_json(data)

    def sampled(self, uid: str, points: int) -> tuple[StepView, ...]:
        """All steps in so many rows at most."""
        return self._get(MetricsPage, f"{_path(uid)}/metrics", {"max_points": points}).steps

    def metrics(self, uid: str, after_step: int = 0) -> Iterator[StepView]:
        """One row a step, in order."""
        while True:
            page = self.metrics_page(uid, after_step)
            if not page.steps:
                return
            yield from page.steps
            after_step = page.after_step

    def metrics_page(self, uid: str, after_step: int = 0) -> MetricsPage:
        return self._get(MetricsPage, f"{_path(uid)}/metrics", {"after_step": after_step})

    def ranks(self, uid: str) -> Ranks:
        return self._get(Ranks, f"{_path(uid)}/ranks")

    def incidents(self, uid: str) -> tuple[IncidentDetail, ...]:
        """Oldest first, with what ranks said, and their stacks."""
        return self._get(Incidents, f"{_path(uid)}/incidents").incidents

    def goodput(self, uid: str) -> GoodputView:
        return self._get(GoodputView, f"{_path(uid)}/goodput")

    def checkpoints(self, uid: str) -> tuple[CheckpointView, ...]:
        return self._get(Checkpoints, f"{_path(uid)}/checkpoints").checkpoints

    def checkpoint(self, uid: str, step: int | None = None, attempt: int | None = None) -> ManifestView:
        """What its manifest says. Here and below: of the newest good one without `step`, else of its newest attempt."""
        return self._get(ManifestView, _checkpoint(uid, step), _given(attempt=attempt))

    def verify(self, uid: str, step: int | None = None, attempt: int | None = None) -> Asked:
        """Have every byte of it checked; `answer` tells the verdict."""
        return self._post(Asked, f"{_checkpoint(uid, step)}:verify", _given(attempt=attempt))

    def restore(self, uid: str, step: int, attempt: int | None = None) -> JobView:
        """Have the job go back to it; newer ones are never used again."""
        return self._post(JobView, f"{_checkpoint(uid, step)}:restore", _given(attempt=attempt))

    def export(
        self,
        uid: str,
        to: str,
        step: int | None = None,
        attempt: int | None = None,
        dtype: str | None = None,
        adapter: bool = False,
    ) -> Asked:
        """Have its model written to the new folder `to`; `answer` tells when it is. `adapter`: the adapters alone."""
        body = {"to": to, "adapter": adapter, **_given(dtype=dtype)}
        return self._post(Asked, f"{_checkpoint(uid, step)}:export", _given(attempt=attempt), body)

    def fork(
        self,
        uid: str,
        step: int | None = None,
        attempt: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> JobView:
        """A new job that begins there. `overrides`: a JSON merge patch of its spec; `key` as for `submit`."""
        body = {**_given(step=step, attempt=attempt), "overrides": dict(overrides or {})}
        return self._created(f"{_path(uid)}:fork", body, key)

    def answer(self, uid: str, asked: Asked, timeout_s: float | None = None) -> EventView:
        """The event that answers what was asked. An API that is away is waited for; ClusterError after the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        after = asked.after
        while True:
            state = f"nothing was heard of the {asked.kind} of step {asked.checkpoint.step} of job {uid}"
            try:
                page = self.events_page(uid, after)
                if found := next(filter(asked.answered_by, page.events), None):
                    return found
                after = page.after
            except errors.ClusterError as error:
                state = error.message
            if deadline is not None and time.monotonic() > deadline:
                raise errors.ClusterError(f"{state}, after {timeout_s:g} s", hint=f"phalanx events {uid}")
            time.sleep(POLL_S)

    def plan(
        self, spec: JobSpec | Mapping[str, Any], fleet: Mapping[str, Any] | None = None, tokens: float | None = None
    ) -> PlanView:
        """What the job would be, on the fleet that the API sees or on the one given. Starts nothing."""
        job = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
        return self._post(PlanView, "/v1/plan", body={"job": job, **_given(fleet=fleet, tokens=tokens)})

    def nodes(self) -> tuple[NodeView, ...]:
        return self._get(Nodes, "/v1/nodes").nodes

    def forgive(self, node: str) -> None:
        """Nothing is held against the node any more. NotFound: there is none."""
        self._send(self._http.build_request("POST", f"/v1/nodes/{urllib.parse.quote(node, safe='')}:forgive"))

    def queues(self) -> tuple[QueueView, ...]:
        return self._get(Queues, "/v1/queues").queues

    def make_queue(self, name: str, priority: int = 0) -> QueueView:
        return self._post(QueueView, "/v1/queues", body={"name": name, "priority": priority})

    def set_priority(self, queue: str, priority: int) -> QueueView:
        """Of all jobs of the queue, from now on."""
        path = f"/v1/queues/{urllib.parse.quote(queue, safe='')}"
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request("PUT", path, content=json_of({"priority": priority}), headers=headers)
        return read(QueueView, self._send(request))

    def projects(self) -> tuple[ProjectView, ...]:
        return self._get(Projects, "/v1/projects").projects

    def make_project(self, name: str, slots: int | None = None) -> ProjectView:
        """`slots`: that its jobs may hold together."""
        return self._post(ProjectView, "/v1/projects", body={"name": name, "slots": slots})

    def set_quota(self, name: str, slots: int | None) -> ProjectView:
        """What its jobs may hold together from now on; None: no bound."""
        path = f"/v1/projects/{urllib.parse.quote(name, safe='')}/quota"
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request("PUT", path, content=json_of({"slots": slots}), headers=headers)
        return read(ProjectView, self._send(request))

    def tokens(self, project: str | None = None) -> tuple[TokenView, ...]:
        return self._get(Tokens, "/v1/tokens", _given(project=project)).tokens

    def make_token(
        self, name: str, scope: Scope = "submit", project: str | None = None, lasts_s: float | None = None
    ) -> MadeToken:
        """The answer is the only one that has the token itself."""
        body = {"name": name, "scope": scope, **_given(project=project, lasts_s=lasts_s)}
        return self._post(MadeToken, "/v1/tokens", body=body)

    def revoke_token(self, id_: str) -> None:
        self._send(self._http.build_request("DELETE", f"/v1/tokens/{urllib.parse.quote(id_, safe='')}"))

    def usage(
        self, since: float = 0.0, until: float | None = None, price: float | None = None
    ) -> tuple[UsageView, ...]:
        """By project and queue, of jobs that were submitted in between; `price`: of a slot-hour."""
        return self._get(Usage, "/v1/usage", {"since": since, **_given(until=until, price=price)}).entries

    def hooks(self) -> tuple[HookView, ...]:
        return self._get(Hooks, "/v1/hooks").hooks

    def make_hook(
        self, url: str, secret: str, types: Sequence[str] | None = None, project: str | None = None
    ) -> HookView:
        """`secret`: where the controller finds the key of its signatures, env:NAME or file:PATH."""
        body = {"url": url, "secret": secret, **_given(types=types and list(types), project=project)}
        return self._post(HookView, "/v1/hooks", body=body)

    def remove_hook(self, id_: str) -> None:
        self._send(self._http.build_request("DELETE", f"/v1/hooks/{urllib.parse.quote(id_, safe='')}"))

    def audit(self, project: str | None = None, after: int = 0) -> Iterator[AuditView]:
        """Who changed what, oldest first; pages are asked for as they are needed."""
        while True:
            page = self._get(AuditPage, "/v1/audit", {"after": after, **_given(project=project)})
            if not page.entries:
                return
            yield from page.entries
            after = page.after


def _path(uid: str) -> str:
    """Of a job; whatever a person gives as its uid stays one segment."""
    if not uid:
        raise errors.NotFound("the uid of a job is missing", hint="phalanx list shows them", field="uid")
    return f"/v1/jobs/{urllib.parse.quote(uid, safe='')}"


def _checkpoint(uid: str, step: int | None) -> str:
    return f"{_path(uid)}/checkpoints/{'newest' if step is None else step}"


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
