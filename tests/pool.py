"""One pool of processes for torch tests: started once a session, reused, killed and started again after any error."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"]


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Pool:
    """`run(world, function, ...)` calls `function(store, rank, ...)` in `world` processes and returns their results."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, __name__])
        self.members: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="phalanx-pool-")
        self.rounds = 0

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        self._start()
        self.rounds += 1
        path = str(Path(self.folder.name) / f"store-{self.rounds}")
        job = (function.__module__, function.__qualname__, path, args)
        members = self.members[:world]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((rank, world, *job))
        try:
            return self._collect([pipe for _, pipe in members], timeout_s)
        except BaseException:
            self.close()
            raise

    def _collect(self, pipes: list[Connection], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=timeout_s)
            if not ready:
                raise TimeoutError(
                    f"ranks {[r for r in range(len(pipes)) if r not in results]} gave no result in {timeout_s} s"
                )
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = pipe.recv()  # type: ignore[union-attr]
                if not ok:
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(pipes))]

    def _start(self) -> None:
        while len(self.members) < self.size:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def close(self) -> None:
        for process, pipe in self.members:
            process.kill()
            pipe.close()
        for process, _ in self.members:
            process.join()
            process.close()
        self.members = []

    def end(self) -> None:
        self.close()
        self.folder.cleanup()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world, module, name, path, args = pipe.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(dist.FileStore(path, world), rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
