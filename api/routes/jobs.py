"""Jobs: submit, list, look at."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from api import answers, jobview, pages, submission, trial
from api.door import Asking, Given, Uid
from api.views import JobsPage, Problem, Trial
from service.contracts import errors, job
from service.contracts.job import JobSpec, Phase
from service.contracts.status import JobView

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

REFUSED: dict[int | str, dict[str, Any]] = {
    422: {"model": Problem, "description": "what is wrong, and what would work"}
}
MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such job"}}


class _DocumentedAsJobSpec:
    """The schema shows JobSpec; the body comes through untouched, for `parse_job` says best what is wrong."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(JobSpec.__pydantic_core_schema__)


@router.post(
    "",
    status_code=201,
    response_model=JobView,
    responses={200: {"model": JobView | Trial, "description": "submitted before; or a dry run"}, **REFUSED},
)
def submit(
    given: Given,
    asking: Asking,
    request: Request,
    body: Annotated[dict[str, Any], _DocumentedAsJobSpec(), Body()],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    dry_run: Annotated[bool, Query(description="tell what it would come to, and keep nothing")] = False,
    project: Annotated[str | None, Query(max_length=63, description="default: the token's, or `default`")] = None,
) -> Response:
    """Check a job and put it into the queue. The same Idempotency-Key answers the same job."""
    spec = job.parse_job(body)
    now = time.time()
    try:
        if dry_run:
            found, queues, nodes = given.store.admission(asking.works_in(project))
            spec = submission.checked(given, asking, spec, found.name, queues, nodes)
            return answers.told(trial.made(given, spec, now))
        row, created = submission.submit(given, asking, spec, idempotency_key, now, project)
    except (errors.Conflict, errors.NotFound) as error:  # of the body, not of the route
        field = f"init_from.{error.field}" if error.field else "Idempotency-Key"
        raise errors.UserError(error.message, hint=error.hint, field=field) from error
    headers = {"Location": f"{request.url.path}/{row.uid}", "ETag": jobview.tag(row)}
    return answers.told(jobview.of(row, given.storage_root, now), 201 if created else 200, headers)


@router.get("", response_model=JobsPage, responses=REFUSED)
def listing(
    given: Given,
    asking: Asking,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str | None, Query(min_length=1, max_length=64)] = None,
    phase: Annotated[list[Phase], Query(description="any of these")] = [],  # noqa: B006  # never changed
    name: Annotated[str, Query(max_length=64, description="as a whole, or how it begins with * at its end")] = "",
    label: Annotated[list[str], Query(max_length=16, description="key=value, or key; all must hold")] = [],  # noqa: B006
    order: Annotated[Literal["-created", "created"], Query(description="newest or oldest first")] = "-created",
) -> Response:
    after, which = None if page is None else pages.seq(page), pages.which(phase, name, label, asking.project)
    rows = given.store.jobs(which, after=after, limit=limit + 1, oldest=order == "created")
    now = time.time()
    shown = rows[:limit]
    next_page = pages.token(shown[-1].seq) if len(rows) > limit else None
    return answers.told(
        JobsPage(jobs=tuple(jobview.of(row, given.storage_root, now) for row in shown), next_page=next_page)
    )


@router.get("/{uid:word}", response_model=JobView, responses=MISSING)
def one(given: Given, uid: Uid) -> Response:
    """The ETag is what a change of the job has to name."""
    row = given.store.job(uid)
    return answers.told(jobview.of(row, given.storage_root, time.time()), headers={"ETag": jobview.tag(row)})
