"""The checkpoints of a job as they are told: what the store knows of them, and what storage holds. Reads only."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from api import jobview
from api.door import Door
from api.views import CheckpointView, ManifestView
from service.contracts import errors
from service.store.records import JobRow
from workers.checkpoint import manifest
from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.checkpoint.storage import Storage

NAMED = 8  # good checkpoints in a hint


def listed(given: Door, row: JobRow) -> list[CheckpointView]:
    """Newest first. Where storage can't be asked, what it holds stays open."""
    stored: set[str] | None = None
    with contextlib.suppress(errors.ClusterError):
        stored = _stored(given, row)
    return _views(given, row, stored)


def known(given: Door, row: JobRow, step: int | None, attempt: int | None) -> CheckpointView:
    """That of the newest attempt at `step`, or the newest good one. NotFound names the good ones."""
    views = _views(given, row, _stored(given, row))
    asked = [view for view in views if _meant(view, step, attempt)]
    good = [view for view in asked if view.good]
    if step is None and good:
        return good[0]
    if step is None or not asked:
        raise errors.NotFound(f"job {row.uid} has no {_name(step, attempt)}", hint=_hint(views), field="step")
    return asked[0]


def usable(given: Door, row: JobRow, step: int | None, attempt: int | None) -> CheckpointView:
    """As `known`, of several attempts a good one. Conflict where it is rejected, NotFound where it was removed."""
    views = _views(given, row, _stored(given, row))
    asked = [view for view in views if _meant(view, step, attempt)]
    if good := [view for view in asked if view.good]:
        return good[0]
    if step is not None and (rejected := [view for view in asked if view.rejected is not None]):
        reason = f"{_name(step, attempt)} of job {row.uid} is never used again: {rejected[0].rejected}"
        raise errors.Conflict(reason, hint=_hint(views), field="step")
    what = f"no {_name(step, attempt)}" + (" any more: it was removed" if step is not None and asked else "")
    raise errors.NotFound(f"job {row.uid} has {what}", hint=_hint(views), field="step")


def manifest_of(given: Door, row: JobRow, view: CheckpointView) -> Manifest:
    """Conflict where it is damaged."""
    with _asking(given, row) as storage:
        try:
            return manifest.load(storage, view.manifest)
        except BadCheckpoint as error:
            hint = f"phalanx checkpoint verify {row.uid} {view.step} rejects it for good"
            raise errors.Conflict(f"checkpoint {error}", hint=hint, field="step") from None


def shown(document: Manifest, view: CheckpointView) -> ManifestView:
    sizes = {name: math.prod(tensor.shape) for name, tensor in document.tensors.items()}
    header = document.header
    return ManifestView(
        checkpoint=view,
        job=document.job,
        created_at=document.created_at,
        layout=dict(document.layout),
        model=dict(document.model),
        shards=len(document.shards),
        nbytes=document.nbytes,
        tensors=len(sizes),
        elements=sum(sizes.values()),
        parameters=sum(size for name, size in sizes.items() if name.startswith("model.")),
        samples=header.get("samples"),
        ledger=list(header.get("ledger", ())),
        optimizer=dict(header.get("optimizer", {})),
    )


def _views(given: Door, row: JobRow, stored: set[str] | None) -> list[CheckpointView]:
    rows = (dataclasses.asdict(one) for one in given.store.checkpoints(row.uid))
    return [
        CheckpointView(**{name: value for name, value in one.items() if name != "job"}, stored=_in(stored, one))
        for one in rows
    ]


def _in(stored: set[str] | None, one: dict[str, object]) -> bool | None:
    return None if stored is None else one["manifest"] in stored


def _stored(given: Door, row: JobRow) -> set[str]:
    with _asking(given, row) as storage:
        return set(manifest.published(storage))


@contextlib.contextmanager
def _asking(given: Door, row: JobRow) -> Iterator[Storage]:
    """The job's storage; ClusterError where it does not answer."""
    folder = jobview.folder(row, given.storage_root)
    try:
        yield Storage.open(folder)
    except errors.PhalanxError:
        raise
    except Exception as error:  # each storage library has its own errors
        hint = "is it mounted, and do the credentials of the API's process reach it?"
        raise errors.ClusterError(f"storage {folder} can't be read: {error}", hint=hint) from error


def _meant(view: CheckpointView, step: int | None, attempt: int | None) -> bool:
    return step in (None, view.step) and attempt in (None, view.attempt)


def _name(step: int | None, attempt: int | None) -> str:
    which = "good checkpoint" if step is None else f"checkpoint of step {step}"
    return which + ("" if attempt is None else f" by attempt {attempt}")


def _hint(views: list[CheckpointView]) -> str:
    steps = list(dict.fromkeys(view.step for view in views if view.good))
    if not steps:
        return "it has no good checkpoint yet"
    more = f", and {len(steps) - NAMED} more" if len(steps) > NAMED else ""
    return f"good ones are of step {', '.join(map(str, steps[:NAMED]))}{more}"
