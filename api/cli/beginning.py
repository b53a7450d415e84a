"""Where steps of a job can be done again from: a checkpoint of its own, or what the job began with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from api.views import CheckpointView
from service.contracts.errors import NotFound, UserError
from service.contracts.job import InitFrom
from workers.checkpoint import manifest

NAMED = 8  # checkpoints in a hint


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    step: int  # after which the next one comes
    manifest: str | None = None
    origin: tuple[str, str] | None = None  # another job's folder, and the manifest there
    weights: str | None = None  # a Hugging Face folder

    def __str__(self) -> str:
        if self.manifest is not None:
            return f"the checkpoint of step {self.step}"
        if self.origin is not None:
            return f"step {self.step} of another job"
        return "the seed" if self.weights is None else f"the weights of {self.weights}"


def of_job(start: InitFrom | None) -> Beginning:
    """What the job began with."""
    if start is None:
        return Beginning(0)
    if start.job is None:
        return Beginning(0, weights=start.huggingface)
    return Beginning(manifest.step_of(start.origin[1]), origin=start.origin)


def newest(own: Iterable[CheckpointView], first: Beginning, step: int, attempt: int) -> Beginning:
    """The newest before `step` that the attempt may have come by; without one, what the job began with."""
    good = [one for one in own if one.good and first.step < one.step < step and one.attempt <= attempt]
    best = max(good, key=lambda one: (one.step, one.attempt), default=None)
    return first if best is None else Beginning(best.step, best.manifest)


def named(own: Iterable[CheckpointView], first: Beginning, asked: int, step: int, attempt: int) -> Beginning:
    """At step `asked`. UserError: it is not before `step`. NotFound: there is none, or none any more."""
    if asked >= step:
        raise UserError(f"step {asked} is not before step {step}", hint="name an earlier one", field="from")
    if asked in (0, first.step):
        return first
    known = [one for one in own if one.attempt <= attempt]
    there = [one for one in known if one.step == asked]
    if good := [one for one in there if one.good]:
        best = max(good, key=lambda one: one.attempt)
        return Beginning(best.step, best.manifest)
    steps = sorted({one.step for one in known if one.good and one.step < step}, reverse=True)[:NAMED]
    hint = f"there are those of step {', '.join(map(str, steps))}; 0: " if steps else "0: "
    raise NotFound(f"{_lack(asked, there)}", hint=f"{hint}from {first}", field="from")


def _lack(step: int, there: list[CheckpointView]) -> str:
    rejected = [one.rejected for one in there if one.rejected is not None]
    if rejected:
        return f"the checkpoint of step {step} is never used again: {rejected[0]}"
    return f"the checkpoint of step {step} is gone: it was removed" if there else f"no checkpoint is of step {step}"
