from __future__ import annotations

import dataclasses
import math

import pytest

from service.contracts.job import Phase
from service.core import liveness
from service.core.state import Job
from tests.service.core import world


def job(phase: Phase, step_s: float | None = None, step: int = 5) -> Job:
    return Job("a", 1, world.spec(), 0.0, phase, step_s=step_s, step=step, progress_at=100.0)


@pytest.mark.parametrize(
    ("phase", "step_s", "step", "seconds"),
    [
        (Phase.PLACING, None, 0, 120),
        (Phase.STARTING, None, 0, 180),
        (Phase.RUNNING, None, 5, 60),
        (Phase.RUNNING, 0.5, 5, 60),
        (Phase.RUNNING, 20.0, 5, 100),
        (Phase.RUNNING, 0.5, 10, 600),  # the last checkpoint
        *((phase, 1.0, 5, math.inf) for phase in (Phase.QUEUED, Phase.RECOVERING, Phase.FINISHING, Phase.SUCCEEDED)),
    ],
)
def test_limit(phase: Phase, step_s: float | None, step: int, seconds: float) -> None:
    assert liveness.limit(phase, job(phase, step_s, step)) == seconds


def test_a_first_attempt_has_the_time_of_its_probes() -> None:
    spec = world.job_spec(resources={"device": "cpu", "slots": 2, "probe": True})
    fresh = Job("a", 1, spec, 0.0, Phase.PLACING)
    assert liveness.limit(Phase.PLACING, fresh) == 420
    assert liveness.limit(Phase.PLACING, dataclasses.replace(fresh, started_at=5.0)) == 120


def test_a_gang_that_nobody_listened_to_has_its_time_from_when_somebody_does() -> None:
    alone = dataclasses.replace(job(Phase.RUNNING), watched_at=150.0)
    assert liveness.overdue(alone, 209.0) is None
    assert liveness.overdue(alone, 211.0) is not None


@pytest.mark.parametrize(
    ("step_s", "resumed", "step", "seconds"),
    [(0.5, 0, 49, 60), (0.5, 0, 50, 20), (0.5, 10, 59, 60), (0.5, 10, 60, 20), (8.0, 0, 50, 40), (None, None, 50, 60)],
)
def test_a_limit_is_learned(step_s: float | None, resumed: int | None, step: int, seconds: float) -> None:
    spec = world.job_spec(train={"steps": 1000, "global_batch": 16})
    own = Job("a", 1, spec, 0.0, Phase.RUNNING, step_s=step_s, step=step, resumed_step=resumed, progress_at=100.0)
    assert liveness.limit(Phase.RUNNING, own) == seconds


@pytest.mark.parametrize(
    ("source", "step", "seconds"),
    [("builtin:topics", 4, 60 + 50 * 2), ("builtin:topics", 5, 60), ("builtin:topics", 0, 60), (None, 4, 60),
     ("builtin:topics", 10, 600)],
)  # fmt: skip
def test_an_evaluation_has_its_time(source: str | None, step: int, seconds: float) -> None:
    asked = {"data": [{"source": source}], "every": 2 if step != 5 else 4, "batches": 50} if source else None
    spec = world.job_spec(eval=asked, train={"steps": 10, "global_batch": 16})
    evaluating = Job("a", 1, spec, 0.0, Phase.RUNNING, step_s=2.0, step=step, progress_at=100.0)
    assert liveness.limit(Phase.RUNNING, evaluating) == seconds


def test_who_only_evaluates_has_time_for_each_batch_as_it_starts() -> None:
    asked = {"data": [{"source": "a.txt"}, {"source": "b.txt"}], "batches": 50, "only": True}
    spec = world.job_spec(eval=asked, init_from={"huggingface": "/models/a"})
    assert liveness.limit(Phase.STARTING, Job("a", 1, spec, 0.0, Phase.STARTING)) == 180 + 2 * 50 * 10


def test_after_an_early_end_its_last_checkpoint_has_its_time() -> None:
    spec = world.job_spec(eval={"data": [{"source": "a.txt"}], "every": 3, "patience": 2}, train={"steps": 100})
    own = Job("a", 1, spec, 0.0, Phase.RUNNING, step_s=1.0, step=10, progress_at=100.0)
    assert [liveness.limit(Phase.RUNNING, dataclasses.replace(own, eval_worse=worse)) for worse in (1, 2)] == [60, 600]


@pytest.mark.parametrize(
    ("phase", "at", "kind"),
    [(Phase.RUNNING, 160.0, None), (Phase.RUNNING, 160.1, "hang"), (Phase.STARTING, 281.0, "start_failed")],
)
def test_overdue(phase: Phase, at: float, kind: str | None) -> None:
    fault = liveness.overdue(job(phase), at)
    assert (fault.kind if fault else None) == kind


def test_a_repeated_hang_has_the_same_first_line() -> None:
    one, two = (liveness.overdue(job(Phase.RUNNING, step_s), 500.0) for step_s in (1.0, 20.0))
    assert one is not None
    assert two is not None
    assert one.message != two.message
    assert one.message.splitlines()[0] == two.message.splitlines()[0]
