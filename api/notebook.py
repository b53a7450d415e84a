"""A job in a notebook: `watch(client, job)` shows its bar and its loss as they come; a job that a cell ends with is
shown by its facts. Importing this module tells IPython how, where there is one.

Needs no widgets: it draws HTML, and draws it again. On a terminal `watch` shows events and a line of progress.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from api import card, turns
from api.cli import show
from api.client import Client
from api.curve import MOST, Curve
from api.turns import Cursor, Turn
from api.wire import PATIENCE_S
from service.contracts.status import JobView


def watch(client: Client, job: JobView | str) -> None:
    """Until the job is over, or the cell is interrupted: then the job goes on. `client.get` tells what became of it."""
    uid = job if isinstance(job, str) else job.uid
    if _kernel() is None:
        _on_terminal(client, uid)
    else:
        _in_cell(client, uid)


def _on_terminal(client: Client, uid: str) -> None:
    out = show.console()
    try:
        show.follow(client, uid, out)
    except KeyboardInterrupt:
        out.print(_left(uid))


def _in_cell(client: Client, uid: str) -> None:
    view, curve = client.get(uid), Curve()
    draw = _display(card.of(view))
    try:
        first = client.sampled(uid, MOST)
        curve.add((step.step, loss) for step in first if (loss := step.model_dump()["loss"]) is not None)
        after = Cursor(step=first[-1].step if first else 0)
        for turn in turns.each(client, uid, PATIENCE_S, after=after):
            view = turn.job
            _grow(curve, turn)
            draw(card.of(view, curve))
    except KeyboardInterrupt:
        draw(card.of(view, curve, _left(uid)))


def _grow(curve: Curve, turn: Turn) -> None:
    losses = [(step.step, step.model_dump()["loss"]) for step in turn.steps]
    evaluations = [(one.data["step"], one.data["loss"]) for one in turn.evaluations]
    curve.add(*([one for one in each if one[1] is not None] for each in (losses, evaluations)))
    curve.incidents = tuple(one.step for one in turn.job.status.incidents)


def _left(uid: str) -> str:
    return f"{uid} goes on; watch it again at any time"


def _display(page: str) -> Callable[[str], None]:
    """Show it, and return what shows another in its place."""
    shown = importlib.import_module("IPython.display")
    handle = shown.display(shown.HTML(page), display_id=True)
    return lambda page: handle.update(shown.HTML(page))


def _kernel() -> Any:
    """The notebook's shell; None elsewhere, as in IPython on a terminal."""
    known = sys.modules.get("IPython")
    shell = known.get_ipython() if known else None
    return shell if hasattr(shell, "kernel") else None


def _register() -> None:
    if (shell := _kernel()) is not None:
        shell.display_formatter.formatters["text/html"].for_type(JobView, card.of)


_register()
