"""Tables for people: jobs, incidents, checkpoints, nodes. Times are given in: no table asks the API or the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from api import sweep
from api.cli.sampled import Sample
from api.cli.verdict import Compared
from api.views import CheckpointView, GoodputView, HookView, NodeView, ProjectView, QueueView, TokenView, UsageView
from service.contracts.job import Phase
from service.contracts.status import ConditionView, IncidentView, JobView
from workers.data.prepared import Shard

COLOURS = {
    Phase.SUCCEEDED: "green",
    Phase.RUNNING: "green",
    Phase.FAILED: "red",
    Phase.CANCELLED: "yellow",
    Phase.CANCELLING: "yellow",
    Phase.RECOVERING: "magenta",
    Phase.SUSPENDED: "yellow",
    Phase.SUSPENDING: "yellow",
}


def jobs(found: Iterable[JobView], now: float) -> Table:
    table = _table("JOB", "PHASE", "STEP", "LOSS", "GOODPUT", "FAULTS", "AGE", fold="JOB")
    for job in found:
        progress = job.status.progress
        table.add_row(
            job.uid,
            phase(job.phase),
            f"{progress.step}/{progress.steps}",
            number(progress.loss, ".3f"),
            f"{job.goodput:.0%}",
            str(len(job.status.incidents)),
            duration(now - job.created_at),
        )
    return table


def members(found: Sequence[JobView]) -> Table:
    """Of a sweep: what each has, and what it has come to."""
    names = list(dict.fromkeys(path for job in found for path in sweep.values(job)))
    table = _table("JOB", *(name.upper() for name in _short(names)), "PHASE", "STEP", "LOSS", "EVAL", fold="JOB")
    for job in found:
        progress, values = job.status.progress, sweep.values(job)
        table.add_row(
            job.uid,
            *(sweep.text(values[name]) if name in values else "-" for name in names),
            phase(job.phase),
            f"{progress.step}/{progress.steps}",
            number(progress.loss, ".4f"),
            number(sweep.evaluation(job), ".4f"),
        )
    return table


def _short(paths: Sequence[str]) -> list[str]:
    """Their last parts, where these differ."""
    last = [path.rpartition(".")[2] for path in paths]
    return last if len(set(last)) == len(last) else list(paths)


def findings(found: Iterable[tuple[str, bool, str, str]]) -> Table:
    """What was looked at, whether it is good, what was found, what to do."""
    table = _table("", "WHAT", "FOUND", "WHAT TO DO", fold="FOUND")
    for what, good, told, hint in found:
        table.add_row(Text("ok", style="green") if good else Text("bad", style="bold red"), what, told, hint)
    return table


def conditions(found: Iterable[ConditionView], now: float) -> Table:
    table = _table("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE", fold="MESSAGE")
    for one in found:
        table.add_row(one.type, str(one.status), f"{duration(now - one.at)} ago", one.reason, one.message)
    return table


def seconds(found: GoodputView) -> Table:
    """Where the time went."""
    table = _table("TIME", "SECONDS", "SHARE", fold="TIME")
    for name, value in found.model_dump().items():
        if name.endswith("_s") and value and name != "elapsed_s":
            share = value / found.elapsed_s if found.elapsed_s else 0.0
            table.add_row(name.removesuffix("_s").replace("_", " "), f"{value:.1f}", f"{share:.1%}")
    return table


def busy(found: Iterable[JobView]) -> Table:
    """What is at work, and how fast."""
    table = _table("JOB", "PHASE", "SLOTS", "STEP", "LOSS", "TOKENS/S", "ETA", "REASON", fold="REASON")
    for job in found:
        progress, layout = job.status.progress, job.status.layout
        table.add_row(
            job.uid,
            phase(job.phase),
            "-" if layout is None or not job.status.placement else str(layout.world),
            f"{progress.step}/{progress.steps}",
            number(progress.loss, ".3f"),
            number(progress.tokens_per_s, ",.0f"),
            duration(progress.eta_s),
            job.reason,
        )
    return table


def usage(found: Iterable[UsageView]) -> Table:
    table = _table("PROJECT", "QUEUE", "JOBS", "SLOT-HOURS", "LOST", "TOKENS", "GOODPUT", "COST", fold="PROJECT")
    for one in found:
        table.add_row(
            one.project, one.queue, str(one.jobs), f"{one.slot_hours:,.2f}",
            f"{sum(one.lost_slot_hours.values()):,.2f}", f"{one.tokens:,.0f}", f"{one.goodput:.1%}",
            number(one.cost, ",.2f"),
        )  # fmt: skip
    return table


def hooks(found: Iterable[HookView]) -> Table:
    table = _table("WEBHOOK", "PROJECT", "URL", "TOLD", "FAILURES", "ERROR", fold="ERROR")
    for hook in found:
        table.add_row(hook.id, hook.project or "all", hook.url, str(hook.after), str(hook.failures), hook.error)
    return table


def queues(found: Iterable[QueueView]) -> Table:
    table = _table("QUEUE", "PRIORITY", fold="QUEUE")
    for queue in found:
        table.add_row(queue.name, str(queue.priority))
    return table


def projects(found: Iterable[ProjectView]) -> Table:
    table = _table("PROJECT", "SLOTS", fold="PROJECT")
    for one in found:
        table.add_row(one.name, number(one.slots, ",d"))
    return table


def tokens(found: Iterable[TokenView], now: float) -> Table:
    table = _table("ID", "SCOPE", "PROJECT", "STATE", "NAME", fold="NAME")
    for one in found:
        table.add_row(one.id, one.scope, one.project or "all", _token_state(one, now), one.name)
    return table


def _token_state(one: TokenView, now: float) -> str:
    if one.revoked_at is not None:
        return f"revoked {duration(now - one.revoked_at)} ago"
    if one.expires_at is None:
        return "good"
    return f"good for {duration(one.expires_at - now)}" if one.expires_at > now else "expired"


def incidents(found: Iterable[IncidentView]) -> Table:
    table = _table("#", "CAUSE", "STEP", "DETECTED", "RECOVERED", "REDONE", "WHAT", fold="WHAT")
    for incident in found:
        table.add_row(
            str(incident.number),
            incident.cause.value if incident.cause else incident.kind,
            str(incident.step),
            duration(incident.detect_s),
            duration(incident.recover_s),
            number(incident.steps_redone, "d"),
            incident.message,
        )
    return table


def checkpoints(found: Iterable[CheckpointView], now: float) -> Table:
    table = _table("STEP", "ATTEMPT", "PUBLISHED", "BYTES", "STATE", fold="STATE")
    for one in found:
        published = f"{duration(now - one.published_at)} ago"
        table.add_row(str(one.step), str(one.attempt), published, number(one.nbytes, ",d"), state(one, now))
    return table


def state(one: CheckpointView, now: float) -> str:
    if one.rejected is not None:
        return f"rejected: {one.rejected}"
    if one.stored is False:
        return "removed"
    return "published" if one.verified_at is None else f"verified {duration(now - one.verified_at)} ago"


def samples(found: Iterable[Sample]) -> Table:
    table = _table("SAMPLE", "REPLICA", "SOURCE", "ROW", "LEARNED", "TEXT", fold="TEXT")
    for one in found:
        text = " ".join(one.text.split())
        table.add_row(
            str(one.number), str(one.replica), one.source, str(one.row), str(one.learned), Text(text[:160]),
        )  # fmt: skip
    return table


def replayed(found: Iterable[Compared]) -> Table:
    table = _table("STEP", "ATTEMPT", "LOSS", "RECORDED", "GRAD_NORM", "RECORDED", "APART", fold="APART")
    for one in found:
        figures = (one.loss, one.recorded_loss, one.grad_norm, one.recorded_grad_norm)
        apart = "same" if one.same else f"{one.apart:.1e}"
        table.add_row(str(one.step), str(one.attempt), *map(repr, figures), apart)
    return table


def shards(found: Iterable[Shard]) -> Table:
    table = _table("SHARD", "DOCUMENTS", "TOKENS", "BYTES", fold="SHARD")
    for one in found:
        table.add_row(one.name, f"{one.documents:,}", f"{one.tokens:,}", f"{one.nbytes:,}")
    return table


def nodes(found: Iterable[NodeView], now: float) -> Table:
    table = _table("NODE", "SLOTS", "DEVICE", "RACK", "ZONE", "ADDRESS", "SEEN", "NOT PLACED ON", fold="NOT PLACED ON")
    for node in found:
        table.add_row(
            node.name,
            str(node.slots),
            node.device,
            node.rack or "-",
            node.zone or "-",
            node.address,
            f"{duration(now - node.seen_at)} ago",
            node.barred or "-",
        )
    return table


def phase(value: Phase) -> Text:
    return Text(value.value, style=COLOURS.get(value, "cyan"))


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """Two figures that matter: 0.8s, 42s, 3m05s, 2h10m, 4d01h."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _table(*columns: str, fold: str) -> Table:
    """`fold` names the one column that gives way where the terminal is narrow; the others stay whole."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != fold, overflow="fold")
    return table
