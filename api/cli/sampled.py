"""The samples that a step of a job was given, found again from its spec and what was told of the step."""

from __future__ import annotations

import dataclasses

from api.cli import recorded
from api.client import Client
from service.contracts.errors import NotFound, UserError
from service.contracts.job import parse_job
from workers.data import tokens
from workers.data.reading import Reading
from workers.spec import IGNORED, ParallelLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    number: int  # in the global order
    replica: int  # that was given it
    source: str
    row: int  # in the source
    tokens: list[int]
    learned: int  # tokens that are targets
    text: str


def at(client: Client, uid: str, step: int, rank: int | None = None) -> list[Sample]:
    """Of a step that was completed, as its attempt had it. NotFound: it was not. UserError: there is no such rank."""
    spec = parse_job(client.get(uid).spec)
    row = next((one for one in client.metrics(uid, step - 1) if one.step == step), None)
    if row is None:
        raise NotFound(f"nothing is known of step {step} of job {uid}", hint="name a step that was completed")
    layout = recorded.layout(recorded.layouts(client, uid), uid, row.attempt)
    batch = spec.train.global_batch
    end = int(row.model_dump()["samples"])
    replicas = range(layout.dp) if rank is None else [_replica(layout, rank)]
    reading = Reading(spec.data, spec.model.seq_len, spec.train.seed)
    using = tokens.tokenizer(reading.sources[0].tokenizer)
    found = []
    for replica in replicas:
        first, count = layout.share(end - batch, batch, replica)
        inputs, targets, _ = reading.rows(first, count)
        for number, (source, place) in enumerate(reading.origins(first, count)):
            ids = inputs[number].tolist()
            learned = int((targets[number] != IGNORED).sum())
            found.append(Sample(first + number, replica, source, place, ids, learned, using.decode(ids)))
    return found


def _replica(layout: ParallelLayout, rank: int) -> int:
    if rank >= layout.world:
        raise UserError(f"there is no rank {rank}: {layout} has {layout.world}", field="rank")
    _, dp, _ = layout.coordinates(rank)
    return dp
