"""A job as a run of W&B, whose id is the job's uid. What W&B is told of its account and its mode, it reads itself.

Figures go over an axis of their own, `step`, since W&B's counter only grows. Online the run says where it stands in its
summary; offline, where a run can't be read back, a file beside it does. After a kill a step may be there twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from api.tracking import standing
from api.tracking.tracker import Batch, library, shared
from api.turns import Cursor
from service.contracts import errors
from service.contracts.job import Phase
from service.contracts.status import JobView

CURSOR = "phalanx_cursor"
QUIET = {  # of the machine that follows the job nothing is told
    "console": "off", "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "disable_git": True, "disable_code": True,
}  # fmt: skip


class WandB:
    def __init__(self, project: str) -> None:
        self._project = project
        self._library = library("wandb", "wandb")

    def begin(self, job: JobView) -> Cursor:
        tags = [f"{key}={value}"[:64] for key, value in job.spec.get("labels", {}).items()]
        with self._telling():
            self._run = self._library.init(
                project=self._project, id=job.uid, name=job.uid, resume="allow", reinit="create_new",
                config=shared(job.spec), tags=tags, settings=self._library.Settings(**QUIET),
            )  # fmt: skip
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
            self._file = Path(self._run.settings.wandb_dir) / f"phalanx-{self._project}-{job.uid}.json"
            return self._stood()

    def write(self, batch: Batch) -> None:
        with self._telling():
            for point in batch.points:
                self._run.log({**point.values, "step": point.step})
            for mark in batch.marks:
                self._run.summary[mark.title] = f"step {mark.step}: {mark.text}"
            self._run.summary[CURSOR] = standing.text(batch.cursor)
        standing.write(self._file, batch.cursor)

    def end(self, job: JobView | None) -> None:
        with self._telling():
            self._run.finish(exit_code=0 if job is None or job.phase is Phase.SUCCEEDED else 1)

    def _stood(self) -> Cursor:
        if self._run.offline:
            return standing.read(self._file)
        if not self._run.resumed:
            return Cursor()
        return standing.parsed(self._run.summary.get(CURSOR) or "")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self._library.errors.Error as error:
            raise errors.ClusterError(f"W&B: {error}", hint="wandb login, or WANDB_MODE=offline") from error
