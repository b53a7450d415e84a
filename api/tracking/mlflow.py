"""A job as a run of MLflow. MLflow makes the ids of runs, so the run is found by its tag `phalanx.job`.

The cursor is the tag `phalanx.cursor`. A batch that a cut may have left half is written again with the same times, and
the database behind MLflow keeps a figure once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from api.tracking import standing
from api.tracking.tracker import Batch, flat, library, parts, shared
from api.turns import Cursor
from service.contracts import errors
from service.contracts.job import Phase
from service.contracts.status import JobView

JOB, CURSOR = "phalanx.job", "phalanx.cursor"
ENDED = {Phase.SUCCEEDED: "FINISHED", Phase.FAILED: "FAILED", Phase.CANCELLED: "KILLED"}
FIGURES, PARAMS, LONG = 1000, 100, 5000  # that MLflow takes at a time; characters of a value


class MLflow:
    def __init__(self, uri: str, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._entities = library("mlflow.entities", "mlflow")
        self._failed = library("mlflow.exceptions", "mlflow").MlflowException
        client = library("mlflow.tracking", "mlflow").MlflowClient
        with self._telling():
            self._client = client(uri)

    def begin(self, job: JobView) -> Cursor:
        with self._telling():
            experiment = self._client.get_experiment_by_name(self._experiment)
            id_ = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            found = self._client.search_runs([id_], f"tags.`{JOB}` = '{job.uid}'", max_results=1)
            run = found[0] if found else self._made(id_, job)
            self._run = run.info.run_id
            self._client.update_run(self._run, status="RUNNING")
        return standing.parsed(run.data.tags.get(CURSOR, ""))

    def write(self, batch: Batch) -> None:
        metric = self._entities.Metric
        rows = [
            metric(name, value, round(point.at * 1000), point.step)
            for point in batch.points
            for name, value in point.values.items()
        ]
        with self._telling():
            for part in parts(rows, FIGURES):
                self._client.log_batch(self._run, metrics=part)
            for mark in batch.marks:
                self._client.set_tag(self._run, mark.title, f"step {mark.step}: {mark.text}"[:LONG])
            self._client.set_tag(self._run, CURSOR, standing.text(batch.cursor))

    def end(self, job: JobView | None) -> None:
        if job is not None:
            with self._telling():
                end = None if job.ended_at is None else round(job.ended_at * 1000)
                self._client.set_terminated(self._run, ENDED[job.phase], end)

    def _made(self, experiment: str, job: JobView) -> Any:
        tags = {JOB: job.uid, **job.spec.get("labels", {})}
        run = self._client.create_run(experiment, round(job.created_at * 1000), tags, job.uid)
        fields = [(name, value) for name, value in flat(shared(job.spec)) if not name.startswith("labels.")]
        params = [self._entities.Param(name, str(value)[:LONG]) for name, value in fields]
        for part in parts(params, PARAMS):
            self._client.log_batch(run.info.run_id, params=part)
        return run

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self._failed as error:
            told = str(error).splitlines()[0]
            raise errors.ClusterError(f"MLflow at {self._uri}: {told}", hint="see --mlflow") from error
