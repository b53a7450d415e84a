"""What a job brings along for its ranks: whether its project may, and which archive of code it is.

Whoever runs code on a Ray cluster owns all of it, and variables can make a process run code. So both are for projects
whose fleet is their own; others may have the credentials of storage and trackers, as far as the operator allows.
"""

from __future__ import annotations

import hashlib
import zipfile

import fsspec.core

from api import checks
from api.rules import Rules
from service.contracts import errors
from service.contracts.job import JobSpec
from service.contracts.runtime import Runtime

CREDENTIALS = frozenset({
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "WANDB_API_KEY",
})  # fmt: skip
MOST_BYTES = 512 << 20  # of an archive
PIECE = 1 << 20


def checked(spec: JobSpec, project: str, rules: Rules) -> JobSpec:
    """The job as it is kept: with the digest of its code. UserError names what its project may not have."""
    asked, own = spec.runtime, rules.brings_code(project)
    if not own and (asked.env or asked.working_dir):
        field = "runtime.env" if asked.env else "runtime.working_dir"
        hint = "who runs code owns the fleet: the operator names projects that have their own in PHALANX_OWN_CODE"
        raise errors.UserError(f"{field}: jobs of project {project} bring none here", hint=hint, field=field)
    for name, reference in asked.secrets.items():
        _secret(name, reference, project, own, rules)
    if asked.working_dir is None:
        if asked.digest is not None:
            field = "runtime.digest"
            raise errors.UserError(f"{field} is of a working_dir, and there is none", hint="leave it out", field=field)
        return spec
    return spec.model_copy(update={"runtime": _pinned(asked, asked.working_dir)})


def _secret(name: str, reference: str, project: str, own: bool, rules: Rules) -> None:
    field = f"runtime.secrets.{name}"
    if not own and name not in CREDENTIALS:
        hint = f"these can be: {', '.join(sorted(CREDENTIALS))}"
        raise errors.UserError(f"{field}: jobs of project {project} have no such secret", hint=hint, field=field)
    if not rules.names_secret(project, reference):
        hint = "the operator allows references by PHALANX_SECRETS"
        raise errors.UserError(f"{field}: {reference} is not for project {project}", hint=hint, field=field)


def _pinned(asked: Runtime, uri: str) -> Runtime:
    field = "runtime.working_dir"
    checks.normal(uri, field)
    try:
        found = _digest(uri)
    except errors.UserError:
        raise
    except Exception as error:  # each storage library has its own errors, and each is the answer here
        raise errors.UserError(
            f"{field}: {uri} can't be read from the API: {type(error).__name__}: {error}",
            hint="it is a zip archive, at a path or URI that the API and every node can read",
            field=field,
        ) from error
    if asked.digest not in (None, found):
        hint = "leave digest out to take the archive as it is now"
        raise errors.UserError(f"{field}: {uri} is not what it was: its digest is {found}", hint=hint, field=field)
    return asked.model_copy(update={"digest": found})


def _digest(uri: str) -> str:
    filesystem, path = fsspec.core.url_to_fs(uri)
    filesystem.invalidate_cache()
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        if file.seek(0, 2) > MOST_BYTES:
            _refuse(uri, f"is more than {MOST_BYTES >> 20} MiB")
        file.seek(0)
        if not zipfile.is_zipfile(file):
            _refuse(uri, "is no zip archive")
        file.seek(0)
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _refuse(uri: str, why: str) -> None:
    hint = "write one with: python -m zipfile -c code.zip my_package"
    raise errors.UserError(f"runtime.working_dir: {uri} {why}", hint=hint, field="runtime.working_dir")
