"""Some steps of a run that are to be done again, and what came of each: plain values, no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field

from workers.models.spec import Spec
from workers.spec import Assignment, RunSpec


class Stretch(Spec):
    """The steps after `begin`, one for each of `samples`. Without a manifest they begin where the job began."""

    run: RunSpec
    job: str
    root: str = Field(description="storage root of the job: {root}/{job} has its checkpoints")
    manifest: str | None = None
    origin: tuple[str, str] | None = Field(default=None, description="another job's folder, and the manifest there")
    weights: str | None = Field(default=None, description="Hugging Face folder whose weights the job began with")
    begin: int = Field(ge=0, description="step of the manifest or origin; 0: the seed or the weights")
    samples: tuple[int, ...] = Field(min_length=1, description="number of each step's first sample")
    device: Literal["cpu", "gpu"] = "cpu"

    def assignment(self, rank: int) -> Assignment:
        """Of a rank that loads what the stretch begins with, and saves nothing."""
        return Assignment(
            job=self.job,
            attempt=0,
            token="",
            rank=rank,
            run=self.run,
            root=self.root,
            store_host="",
            store_port=0,
            local_index=rank,
            device=self.device,
            resume=() if self.manifest is None else (self.manifest,),
            origin=None if self.manifest is not None else self.origin,
            weights=self.weights,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Redone:
    """A step that was done again. Both are NaN or infinite where they are no numbers; nothing comes after that."""

    step: int
    loss: float
    grad_norm: float
