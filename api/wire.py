"""Requests to the API and their answers: problems are errors again, streams are taken up where they were cut.

Knows HTTP, and no route; reads no environment.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from api import sse_lines
from service.contracts import errors
from service.contracts.status import JobView

ViewT = TypeVar("ViewT", bound=BaseModel)

TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # streams beat every 10 s
RETRY_S = 0.3
PATIENCE_S = 60.0  # for a stream to come back after a cut


class Wire:
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
    def find(cls, home: Path, url: str | None = None, token: str | None = None) -> Self:
        """The API that runs with this home; `url` and `token` go before what its files say."""
        url = url or _known_url(home / "api.json")
        return cls(url, token or _known_token(home / "token"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _get(self, kind: type[ViewT], path: str, query: Mapping[str, Any] | None = None) -> ViewT:
        answer = self._send(self._http.build_request("GET", path, params=query))
        return read(kind, answer)

    def _post(
        self,
        kind: type[ViewT],
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> ViewT:
        request = self._http.build_request("POST", path, params=query, content=None if body is None else json_of(body))
        if body is not None:
            request.headers["Content-Type"] = "application/json"
        return read(kind, self._send(request))

    def _created(
        self, path: str, body: Mapping[str, Any], key: str | None, query: Mapping[str, Any] | None = None
    ) -> JobView:
        headers = {"Idempotency-Key": key or secrets.token_hex(16), "Content-Type": "application/json"}
        request = self._http.build_request("POST", path, params=query, content=json_of(dict(body)), headers=headers)
        try:
            answer = self._send(request)
        except errors.ClusterError:  # the key makes a second try safe, whether or not the first one arrived
            time.sleep(RETRY_S)
            answer = self._send(request)
        return read(JobView, answer)

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
    """How long an API may be away, counted from its first failure after something was last heard of it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lost_at: float | None = None

    def hearing(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:  # heartbeats too
            self.found()
            yield line

    def found(self) -> None:
        """Something was heard of it."""
        self._lost_at = None

    def lose(self, error: errors.ClusterError, now: float) -> None:
        """Raise `error` when it has been too long."""
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at >= self._limit_s:
            raise error


def read(kind: type[ViewT], answer: httpx.Response) -> ViewT:
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
        found.setdefault(kind.code, kind)  # one without a code of its own is told as what it is a kind of
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


def json_of(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:  # YAML knows dates and sets; a job has neither
        raise errors.UserError(f"a value of the job can't be JSON: {error}", hint="quote it") from None
    except (ValueError, RecursionError) as error:  # and aliases of what they stand in
        raise errors.UserError(f"the job can't be JSON: {error}", hint="is there an alias to itself in it?") from None
