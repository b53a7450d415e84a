"""The API from Python: `Client(url, token)`. Answers are the API's own views; its problems are errors again.

Knows HTTP and nothing of the store; reads no environment.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from api import sse_lines
from api.views import (
    Asked,
    AuditPage,
    AuditView,
    Checkpoints,
    CheckpointView,
    EventsPage,
    EventView,
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
    Rescaled,
    StepView,
    Tokens,
    TokenView,
    Trial,
)
from service.contracts import errors
from service.contracts.job import JobSpec, Phase
from service.contracts.status import JobView
from service.store.records import Scope

ViewT = TypeVar("ViewT", bound=BaseModel)

TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # streams beat every 10 s
RETRY_S = 0.3
PATIENCE_S = 60.0  # for a stream to come back after a cut
POLL_S = 0.3


class Client:
    """Safe for one thread. Raises UserError (and NotFound, Conflict, Unauthorized) or ClusterError."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url.rstrip("/"), token
        if not (token.isascii() and token.isprintable()):
            raise errors.Unauthorized("the token has a character that no token has", hint="see PHALANX_TOKEN")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=TIMEOUT,
                trust_env=False,
                verify=self.url.startswith("https:"),
            )
        except httpx.InvalidURL as error:
            raise errors.UserError(f"{url!r} is no URL of an API: {error}", hint="see PHALANX_API_URL") from None

    @classmethod
    def find(cls, home: Path, url: str | None = None, token: str | None = None) -> Client:
        """The API that runs with this home; `url` and `token` go before what its files say."""
        url = url or _known_url(home / "api.json")
        return cls(url, token or _known_token(home / "token"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def submit(self, spec: JobSpec | Mapping[str, Any], key: str | None = None, project: str | None = None) -> JobView:
        """Put a job into the queue. With the same `key` it is submitted once, however often it is called. `project`:
        default the token's own."""
        job = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
        return self._created("/v1/jobs", job, key, _given(project=project))

    def dry_run(self, spec: JobSpec | Mapping[str, Any]) -> Trial:
        """What the job would come to if it were submitted now. Nothing is kept."""
        job = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
        return self._post(Trial, "/v1/jobs", {"dry_run": "true"}, job)

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

    def suspend(self, uid: str) -> JobView:
        """Have the job hold nothing until it is resumed; the step under way becomes a checkpoint."""
        return self._post(JobView, f"{_path(uid)}:suspend")

    def resume(self, uid: str) -> JobView:
        return self._post(JobView, f"{_path(uid)}:resume")

    def save(self, uid: str) -> JobView:
        """Have the step under way of a running job become a checkpoint."""
        return self._post(JobView, f"{_path(uid)}:checkpoint")

    def restart(self, uid: str) -> JobView:
        """Have the gang of a running job end after the step under way and start again."""
        return self._post(JobView, f"{_path(uid)}:restart")

    def change(self, uid: str, patch: Mapping[str, Any], generation: int | None = None) -> JobView:
        """Change priority, queue, labels, elastic bounds, checkpoint policy or budgets: a JSON merge patch of the spec.
        `generation`: of the job as it was read; Changed when it has another one. Default: whichever it has."""
        headers = {"If-Match": "*" if generation is None else f'"{generation}"', "Content-Type": "application/json"}
        request = self._http.build_request("PATCH", _path(uid), content=_body(dict(patch)), headers=headers)
        return _read(JobView, self._send(request))

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

    def metrics(self, uid: str, after_step: int = 0) -> Iterator[StepView]:
        """One row a step, in order."""
        while True:
            page = self._get(MetricsPage, f"{_path(uid)}/metrics", {"after_step": after_step})
            if not page.steps:
                return
            yield from page.steps
            after_step = page.after_step

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
        self, uid: str, to: str, step: int | None = None, attempt: int | None = None, dtype: str | None = None
    ) -> Asked:
        """Have its model written to the new folder `to`; `answer` tells when it is."""
        return self._post(
            Asked, f"{_checkpoint(uid, step)}:export", _given(attempt=attempt), {"to": to, **_given(dtype=dtype)}
        )

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
        request = self._http.build_request("PUT", path, content=_body({"priority": priority}), headers=headers)
        return _read(QueueView, self._send(request))

    def projects(self) -> tuple[ProjectView, ...]:
        return self._get(Projects, "/v1/projects").projects

    def make_project(self, name: str, slots: int | None = None) -> ProjectView:
        """`slots`: that its jobs may hold together."""
        return self._post(ProjectView, "/v1/projects", body={"name": name, "slots": slots})

    def set_quota(self, name: str, slots: int | None) -> ProjectView:
        """What its jobs may hold together from now on; None: no bound."""
        path = f"/v1/projects/{urllib.parse.quote(name, safe='')}/quota"
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request("PUT", path, content=_body({"slots": slots}), headers=headers)
        return _read(ProjectView, self._send(request))

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

    def audit(self, project: str | None = None, after: int = 0) -> Iterator[AuditView]:
        """Who changed what, oldest first; pages are asked for as they are needed."""
        while True:
            page = self._get(AuditPage, "/v1/audit", {"after": after, **_given(project=project)})
            if not page.entries:
                return
            yield from page.entries
            after = page.after

    def _get(self, kind: type[ViewT], path: str, query: Mapping[str, Any] | None = None) -> ViewT:
        answer = self._send(self._http.build_request("GET", path, params=query))
        return _read(kind, answer)

    def _post(
        self,
        kind: type[ViewT],
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> ViewT:
        request = self._http.build_request("POST", path, params=query, content=None if body is None else _body(body))
        if body is not None:
            request.headers["Content-Type"] = "application/json"
        return _read(kind, self._send(request))

    def _created(
        self, path: str, body: Mapping[str, Any], key: str | None, query: Mapping[str, Any] | None = None
    ) -> JobView:
        headers = {"Idempotency-Key": key or secrets.token_hex(16), "Content-Type": "application/json"}
        request = self._http.build_request("POST", path, params=query, content=_body(dict(body)), headers=headers)
        try:
            answer = self._send(request)
        except errors.ClusterError:  # the key makes a second try safe, whether or not the first one arrived
            time.sleep(RETRY_S)
            answer = self._send(request)
        return _read(JobView, answer)

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            answer = self._http.send(request, stream=stream)
            if not answer.is_success:
                answer.read()
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error
        if not answer.is_success:
            raise _error(answer)
        return answer

    def _stream(self, path: str, cursor: str, query: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(cursor, data) of each message up to the end that the API announces."""
        given = {name: value for name, value in query.items() if value is not None}
        patience = Patience(PATIENCE_S)
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": cursor}
            request = self._http.build_request("GET", path, params=given, headers=headers)
            try:
                answer = self._send(request, stream=True)
                try:
                    for message in sse_lines.messages(patience.hearing(answer.iter_lines())):
                        if message.event == "end":
                            return
                        cursor = message.id
                        yield cursor, message.data
                finally:
                    answer.close()
            except (errors.ClusterError, httpx.TransportError) as error:
                patience.lose(_unreachable(self.url, error), time.monotonic())
            else:
                cut = errors.ClusterError("the API ended the stream before the job was over")
                patience.lose(cut, time.monotonic())
            time.sleep(RETRY_S)


class Patience:
    """How long a stream may be away, counted from its first failure after something was last heard of it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lost_at: float | None = None

    def hearing(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:  # heartbeats too
            self._lost_at = None
            yield line

    def lose(self, error: errors.ClusterError, now: float) -> None:
        """Raise `error` when it has been too long."""
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at >= self._limit_s:
            raise error


def _path(uid: str) -> str:
    """Of a job; whatever a person gives as its uid stays one segment."""
    if not uid:
        raise errors.NotFound("the uid of a job is missing", hint="phalanx list shows them", field="uid")
    return f"/v1/jobs/{urllib.parse.quote(uid, safe='')}"


def _checkpoint(uid: str, step: int | None) -> str:
    return f"{_path(uid)}/checkpoints/{'newest' if step is None else step}"


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _read(kind: type[ViewT], answer: httpx.Response) -> ViewT:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError:
        raise errors.ClusterError(
            f"{answer.request.url} answered something that this client can't read",
            hint="is it a Phalanx API, of this version? PHALANX_API_URL names it",
        ) from None


def _error(answer: httpx.Response) -> errors.PhalanxError:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    kind = _kinds().get(body.get("reason", ""))
    if kind is None:
        kind = errors.UserError if answer.is_client_error else errors.ClusterError
    said = f"{answer.request.url} answered {answer.status_code} {answer.reason_phrase}"
    detail = body.get("detail") or said
    return kind(detail, hint=body.get("hint", ""), field=body.get("field", ""))


def _kinds() -> dict[str, type[errors.PhalanxError]]:
    found: dict[str, type[errors.PhalanxError]] = {}
    pending = [errors.UserError, errors.ClusterError]
    while pending:
        kind = pending.pop()
        found[kind.code] = kind
        pending.extend(kind.__subclasses__())
    return found


def _unreachable(url: str, error: Exception) -> errors.ClusterError:
    if isinstance(error, errors.ClusterError):
        return error
    return errors.ClusterError(
        f"the API at {url} does not answer: {error or type(error).__name__}",
        hint="is it running? 'phalanx up' starts one here; PHALANX_API_URL names another",
    )


def _known_url(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["url"])
    except FileNotFoundError:
        raise errors.ClusterError(
            f"no API is known: there is no {path}",
            hint="'phalanx up' starts one here; PHALANX_API_URL names another",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.ClusterError(
            f"no API is known: {path} can't be read: {error}", hint="PHALANX_API_URL names one"
        ) from None


def _known_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        raise errors.Unauthorized(
            f"there is no token at {path}", hint="set PHALANX_TOKEN to the token of the API"
        ) from None
    except (OSError, ValueError) as error:
        raise errors.Unauthorized(
            f"the token at {path} can't be read: {error}", hint="set PHALANX_TOKEN to the token of the API"
        ) from None


def _body(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:  # YAML knows dates and sets; a job has neither
        raise errors.UserError(f"a value of the job can't be JSON: {error}", hint="quote it") from None
    except (ValueError, RecursionError) as error:  # and aliases of what they stand in
        raise errors.UserError(f"the job can't be JSON: {error}", hint="is there an alias to itself in it?") from None
