"""Where each process of a gang stands: its Python stack, written by itself on a signal, also with the GIL held.

And who is the odd one of a gang that stands still: the process that is stopped, else one that is in no collective while
the others wait in theirs. Knows no Ray. A signal needs no ptrace, and works in a container as it is.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

SIGNAL = signal.SIGUSR2
ANSWER_S = 2.0
POLL_S = 0.05
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
DISPATCH, DISTRIBUTED = "torch/_ops.py", "torch/distributed/"
INNERMOST = 2  # frames, of which one is in torch.distributed where a rank waits for others
TEXT_BYTES = 64_000


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """One rank, as it was found."""

    rank: int
    node: str
    state: str  # of the process, as the kernel calls it: running, sleeping, stopped, ...
    stack: str  # of the thread that trains, innermost frame first; empty: it did not answer

    @property
    def waits(self) -> bool:
        """In a collective, or for a message of another rank."""
        frames = [line for line in _frames(self.stack) if DISPATCH not in line]
        return any(DISTRIBUTED in line for line in frames[:INNERMOST])


def answer_signals(path: Path) -> None:
    """This process writes the stacks of its threads to the file whenever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(SIGNAL, file=path.open("w"), all_threads=True)


def look(rank: int, node: str, pid: int, path: Path) -> Look:
    """Ask one process; waits a moment for its answer."""
    try:
        state = str(psutil.Process(pid).status())
        before = path.stat().st_size
        os.kill(pid, SIGNAL)
    except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
        return Look(rank, node, "gone", "")
    if state in STOPPED:
        return Look(rank, node, state, "")
    deadline, text = time.monotonic() + ANSWER_S, ""
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        with path.open() as file:
            file.seek(before)
            grown = file.read()
        if grown and grown == text:
            break
        text = grown
    return Look(rank, node, state, _training(text))


def odd(looks: Sequence[Look]) -> Look | None:
    """The rank that the others wait for; None where they can't be told apart."""
    for suspects in (
        [one for one in looks if one.state in STOPPED],
        [one for one in looks if one.stack and not one.waits],
        [one for one in looks if not one.stack],
    ):
        if suspects and len(suspects) < len(looks):
            return min(suspects, key=lambda one: one.rank)
    return None


def text(looks: Sequence[Look], first: Look | None) -> str:
    """All stacks for people: the odd one's first, then those of the others, ranks with equal stacks together."""
    parts = [] if first is None else [_told(f"rank {first.rank} on {first.node}", first)]
    alike: dict[tuple[str, str], list[Look]] = {}
    for one in looks:
        if one is not first:
            alike.setdefault((one.state, one.stack), []).append(one)
    for group in sorted(alike.values(), key=lambda group: (len(group), group[0].rank)):
        parts.append(_told("ranks " + ", ".join(str(one.rank) for one in group), group[0]))
    return "\n".join(parts)[:TEXT_BYTES]


def states(looks: Sequence[Look]) -> Mapping[str, int]:
    return Counter(one.state for one in looks)


def _told(who: str, one: Look) -> str:
    return f"{who}: {one.state}\n{one.stack or '  (no answer)'}\n"


def _training(dump: str) -> str:
    """The stack of the thread that trains: the one that runs this package's trainer, else the whole dump."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump)
    found = [thread for thread in threads if "workers/trainer.py" in thread]
    return "\n".join(_frames(found[0])) if found else dump.strip()


def _frames(stack: str) -> list[str]:
    return [line for line in stack.splitlines() if line.startswith("  File ")]
