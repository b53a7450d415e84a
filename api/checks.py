"""What is refused at the door beyond the spec: what is not there, does not fit, or reaches where it may not.

Reads storage and the fleet; writes nothing, and imports nothing that a job names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import fsspec.core

from service.contracts import errors
from service.contracts.cluster import Fleet, Node
from service.contracts.job import JobSpec
from service.core.plan import search
from service.store.records import NodeRow
from workers.data.prepared import NAME as PREPARED
from workers.models.spec import BUILT_IN
from workers.spec import BUILT_IN_TEXT as BUILTIN_DATA

REMOTE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores. Other schemes (http, ftp, archives) would make the API fetch what a user names."""

LONGEST, LONGEST_NAME = 1000, 255  # bytes that file systems and object stores take; room for what a job adds

SCHEMES_HINT = "use an absolute path, file:///..., or an object store such as s3://bucket/..."


def submission(
    spec: JobSpec,
    nodes: Sequence[NodeRow],
    roots: Sequence[str],
    models: Sequence[str] = (),
    queues: Sequence[str] = ("default",),
) -> None:
    """UserError naming the field, when this job can't run here.

    `roots`: where checkpoints may go. `models`: where models besides the built-in one may come from. `queues`: that
    there are.
    """
    queue(spec, queues)
    if spec.runtime.working_dir is None:  # else it may come from there
        model(spec.model.family, models)
    checkpoint_root(spec.checkpoint.root, roots)
    for number, one in enumerate(spec.data.sources or ()):
        data(one.source, f"data.sources.{number}.source")
    data(spec.data.source)
    for number, other in enumerate(spec.eval.data if spec.eval else ()):
        data(other.source, f"eval.data.{number}.source")
    tokenizer(spec.data.tokenizer)
    template(spec.data.template)
    if nodes:  # none seen yet: the controller has not looked, and the job waits for it
        search.check_fits(spec, fleet(nodes))


def fleet(nodes: Sequence[NodeRow]) -> Fleet:
    kept = ("id", "name", "slots", "rack", "zone", "device", "address", "nvlink", "accelerator", "draining")
    ordered = sorted(nodes, key=lambda row: row.name)
    return Fleet(tuple(Node(**{name: getattr(row, name) for name in kept}) for row in ordered))


def queue(spec: JobSpec, known: Sequence[str]) -> None:
    if spec.queue not in known:
        hint = f"use {' or '.join(known)}; an operator makes more: phalanx queue create"
        raise errors.UserError(f"queue: there is no queue {spec.queue}", hint=hint, field="queue")


def model(family: str, allowed: Sequence[str]) -> None:
    """A model by import path is code that every rank runs: only from where the operator allows."""
    path = family.partition(":")[0]
    if family == BUILT_IN or any(path == known or path.startswith(f"{known}.") for known in allowed):
        return
    field = "model.family"
    works = (
        f"use {BUILT_IN}, or a class under {' or '.join(allowed)}" if allowed else f"only {BUILT_IN} is allowed here"
    )
    raise errors.UserError(
        f"{field}: this service runs no model from {path}",
        hint=f"{works}; or bring it along in runtime.working_dir; the operator allows packages by PHALANX_MODELS",
        field=field,
    )


def data(source: str, field: str = "data.source") -> None:
    if source == BUILTIN_DATA:
        return
    if source.startswith("builtin:"):
        raise errors.UserError(f"{field}: there is no {source!r}; the built-in data is {BUILTIN_DATA}", field=field)
    if not _matches(source, field) and not _matches(f"{source.rstrip('/')}/{PREPARED}", field):
        raise errors.UserError(
            f"{field}: {source} matches no file",
            hint=f"use {BUILTIN_DATA}; a path, glob or URI of text, JSON lines or Parquet that every node can read; or "
            "a folder that phalanx data prepare made",
            field=field,
        )


