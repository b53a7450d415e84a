"""The Ray actor around one rank: stands by, warm, until it is assigned; trains in a thread of its own, and is ended.

Its methods answer while it trains. What warms it is done in the thread that will train, since torch keeps some of its
caches by thread. It knows no controller and no store; when its raylet is gone it ends itself, so that a node that was
given up for dead can't go on writing.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray

from service.contracts.runtime import Runtime
from service.runtime import processes, stacks
from service.runtime.environment import Environment
from service.runtime.own_code import NoCode
from service.runtime.shelf import Place, Shelf
from workers.reports import (
    Evaluated,
    Failed,
    FaultKind,
    Finished,
    LossSpiked,
    Moved,
    Paused,
    Report,
    Resumed,
    SaveDelayed,
    SaveFailed,
    SnapshotFailed,
    SnapshotRefused,
    StepDone,
    StepSkipped,
)
from workers.spec import Assignment, RunSpec
from workers.wishes import Wishes

ASIDE = 2  # niceness of who stands by


class Rank:
    """Known to its node's agent from birth, so that it can be ended; `assign` sets it to work, once."""

    def __init__(self, slot: int, agent: Any, aside: bool, runtime: Runtime, scratch: str) -> None:
        """`aside`: others are at work, and come first until it is assigned. `runtime`: what its job brings along."""
        self.agent, self.step = agent, 0
        self.environment = Environment()
        self.unfit = self.environment.enter(runtime, Path(scratch))
        if runtime.secrets:  # Ray keeps what is written here, and shows it
            divert(os.devnull, os.devnull)
        if aside:
            processes.give_way(ASIDE)
        self.warmed: tuple[RunSpec, int] | None = None  # for which rank of which run
        self.wishes = Wishes()
        self.known = 0  # the last step of which what it said is in the store
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        ray.get(agent.enlist.remote(slot, os.getpid(), ray.get_runtime_context().current_actor))
        self.parent = os.getppid()
        threading.Thread(target=self._leave_with_parent, name="parent-watch", daemon=True).start()
        threading.Thread(target=self._work, name="trainer", daemon=True).start()

    def ready(self) -> None:
        """Answers once torch is imported: what takes seconds is done before the assignment.

        Without the garbage collector, which finds nothing there in an eighth of the time; nor will it look there later.
        """
        gc.disable()
        import workers.trainer  # noqa: F401

        gc.freeze()
        gc.enable()

    def warm(self, run: RunSpec, rank: int) -> None:
        """Get ready to be this rank of this run. Answers at once; what was warmed before for another, is for this."""
        self.work.put(partial(self._warm, run, rank))

    def pause(self, durable: bool) -> None:
        """End after the step under way; `durable`: with its state in storage."""
        self.wishes.pause(durable)

    def save(self) -> None:
        """Write the state of the step under way to storage."""
        self.wishes.save()

    def heard(self, step: int) -> None:
        """What it said of steps up to this one is known for good."""
        self.known = max(self.known, step)

    def assign(self, assignment: Assignment, logs: str, kept: str, devices: str | None, memory: Place | None) -> None:
        """Train: output goes to files under `logs`, reports to the agent; `kept` outlives attempts on this node."""
        from workers.parallel import compiled

        processes.give_way(0)
        if devices is not None:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        interface = processes.interface_of(ray.util.get_node_ip_address())
        for name, value in compiled.environment(Path(kept), assignment.timeout_s, interface).items():
            os.environ.setdefault(name, value)
        redirect(Path(logs), assignment.rank)
        stacks.answer_signals(Path(logs) / f"{assignment.rank}.stack")
        pp, dp, tp = assignment.run.parallel.coordinates(assignment.rank)
        where = f"(pp {pp}, dp {dp}, tp {tp}), attempt {assignment.attempt}, pid {os.getpid()}"
        say(f"rank {assignment.rank} of {assignment.world} {where}")
        self.work.put(partial(self._train, assignment, memory))

    def _work(self) -> None:
        while True:
            self.work.get()()

    def _warm(self, run: RunSpec, rank: int) -> None:
        if self.unfit is not None:  # it says so once it is assigned
            return
        from workers import trainer, warm
        from workers.parallel import mesh

        trainer.quieten("cpu")
        if self.warmed not in (None, (run, rank)):
            mesh.forget_groups()
        try:
            if self.warmed != (run, rank) and warm.warm(run, rank):
                self.warmed = run, rank
        except Exception:  # it stands by all the same
            traceback.print_exc()
            mesh.forget_groups()
            self.warmed = None
        self.agent.warmed.remote(os.getpid())

    def _train(self, assignment: Assignment, memory: Place | None) -> None:
        from torch.distributed import PrefixStore, TCPStore

        from workers import trainer
        from workers.parallel import mesh

        def tell(report: Report) -> None:
            if isinstance(report, Moved):
                self.step = max(0, report.step)
            if line := sentence(report):
                say(line)
            self.agent.tell.remote(assignment.attempt, self.environment.redaction.report(report))

        try:
            if self.unfit is not None:
                raise self.unfit
            trainer.quieten(assignment.device)
            if self.warmed not in (None, (assignment.run, assignment.rank)):
                mesh.forget_groups()
            store = TCPStore(assignment.store_host, assignment.store_port, is_master=False, wait_for_workers=False)
            shelf = Shelf(memory, assignment.rank, assignment.world) if memory else None
            place = PrefixStore(str(assignment.attempt), store)
            trainer.train(assignment, place, tell, shelf, self.wishes, lambda: self.known)
        except BaseException as error:
            text = traceback.format_exc()
            sys.stderr.write(text)
            sys.stderr.flush()
            tell(Failed(assignment.rank, kind_of(error), self.step, message_of(error), text))

    def _leave_with_parent(self) -> None:
        while os.getppid() == self.parent:
            time.sleep(0.5)
        os._exit(1)


