"""A sweep: a job for each combination of values, all of them linked by labels. Knows the client, and no files.

`sweep: ID` links the jobs; `sweep/PATH` tells the value at PATH, as far as a label can; `sweep/member` tells which
combination a job is, and of which spec it was made, so that a sweep that is submitted again adds what is missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from api.client import Client
from service.contracts import errors
from service.contracts.status import JobView

LABEL, MEMBER = "sweep", "sweep/member"
ID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # the value of a label
MOST = 1000  # jobs

Grid = Mapping[str, Sequence[Any]]
"""Dotted path in the job -> the values that it takes."""

Values = Mapping[str, Any]
"""Dotted path -> its value: one combination."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One combination, and the job that is to be submitted for it."""

    values: Values
    spec: dict[str, Any]

    @property
    def which(self) -> str:
        return _digest(self.values)

    def labelled(self, sweep: str) -> dict[str, Any]:
        labels = self.spec.get("labels") or {}
        if not isinstance(labels, dict):
            return self.spec  # the API says what is wrong with it
        own = {LABEL: sweep, MEMBER: f"{self.which}.{_digest(self.spec)}"}
        told = {f"{LABEL}/{path}": _label(value) for path, value in self.values.items()}
        return {**self.spec, "labels": {**labels, **told, **own}}


def combinations(grid: Grid) -> list[Values]:
    """Of each path's values with each of the others'; the last path's change first."""
    for path, values in grid.items():
        if not values:
            raise errors.UserError(f"the sweep has no values for {path}", hint=f"{path}=1,2,3", field=LABEL)
    each = [list({_text(value): value for value in values}.values()) for values in grid.values()]
    count = 1
    for values in each:
        count *= len(values)
    if not grid or count > MOST:
        raise errors.UserError(f"a sweep has 1 to {MOST} jobs, not {count if grid else 0}", field=LABEL)
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*each)]


def changed(job: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """The job with these values at their paths."""
    made = dict(job)
    for path, value in values.items():
        made = _with(made, path.split("."), value, path)
    return made


def submit(client: Client, id_: str, members: Sequence[Member], project: str | None = None) -> Iterator[JobView]:
    """The job of each member, in order; those that are there already are not submitted again.

    All are tried before the first is submitted. UserError names the values of one that can't be.
    """
    if not ID.fullmatch(id_):
        hint = "letters, digits, dashes, dots, 63 at most"
        raise errors.UserError(f"{id_!r} is no id of a sweep", hint=hint, field="id")
    known = _known(client, id_, members)
    for member in members:
        if member.which not in known:
            with _Named(member):
                client.dry_run(member.labelled(id_), project)
    return _submitted(client, id_, members, known, project)


def jobs(client: Client, id_: str) -> list[JobView]:
    """Oldest first. NotFound: there is no such sweep."""
    found = list(client.list(labels={LABEL: id_}, page_size=200, oldest=True)) if ID.fullmatch(id_) else []
    if not found:
        raise errors.NotFound(f"there is no job of a sweep {id_}", hint="phalanx list --label sweep shows all")
    return found


def cancel(client: Client, found: Iterable[JobView]) -> list[JobView]:
    """Have those that are not over end; they are returned."""
    asked = []
    for job in found:
        if job.phase.terminal:
            continue
        try:
            asked.append(client.cancel(job.uid))
        except errors.Conflict:  # it has ended since
            continue
    return asked


def values(job: JobView) -> dict[str, Any]:
    """Path -> what the job has there; the label's text where the spec has no such path, as of a variable."""
    labels = job.spec.get("labels") or {}
    paths = [key.removeprefix(f"{LABEL}/") for key in labels if key.startswith(f"{LABEL}/") and key != MEMBER]
    return {path: _at(job.spec, path.split("."), labels[f"{LABEL}/{path}"]) for path in sorted(paths)}


def ranked(found: Iterable[JobView]) -> list[JobView]:
    """Best first: by the loss on other text where any job has one, else by the last loss; then what has none."""
    found = list(found)
    judged = any(evaluation(job) is not None for job in found)

    def place(job: JobView) -> tuple[bool, float]:
        loss = evaluation(job) if judged else job.status.progress.loss
        return loss is None, loss or 0.0

    return sorted(found, key=place)


def evaluation(job: JobView) -> float | None:
    """Its best loss on other text, or the last where none is told to be the best."""
    progress = job.status.progress
    return progress.eval_loss if progress.eval_best is None else progress.eval_best


def _known(client: Client, id_: str, members: Sequence[Member]) -> dict[str, JobView]:
    """Combination -> its job. Conflict: it is of another spec."""
    specs = {member.which: _digest(member.spec) for member in members}
    found = {}
    for job in client.list(labels={LABEL: id_}, page_size=200):
        which, _, spec = str(job.spec["labels"].get(MEMBER)).partition(".")
        if which in specs and specs[which] != spec:
            raise _other(id_, job.uid)
        found[which] = job
    return found


def _submitted(
    client: Client, id_: str, members: Sequence[Member], known: Mapping[str, JobView], project: str | None
) -> Iterator[JobView]:
    for number, member in enumerate(members):
        if member.which in known:
            yield known[member.which]
            continue
        try:
            with _Named(member):
                yield client.submit(member.labelled(id_), f"{LABEL}/{id_}/{member.which}", project)
        except errors.ClusterError as error:
            told = f"{number} of {len(members)} jobs of sweep {id_} are submitted: {error.message}"
            raise errors.ClusterError(told, hint=f"the same again with --id {id_} submits the others") from error


class _Named:
    """A problem is told with the values of the member that has it."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, errors.UserError):
            told = f"{words(self._member.values)}: {error.message}"
            raise type(error)(told, hint=error.hint, field=error.field) from None


def words(found: Values) -> str:
    return ", ".join(f"{path}={text(value)}" for path, value in found.items())


def text(value: Any) -> str:
    return value if isinstance(value, str) else _text(value)


def _other(id_: str, uid: str) -> errors.Conflict:
    told = f"sweep {id_} has {uid} with the same values, and the rest of it is another job's"
    return errors.Conflict(told, hint="give another --id", field="id")


def _with(inner: Any, path: Sequence[str], value: Any, whole: str) -> dict[str, Any]:
    if not isinstance(inner, dict) or not all(path):
        hint = "a path is names with dots between, such as train.learning_rate"
        raise errors.UserError(f"the sweep's {whole} leads to no field of the job", hint=hint, field=LABEL)
    first, *rest = path
    return {**inner, first: _with(inner.get(first, {}), rest, value, whole) if rest else value}


def _at(inner: Any, path: Sequence[str], otherwise: Any) -> Any:
    for name in path:
        if not isinstance(inner, dict) or name not in inner:
            return otherwise
        inner = inner[name]
    return inner


def _label(value: Any) -> str:
    """As much of it as the value of a label may be."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text(value))[:63].strip("-_.")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]
