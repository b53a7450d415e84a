"""Steps of a job done again in processes of this machine, which need torch; nothing here loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from service.contracts import errors
from service.contracts.runtime import Runtime
from workers.stretch import Redone, Stretch

RANKS_A_CORE = 4
FEWEST = 8  # that any machine is trusted with


def check_size(world: int, layout: str) -> None:
    """UserError: so many processes would do nothing but wait for each other here."""
    cores = os.cpu_count() or 1
    most = max(FEWEST, RANKS_A_CORE * cores)
    if world > most:
        raise errors.UserError(
            f"{layout} is {world} processes, and this machine of {cores} cores can be trusted with {most}",
            hint="--one does it in one process, and compares within rounding",
        )


def redone(stretch: Stretch, runtime: Runtime, told: Callable[[Redone], None]) -> list[Redone]:
    """What each step gave; `told` as they come. UserError where it can't be done here."""
    command = [sys.executable, "-m", "service.rerun", runtime.model_dump_json()]
    found: list[Redone] = []
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(stretch.model_dump_json())
            process.stdin.close()
            for line in process.stdout:
                found.append(Redone(**json.loads(line)))
                told(found[-1])
        if process.returncode:
            said.seek(0)
            raise _failed(process.returncode, said.read(), stretch)
    return found


def _failed(code: int, said: str, stretch: Stretch) -> errors.PhalanxError:
    last = (said.strip().splitlines() or [f"the processes ended with {code}"])[-1]
    if code != 2:
        return errors.ClusterError(f"nothing was replayed: {last}", hint="is there memory enough? --one needs less")
    hint = f"{stretch.root}/{stretch.job} and the job's data have to be readable from here"
    if "GPU" in last:
        hint = "--one needs one; --device cpu needs none, and compares within rounding"
    return errors.UserError(f"nothing was replayed: {last}", hint=hint)
