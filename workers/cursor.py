"""How far the run is: steps done, samples consumed, and the ledger of which attempt consumed which samples."""

from __future__ import annotations

import dataclasses
from typing import Any

from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.spec import RunSpec


@dataclasses.dataclass(slots=True)
class Cursor:
    """Sample number `samples` of the global order comes next."""

    attempt: int
    step: int = 0
    samples: int = 0
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)

    def advance(self, count: int) -> None:
        """One step consumed the next `count` samples."""
        if not self.ledger or self.ledger[-1]["attempt"] != self.attempt:
            self.ledger.append({"attempt": self.attempt, "start": self.samples, "end": self.samples})
        self.step += 1
        self.samples += count
        self.ledger[-1]["end"] = self.samples

    def header(self, run: RunSpec) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors; independent of the layout."""
        return {
            "step": self.step,
            "samples": self.samples,
            "ledger": [dict(entry) for entry in self.ledger],
            "seed": run.train.seed,
            "data": run.data.model_dump(),
            "optimizer": {"name": run.train.optimizer, "steps": self.step},
            "precision": run.train.precision,
        }

    @classmethod
    def resumed(cls, document: Manifest, attempt: int) -> Cursor:
        """Where a checkpoint says to continue. Raises BadCheckpoint when its header is not whole."""
        header = document.header
        try:
            ledger = [{key: int(entry[key]) for key in ("attempt", "start", "end")} for entry in header["ledger"]]
            return cls(attempt, int(header["step"]), int(header["samples"]), ledger)
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(document.path, f"its header is not whole: {error!r}") from None


def check_order(document: Manifest, run: RunSpec) -> None:
    """ValueError when the checkpoint's samples come from another order: its cursor would count the wrong ones.

    One that consumed none, as an imported model, goes with any.
    """
    if not document.header.get("samples"):
        return
    then = {"seed": document.header.get("seed"), **document.header.get("data", {})}
    now = {"seed": run.train.seed, **run.data.model_dump()}
    if changed := [name for name in now if name in then and then[name] != now[name]]:
        was = ", ".join(f"{name} {then[name]!r}, now {now[name]!r}" for name in changed)
        raise ValueError(f"{document.path} was trained on other samples ({was}); train under another job's name")


FREE = ("seq_len", "init_std", "vocab_size")
"""Of a model, what a run may change when it continues: the vocabulary's size is the tensors' own."""


def check_model(document: Manifest, run: RunSpec) -> None:
    """ValueError when the checkpoint is of another model, also where all shapes are equal."""
    now = run.model.model_dump()
    if changed := [
        name for name in document.model if name in now and name not in FREE and document.model[name] != now[name]
    ]:
        was = ", ".join(f"{name} {document.model[name]!r}, now {now[name]!r}" for name in changed)
        raise ValueError(f"{document.path} is of another model ({was})")
