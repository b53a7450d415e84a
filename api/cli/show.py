"""A job, an event, a line of log, an error, for a person to read; and a job followed until it is over."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api import turns
from api.cli import tables
from api.client import Client
from api.views import EventView, LogLine, ManifestView, Trial
from api.wire import PATIENCE_S
from service.contracts import errors
from service.contracts.status import JobView

PLAIN_WIDTH = 160  # where nobody looks on, lines are cut by whoever reads them
PLAIN_EVERY_S = 5.0  # seconds between lines of progress there


def console(stderr: bool = False) -> Console:
    """Colours and live views on a terminal, plain text elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, markup=False)


def problem(error: errors.PhalanxError) -> None:
    """To stderr: what is wrong, and what would work."""
    out = console(stderr=True)
    out.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        out.print(Text.assemble(("hint: ", "bold"), error.hint), soft_wrap=True)


def event_line(event: EventView) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    return Text.assemble((at, "dim"), "  ", (event.type, "bold"), f"  {event.reason}" if event.reason else "")


def trial(told: Trial) -> str:
    """What a job would come to."""
    if not told.starts:
        return f"would wait: {told.reason}"
    nodes = dict.fromkeys(place.node for place in told.placement)
    return f"would start: {told.reason}, on {', '.join(nodes)}"


def log_line(line: LogLine) -> str:
    rank = "-" if line.rank is None else line.rank
    return f"[{line.attempt}.{rank} {line.node}] {line.text}"


def job(out: Console, view: JobView) -> None:
    out.print(_facts(view))
    if view.status.incidents:
        out.print()
        out.print(tables.incidents(view.status.incidents))


def _facts(view: JobView) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    status, progress = view.status, view.status.progress
    facts.add_row("job", view.uid)
    facts.add_row("phase", Text.assemble(tables.phase(view.phase), f": {view.reason}" if view.reason else ""))
    facts.add_row("progress", f"step {progress.step} of {progress.steps}, {progress.tokens} tokens")
    if progress.loss is not None:
        first = tables.number(progress.loss_first, ".4f")
        facts.add_row("loss", f"{first} at first, {progress.loss:.4f} now")
    if progress.eval_step is not None:
        loss = tables.number(progress.eval_loss, ".4f")
        best = "" if progress.eval_best is None else f"; best {progress.eval_best:.4f} after {progress.eval_best_step}"
        facts.add_row("evaluation", f"loss {loss} on other text, after step {progress.eval_step}{best}")
    if status.layout is not None:
        nodes = ", ".join(dict.fromkeys(place.node for place in status.placement))
        on = f", on {nodes}" if nodes else ""
        facts.add_row("layout", f"{status.layout}, attempt {status.attempt}{on}")
    facts.add_row("goodput", f"{view.goodput:.1%}")
    if status.checkpoint_step is not None:
        facts.add_row("checkpoint", f"step {status.checkpoint_step}: {status.checkpoint}")
    if status.snapshot_step is not None:
        facts.add_row("snapshot", f"step {status.snapshot_step}, {status.snapshot_bytes:,} bytes, in memory")
    facts.add_row("storage", view.storage)
    return facts


def checkpoint(out: Console, view: ManifestView, now: float) -> None:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    one = view.checkpoint
    facts.add_row("checkpoint", f"step {one.step} of {view.job}, by attempt {one.attempt}: {one.manifest}")
    facts.add_row("state", tables.state(one, now))
    facts.add_row("published", f"{tables.duration(now - view.created_at)} ago")
    facts.add_row("layout", _pairs(view.layout))
    facts.add_row("model", _pairs(view.model))
    facts.add_row("tensors", f"{view.tensors:,} of {view.elements:,} elements; {view.parameters:,} parameters")
    facts.add_row("size", f"{view.nbytes:,} bytes in {view.shards:,} shards")
    facts.add_row("samples", "-" if view.samples is None else f"{view.samples:,}")
    facts.add_row("ledger", "; ".join(map(_pairs, view.ledger)) or "-")
    facts.add_row("optimizer", _pairs(view.optimizer))
    out.print(facts)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None) or "-"


def follow(client: Client, uid: str, out: Console) -> JobView:
    """Show the job until it is over, then sum it up."""
    view = watch(client, uid, out)
    out.print()
    job(out, view)
    return view


def watch(client: Client, uid: str, out: Console) -> JobView:
    """The job when it is over: events are shown as they come, progress on a terminal's last line.

    An API that is away for a while is waited for.
    """
    progress: _Live | _Plain = _Live(out) if out.is_terminal else _Plain(out)
    view = None
    with progress.shown():
        for turn in turns.each(client, uid, PATIENCE_S, figures=False):
            view = turn.job
            for event in turn.events:
                out.print(event_line(event), soft_wrap=True)
            progress.update(view)
    assert view is not None
    return view


class _Live:
    """The last line of a terminal, drawn again at every turn."""

    def __init__(self, out: Console) -> None:
        self._live = Live(console=out, transient=True, auto_refresh=False)

    def shown(self) -> contextlib.AbstractContextManager[object]:
        return self._live

    def update(self, view: JobView) -> None:
        self._live.update(_bar(view), refresh=True)


class _Plain:
    """A line now and then."""

    def __init__(self, out: Console) -> None:
        self._out, self._said, self._step = out, 0.0, 0

    def shown(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def update(self, view: JobView) -> None:
        step, now = view.status.progress.step, time.monotonic()
        if step != self._step and now - self._said >= PLAIN_EVERY_S:
            self._said, self._step = now, step
            self._out.print(f"{view.phase}  {_steps(view)}  {_figures(view)}", soft_wrap=True)


def _bar(view: JobView) -> RenderableType:
    progress = view.status.progress
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=progress.steps, completed=progress.step, width=16)
    grid.add_row(tables.phase(view.phase), bar, _steps(view), _figures(view))
    return grid


def _steps(view: JobView) -> str:
    return f"{view.status.progress.step}/{view.status.progress.steps}"


def _figures(view: JobView) -> str:
    progress = view.status.progress
    figures = [f"loss {tables.number(progress.loss, '.3f')}"]
    if progress.eval_loss is not None:
        figures.append(f"eval {progress.eval_loss:.3f}")
    if progress.tokens_per_s is not None:
        figures.append(f"{progress.tokens_per_s:,.0f} tok/s")
    if progress.eta_s is not None and not view.phase.terminal:
        figures.append(f"eta {tables.duration(progress.eta_s)}")
    return "  ".join(figures)
