"""How far the run is: steps done, samples consumed, and the ledger of which attempt consumed which samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from workers.checkpoint.manifest import BadCheckpoint, Manifest
from workers.models.families import FREE
from workers.reports import StepDone
from workers.spec import DataSpec, RunSpec

RECENT = 32  # steps that a snapshot knows of, and as many more as nobody has heard of yet
MOST = 2048  # of those


@dataclasses.dataclass(slots=True)
class Cursor:
    """Sample number `samples` of the global order comes next."""

    attempt: int
    step: int = 0
    samples: int = 0
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)  # of the last steps, the usual ones
    best: tuple[int, float] | None = None  # step and metric of the best evaluation
    worse: int = 0  # evaluations since
    recent: list[tuple[int, StepDone]] = dataclasses.field(default_factory=list)  # of rank 0: (attempt, what it said)

    def advance(self, count: int) -> None:
        """One step consumed the next `count` samples."""
        last = self.ledger[-1] if self.ledger else None
        if last is None or last["attempt"] != self.attempt or last["end"] != self.samples:
            self.ledger.append({"attempt": self.attempt, "start": self.samples, "end": self.samples})
        self.step += 1
        self.samples += count
        self.ledger[-1]["end"] = self.samples

    def felt(self, loss: float, window: int) -> None:
        """The loss of a step, of which as many are kept as make its band."""
        self.losses = [*self.losses, loss][-window:]

    def judge(self, metric: float, margin: float) -> bool:
        """Whether an evaluation now is the best so far: a number, and lower than it by more than `margin`."""
        if math.isfinite(metric) and (self.best is None or metric < self.best[1] - margin):
            self.best, self.worse = (self.step, metric), 0
            return True
        self.worse += 1
        return False

    def remember(self, done: StepDone) -> None:
        """What was said of a step may be lost with who was to pass it on."""
        self.recent = [*self.recent[1 - MOST :], (self.attempt, done)]

    def heard(self, step: int) -> None:
        """What was said up to this step is known for good; a few are kept all the same."""
        while len(self.recent) > RECENT and self.recent[0][1].step <= step:
            del self.recent[0]

    def told(self) -> dict[str, Any]:
        """What a snapshot's header has beside a checkpoint's: what was published was heard."""
        return {"recent": [[attempt, dataclasses.asdict(done)] for attempt, done in self.recent]}

    def skip(self, count: int) -> None:
        """Leave out the next `count` samples."""
        self.samples += count

    def header(self, run: RunSpec, progress: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors, with the engine's progress; independent of the layout."""
        return {
            "step": self.step,
            "samples": self.samples,
            "ledger": [dict(entry) for entry in self.ledger],
            "losses": list(self.losses),
            "evaluated": {"best": None if self.best is None else list(self.best), "worse": self.worse},
            "seed": run.train.seed,
            "data": _order(run),
            "precision": run.train.precision,
            **progress,
        }

    @classmethod
    def resumed(cls, document: Manifest, attempt: int) -> Cursor:
        """Where a checkpoint says to continue. Raises BadCheckpoint when its header is not whole."""
        header = document.header
        try:
            ledger = [{key: int(entry[key]) for key in ("attempt", "start", "end")} for entry in header["ledger"]]
            int(header["optimizer"]["steps"])  # the engine's to read
            recent = [(int(broken), StepDone(**done)) for broken, done in header.get("recent", ())]
            losses = [float(loss) for loss in header.get("losses", ())]
            told = header.get("evaluated", {})
            best = (int(told["best"][0]), float(told["best"][1])) if told.get("best") else None
            counts = (int(header["step"]), int(header["samples"]))
            return cls(attempt, *counts, ledger, losses, best, int(told.get("worse", 0)), recent)
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(document.path, f"its header is not whole: {error!r}") from None


def check_order(document: Manifest, run: RunSpec) -> None:
    """ValueError when the checkpoint's samples come from another order: its cursor would count the wrong ones.

    One that consumed none, as an imported model, goes with any; and so does a run that trains nothing.
    """
    if not document.header.get("samples") or (run.eval and run.eval.only):
        return
    then = {
        **DataSpec().model_dump(mode="json"),
        "seed": document.header.get("seed"),
        **document.header.get("data", {}),
    }
    now = {"seed": run.train.seed, **_order(run)}
    if changed := [name for name in now if name in then and then[name] != now[name]]:
        was = ", ".join(f"{name} {then[name]!r}, now {now[name]!r}" for name in changed)
        raise ValueError(f"{document.path} was trained on other samples ({was}); train under another job's name")


def _order(run: RunSpec) -> dict[str, Any]:
    """What of the data decides which samples there are."""
    return run.data.model_dump(mode="json")  # as a manifest has it: a tuple is a list there


def check_model(document: Manifest, run: RunSpec) -> None:
    """ValueError when the checkpoint is of another model, also where all shapes are equal."""
    now = run.model.model_dump(mode="json")
    then = {**document.model}
    for model in (now, then):  # how experts are balanced may change, what they are may not
        if experts := model.get("experts"):
            model["experts"] = {key: value for key, value in experts.items() if key != "auxiliary"}
    if changed := [name for name in then if name in now and name not in FREE and then[name] != now[name]]:
        was = ", ".join(f"{name} {then[name]!r}, now {now[name]!r}" for name in changed)
        raise ValueError(f"{document.path} is of another model ({was})")