BROKEN = (
    "Connection closed by peer",
    "Connection reset",
    "Socket closed",
    "Timed out waiting",
    "NCCL",
    "gloo/transport",
    "Broken pipe",
)
"""What collectives say when a peer is gone."""
FULL = "can't allocate memory"  # torch's word for a host without memory


def kind_of(error: BaseException) -> FaultKind:
    """Whose fault an exception of training is, as far as this rank alone can tell."""
    import torch
    import torch.distributed as dist

    from workers.blame import Drifted, NonFinite
    from workers.models.registry import NoModel
    from workers.replay import Corrupted

    if isinstance(error, NoModel | NoCode):
        return "code"
    if isinstance(error, NonFinite):
        return "numeric"
    if isinstance(error, Drifted):
        return "drift"
    if isinstance(error, Corrupted):
        return "corruption" if error.suspected else "peer"
    if any(isinstance(one, MemoryError | torch.OutOfMemoryError) or FULL in str(one) for one in causes(error)):
        return "out_of_memory"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError):
        return "storage"
    if any(isinstance(one, dist.DistError) or any(sign in str(one) for sign in BROKEN) for one in causes(error)):
        return "peer"
    return "user"


def message_of(error: BaseException) -> str:
    """One line: the exception, and what it came from."""
    told = [f"{type(one).__name__}: {next(iter(str(one).strip().splitlines()), '')}" for one in causes(error)]
    return ", from ".join(told)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from: a pipeline wraps what a stage met."""
    known: BaseException | None = error
    while known is not None:
        yield known
        known = known.__cause__


def sentence(report: Report) -> str:
    """The line of the log that a report is worth; empty for most."""
    match report:
        case StepDone():
            values = (f"step {report.step}", f"loss {report.loss:.4f}", f"grad_norm {report.grad_norm:.3f}",
                      f"lr {report.learning_rate:.3g}", f"{report.tokens / report.step_s:.0f} tokens/s")  # fmt: skip
            return "  ".join(values)
        case StepSkipped():
            return f"step {report.step} skipped ({report.action}): {report.reason}"
        case LossSpiked():
            return f"step {report.step} has loss {report.loss:.4f}, a spike: up to {report.bound:.4f} is usual"
        case Evaluated():
            return f"evaluation after step {report.step}  loss {report.loss:.4f}  tokens {report.tokens}"
        case SaveFailed():
            return f"step {report.step} could not be saved: {report.reason}"
        case SaveDelayed():
            return f"step {report.step} is not saved yet: {report.reason}"
        case SnapshotFailed():
            return f"no snapshot of step {report.step}: {report.reason}"
        case SnapshotRefused():
            return f"the snapshot of step {report.step} is passed over: {report.reason}"
        case Resumed():
            source = report.manifest or ("memory" if report.step else report.weights or "the seed")
            return f"continuing after step {report.step} from {source}"
        case Finished():
            return f"finished after step {report.step}"
        case Paused():
            return f"paused after step {report.step}"
        case _:
            return ""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def redirect(folder: Path, rank: int) -> None:
    """Send this process's output, C libraries' too, to `{folder}/{rank}.out` and `.err`."""
    folder.mkdir(parents=True, exist_ok=True)
    divert(folder / f"{rank}.out", folder / f"{rank}.err")


def divert(out: Path | str, err: Path | str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)


RankActor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Rank)
