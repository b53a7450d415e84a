"""What each event about checkpoints and snapshots does to one job, as `rules` does for all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from service.contracts import events
from service.contracts.job import Phase
from service.core import checkpoints, incidents
from service.core.commands import Record, SaveGang
from service.core.liveness import Limits
from service.core.outcome import Outcome, move, record, stop
from service.core.state import Job, Restored

Unsaved = events.SaveFailed | events.SaveDelayed | events.SnapshotFailed | events.SnapshotRefused

UNSAVED: Mapping[type, str] = {
    events.SaveFailed: "checkpoint of step {step} could not be written, training goes on",
    events.SaveDelayed: "checkpoint of step {step} could not be written yet, and is tried again; training goes on",
    events.SnapshotFailed: "no snapshot of step {step} in memory, training goes on",
    events.SnapshotRefused: "the snapshot of step {step} is passed over",
}


def restored(job: Job, event: events.RestoreRequested, limits: Limits) -> Outcome:
    """Back to an older checkpoint, at nobody's cost. What was newer is undone; steps done again count once."""
    bound = Restored(event.step, event.attempt, job.attempt, event.skip)
    if job.restored == bound or (_same(job.restored, bound) and job.step == event.step):
        return Outcome(job)  # asked again
    if event.manifest in job.rejected:
        reason = f"does not go back to the checkpoint of step {event.step}: it was rejected since that was asked for"
        return Outcome(job, (), (record(job, "RestoreRefused", reason, event.at, {"manifest": event.manifest}),))
    left_out = f", and leaves out {event.skip} samples after it," if event.skip else ""
    reason = f"goes back from step {job.step} to the checkpoint of step {event.step}{left_out} by request"
    newer = list(event.newer)
    commands, changes = stop(job, reason, keep=True)
    if job.checkpoint is not None and (job.checkpoint_step or 0) > event.step:
        newer.append(job.checkpoint)
    after = dataclasses.replace(
        job,
        step=event.step,
        checkpoint_step=event.step,
        checkpoint=event.manifest,
        restored=bound,
        incidents=incidents.settled(job.incidents, job.checkpoint_step or 0),  # they cost no more
    )
    moved = move(
        after,
        job.phase if job.phase in (Phase.QUEUED, Phase.SUSPENDING, Phase.SUSPENDED) else Phase.RECOVERING,
        "RestoreRequested",
        reason,
        event.at,
        commands,
        {"step": event.step, "manifest": event.manifest, "skip_samples": event.skip},
        **changes,
    )
    after, told = moved.job, list(moved.records)
    for manifest in dict.fromkeys(newer):
        undone = _undone(after, manifest, event.at)
        after, told = undone.job, [*told, *undone.records]
    return Outcome(after, moved.commands, tuple(told))


def requested(job: Job, event: events.SaveRequested, limits: Limits) -> Outcome:
    reason = f"a checkpoint after step {job.step} is asked for"
    line = record(job, "CheckpointRequested", reason, event.at)
    return Outcome(job, (SaveGang(job.uid, job.attempt),), (line,))


def published(job: Job, event: events.CheckpointPublished, limits: Limits) -> Outcome:
    reason = f"checkpoint of step {event.step} is published"
    data = {"step": event.step, "manifest": event.manifest, "nbytes": event.nbytes}
    line = record(job, "CheckpointPublished", reason, event.at, data)
    if job.restored is not None and job.restored.bars(event.step, event.attempt):
        undone = _undone(job, event.manifest, event.at)
        return Outcome(undone.job, (), (line, *undone.records))
    after = dataclasses.replace(job, checkpoint_step=event.step, checkpoint=event.manifest)
    return Outcome(after, (), (line,))


def rejected(job: Job, event: events.CheckpointRejected, limits: Limits) -> Outcome:
    if event.manifest in job.rejected:
        return Outcome(job)
    after = dataclasses.replace(job, rejected=(*job.rejected, event.manifest))
    if event.manifest == job.checkpoint:  # which older one is good, the next resume finds out
        after = dataclasses.replace(after, checkpoint=None, checkpoint_step=None)
    return Outcome(after, (), (_placed_in(job, checkpoints.record(event)),))


def told(job: Job, event: events.CheckpointFact, limits: Limits) -> Outcome:
    """Of a checkpoint; nothing follows for the job."""
    return Outcome(job, (), (_placed_in(job, checkpoints.record(event)),))


def unsaved(job: Job, event: Unsaved, limits: Limits) -> Outcome:
    """No failure of the job: it goes on, and its next save may do."""
    kind = type(event)
    reason = f"{UNSAVED[kind].format(step=event.step)}: {event.reason}"
    return Outcome(job, (), (record(job, kind.__name__, reason, event.at, {"step": event.step}),))


def snapshot_held(job: Job, event: events.SnapshotHeld, limits: Limits) -> Outcome:
    """Shown, and no line in the log: it may come with every step."""
    return Outcome(dataclasses.replace(job, snapshot_step=event.step, snapshot_bytes=event.nbytes))


def quarantined(job: Job, at: float) -> Outcome:
    """The state that the attempt continued with leads to the same fault again and again: older ones are tried."""
    step = job.resumed_step or 0
    bound = Restored(step - 1, job.attempt, job.attempt)
    after = dataclasses.replace(job, restored=bound, quarantined=True)
    if (job.checkpoint_step or 0) >= step:
        after = dataclasses.replace(after, checkpoint=None, checkpoint_step=None)
    manifest = job.resumed_manifest
    if manifest is None or manifest in job.rejected:
        return Outcome(after)
    line = checkpoints.rejection(
        job.uid, manifest, f"it led to the same fault after step {job.step} again and again", at
    )
    return Outcome(dataclasses.replace(after, rejected=(*job.rejected, manifest)), (), (_placed_in(job, line),))


def _same(known: Restored | None, asked: Restored) -> bool:
    return known is not None and (known.step, known.attempt, known.skip) == (asked.step, asked.attempt, asked.skip)


def _undone(job: Job, manifest: str, at: float) -> Outcome:
    """A checkpoint of what came after the one that the job went back to."""
    assert job.restored is not None
    if manifest in job.rejected:
        return Outcome(job)
    line = checkpoints.rejection(job.uid, manifest, f"restored to step {job.restored.step} by request", at)
    after = dataclasses.replace(job, rejected=(*job.rejected, manifest))
    return Outcome(after, (), (_placed_in(job, line),))


def _placed_in(job: Job, line: Record) -> Record:
    return record(job, line.type, line.reason, line.at, line.data)
