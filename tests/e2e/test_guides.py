"""The guides, block by block, as somebody would follow them: files, commands and programs on a live fleet.

A block of YAML is a file whose name its first line has; `<!-- guide: ... -->` is what a person would do by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.contracts.job import Phase
from tests.e2e.test_elastic import back
from tests.e2e.world import World, until

pytestmark = [pytest.mark.ray, pytest.mark.torch]

GUIDES = Path(__file__).parents[2] / "deploy" / "guides"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$|^<!-- guide: (.*?) -->$", re.MULTILINE | re.DOTALL)
ENOUGH = 20  # steps of a job before its node is lost


class Reader:
    """Follows a guide in a folder of its own. `deeds`: what is done by hand."""

    def __init__(self, world: World, folder: Path, deeds: dict[str, Callable[[str], None]]) -> None:
        self.folder, self.deeds = folder, deeds
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        self.environment |= {
            "PHALANX_HOME": str(world.fleet.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def follow(self, guide: str) -> str:
        """What was printed."""
        return "".join(self._printed(guide))

    def _printed(self, guide: str) -> Iterator[str]:
        for kind, text, deed in BLOCK.findall((GUIDES / guide).read_text()):
            match kind:
                case "yaml":
                    (self.folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
                case "python":
                    yield self._run(sys.executable, "-c", text)
                case "bash":  # what one block sets, the next one has
                    kept = "set -euo pipefail; touch job; JOB=$(cat job)"
                    yield self._run("bash", "-c", f"{kept}\n{text}\necho ${{JOB:-}} > job")
                case _:
                    self.deeds[deed]((self.folder / "job").read_text().strip())

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400, check=False
        )
        with (self.folder / "transcript.txt").open("a") as kept:
            kept.write(f"{command[-1]}\n{done.stdout}\n{done.stderr}\n")
        assert done.returncode == 0, (self.folder / "transcript.txt").read_text()
        return done.stdout


def test_pretrain(world: World, tmp_path: Path) -> None:
    lost: list[str] = []

    def lose(uid: str) -> None:
        world.jobs.append(uid)
        lost.append(world.reach(uid, ENOUGH).status.placement[-1].node)
        world.fleet.lose(lost[0])

    said = Reader(world, tmp_path, {"a node of the job is lost": lose}).follow("pretrain.md")
    assert re.search(r"transformers: \d\.\d+, the job: \d\.\d+\n", said)
    (uid,) = world.jobs
    view = world.client.get(uid)
    assert (view.phase, view.status.progress.step) == (Phase.SUCCEEDED, 150)
    assert [(one.kind, one.node) for one in view.status.incidents if one.cause][:1] == [("node_lost", lost[0])]
    assert list(world.losses(uid)) == list(range(1, 151))  # each step, and each once
    evaluated = [event for event in world.client.events(uid) if event.type == "Evaluated"]
    assert {event.data["step"] for event in evaluated} == set(range(50, 151, 50))
    first, last = ({name: loss for name, loss, _ in one.data["sources"]} for one in (evaluated[0], evaluated[-1]))
    assert all(last[name] < first[name] for name in ("prose", "sums"))
    back(world, lost[0])
    until(lambda: lost[0] in {node.name for node in world.client.nodes()}, "return of the node")


def test_finetune(world: World, tmp_path: Path) -> None:
    Reader(world, tmp_path, {}).follow("finetune.md")
    uid = (tmp_path / "job").read_text().strip()
    world.jobs.append(uid)
    view = world.client.get(uid)
    assert view.phase is Phase.SUCCEEDED
    assert (view.status.layout.pp, view.status.layout.tp) == (2, 2)  # type: ignore[union-attr]
    losses = list(world.losses(uid).values())
    assert losses[-1] < losses[0] / 2