def tokenizer(name: str) -> None:
    field = "data.tokenizer"
    if name != "byte" and not _matches(name, field):
        hint = "use byte, or the path or URI of a tokenizer.json"
        raise errors.UserError(f"{field}: {name} is not there", hint=hint, field=field)


def template(name: str) -> None:
    field = "data.template"
    if name not in ("auto", "chatml") and not _matches(name, field):
        hint = "use auto, chatml, or the path or URI of a Jinja file or a tokenizer_config.json"
        raise errors.UserError(f"{field}: {name} is not there", hint=hint, field=field)


def checkpoint_root(root: str | None, allowed: Sequence[str]) -> None:
    if root is not None:
        written(root, allowed, "checkpoint.root", "leave it out, or ")


def written(uri: str, allowed: Sequence[str], field: str, otherwise: str = "") -> None:
    """What is written, and may be deleted, is only under the roots that the operator allows."""
    place = normal(uri, field)
    if any(_within(place, normal(parent, field)) for parent in allowed):
        return
    raise errors.UserError(
        f"{field}: {uri} is not under a storage root of this service",
        hint=f"{otherwise}use a place under {' or '.join(allowed)}",
        field=field,
    )


def normal(uri: str, field: str) -> tuple[str, str]:
    """(scheme, path) of a place in storage, links followed; UserError where it is not a plain one."""
    if problem := _unspeakable(uri):
        raise errors.UserError(f"{field}: {ascii(uri)[:80]} {problem}", hint=SCHEMES_HINT, field=field)
    scheme, _, path = uri.rpartition("://")
    if "@" in path.partition("/")[0]:  # not repeated: it may hold a password
        raise errors.UserError(f"{field}: a URI holds no credentials", hint="name them in runtime.secrets", field=field)
    scheme = {"": "file", "local": "file", "s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
    if scheme not in ("file", *REMOTE):
        raise errors.UserError(f"{field}: {uri} can't be used here", hint=SCHEMES_HINT, field=field)
    if ".." in path.split("/"):
        raise errors.UserError(f"{field}: {uri} has '..' in it", hint="write the path out", field=field)
    if scheme != "file":
        return scheme, path.strip("/")
    if not path.startswith("/"):
        raise errors.UserError(
            f"{field}: {uri} is a relative path, and ranks run elsewhere", hint=SCHEMES_HINT, field=field
        )
    return scheme, os.path.realpath(path)


def _unspeakable(uri: str) -> str:
    """Why no file system or object store could have a thing of this name; empty where one could."""
    if "\0" in uri or any("\ud800" <= char <= "\udfff" for char in uri):
        return "has a character that no path has"
    if len(uri.encode()) > LONGEST or any(len(part.encode()) > LONGEST_NAME for part in uri.split("/")):
        return f"is too long: {LONGEST} bytes at most, and {LONGEST_NAME} between two slashes"
    return ""


def _within(place: tuple[str, str], parent: tuple[str, str]) -> bool:
    inside = (place[1].rstrip("/") + "/").startswith(parent[1].rstrip("/") + "/")
    return place[0] == parent[0] and inside


def _matches(uri: str, field: str) -> bool:
    _, path = normal(uri, field)
    if _is_pattern(path.strip("/").partition("/")[0]):  # all that there is would be looked through
        hint = "name the folder that it is in"
        raise errors.UserError(f"{field}: {uri} is a pattern from the root on", hint=hint, field=field)
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        filesystem.invalidate_cache()
        if _is_pattern(path):
            return bool(filesystem.glob(path))
        return bool(filesystem.isfile(path))
    except Exception as error:  # each storage library has its own errors, and each is the answer here
        raise errors.UserError(
            f"{field}: {uri} can't be read from the API: {type(error).__name__}: {error}",
            hint="check the address and the credentials of the API's process",
            field=field,
        ) from error


def _is_pattern(path: str) -> bool:
    return any(char in path for char in "*?[")
