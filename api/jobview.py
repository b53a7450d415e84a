"""A row of the store as the JobView that is answered: adds the clock's share and the place of its folder."""

from __future__ import annotations

from service.contracts import job
from service.contracts.job import Phase
from service.contracts.status import JobStatus, JobView
from service.core import goodput
from service.store.records import JobRow


def of(row: JobRow, storage_root: str, now: float) -> JobView:
    """`now`: Unix seconds, the end of the time that goodput counts for a job that has not ended."""
    status = JobStatus.model_validate(row.status)
    end = now if row.ended_at is None else row.ended_at
    return JobView(
        uid=row.uid,
        name=row.name,
        project=row.project,
        phase=Phase(row.phase),
        reason=row.reason,
        created_at=row.created_at,
        ended_at=row.ended_at,
        cancel_requested=row.cancel_requested,
        desired="cancelled" if row.cancel_requested else "suspended" if row.desired == "suspended" else "running",
        generation=row.generation,
        goodput=goodput.goodput(status.productive_s, row.created_at, end),
        storage=folder(row, storage_root),
        status=status,
        spec=row.spec,
    )


def tag(row: JobRow) -> str:
    """ETag of the job's spec: another one with every change."""
    return f'"{row.generation}"'


def root(row: JobRow, storage_root: str) -> str:
    """That the job asked for, or the service's own."""
    return str(row.spec.get("checkpoint", {}).get("root") or storage_root)


def folder(row: JobRow, storage_root: str) -> str:
    return job.folder(root(row, storage_root), row.uid)
