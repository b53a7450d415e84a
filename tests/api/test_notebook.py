"""A job in a notebook that is run: its card, its bar and its loss as they come, an interrupt; and on a terminal."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api import card, notebook
from api.curve import MOST, Curve
from service.contracts.job import Phase
from tests.api import steps
from tests.api.world import TOKEN, World

ROOT = Path(__file__).parents[2]
SETUP = """
from api.client import Client
from api.notebook import watch
client, uid = Client({url!r}, {token!r}), {uid!r}
"""

Heard = Callable[[str, int], None]
"""(HTML that is shown now, process of the kernel)."""


class TestNotebook:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("ipykernel")
        pytest.importorskip("nbclient")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
        monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def cells(self, world: World, uid: str, *code: str, heard: Heard = lambda page, pid: None) -> list[Any]:
        """Run them; what each shows at its end. `heard` is told of everything that is shown meanwhile."""
        import nbformat.v4
        from nbclient import NotebookClient

        class Listening(NotebookClient):
            def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
                if msg["msg_type"] in ("display_data", "update_display_data"):
                    heard(msg["content"]["data"]["text/html"], self.km.provisioner.pid)
                return super().process_message(msg, cell, cell_index)

        sources = (SETUP.format(url=world.url, token=TOKEN, uid=uid), *code)
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        Listening(made, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
        return [cell["outputs"] for cell in made["cells"][1:]]

    def test_a_job_is_watched_to_its_end(self, world: World) -> None:
        uid, seen = steps.trained(world), list[str]()

        def heard(page: str, pid: int) -> None:
            seen.append(page)
            if "polyline" in page and len(seen) < 8:
                steps.told(world, uid, [10 + len(seen)], attempt=2)
            elif len(seen) == 8:
                steps.over(world, uid, 20)

        (first, whole) = self.cells(world, uid, "client.get(uid)", "watch(client, uid)", heard=heard)
        assert f"<b>{uid}</b>" in first[0]["data"]["text/html"]
        assert first[0]["data"]["text/plain"].startswith(f"JobView(uid='{uid}', phase='running', step='12/20'")
        assert len(whole) == 1
        last = whole[0]["data"]["text/html"]
        assert ("succeeded" in last, "20 of 20" in last, last.count("<polyline")) == (True, True, 2)
        counts = [
            len(re.findall(r"[\d.]+,[\d.]+ ?", page.partition("<polyline")[2].partition("fill")[0])) for page in seen
        ]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1], len(set(counts)) > 3) == (0, 17, True)

    def test_an_interrupt_ends_the_watching_and_not_the_job(self, world: World) -> None:
        uid, told = steps.trained(world), threading.Event()

        def heard(page: str, pid: int) -> None:
            if "polyline" in page and not told.is_set():
                told.set()
                os.kill(pid, signal.SIGINT)

        watched, after = self.cells(world, uid, "watch(client, uid)", "print(client.get(uid).phase)", heard=heard)
        assert "goes on; watch it again" in watched[0]["data"]["text/html"]
        assert after[0]["text"] == "running\n"


def test_on_a_terminal_it_prints(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    uid = steps.trained(world)
    steps.over(world, uid, 20)
    with world.client() as client:
        notebook.watch(client, client.get(uid))
    told = capsys.readouterr().out
    assert ("IncidentOpened" in told, "succeeded: done" in told) == (True, True)


def test_the_repr_of_a_job_is_one_line(world: World) -> None:
    uid = steps.trained(world)
    with world.client() as client:
        job = client.get(uid)
    assert repr(job) == f"JobView(uid='{uid}', phase='running', step='12/20', loss=4.25, reason='')"
    assert str(job) == f"uid='{uid}' phase='running' step='12/20' loss=4.25 reason=''"


def test_a_card_escapes_what_a_job_says(world: World) -> None:
    uid = world.submit().uid
    world.move(uid, Phase.FAILED, "<script>&", step=3, loss=2.0, eval_loss=2.5, tokens_per_s=1234.0, eta_s=9.0)
    with world.client() as client:
        page = card.of(client.get(uid), note="a < b")
    assert "&lt;script&gt;&amp;" in page
    assert "a &lt; b" in page
    assert "loss 2.0000 · evaluation 2.5000 · tokens/s 1,234" in page
    assert "to go" not in page


@pytest.mark.parametrize("many", [1, 2 * MOST, 2 * MOST + 1, 100_000])
def test_a_curve_stays_small_and_keeps_its_ends(many: int) -> None:
    curve = Curve()
    for first in range(0, many, 5000):
        curve.add([(step, float(step)) for step in range(first, min(first + 5000, many))])
    found = [step for step, _ in curve.losses]
    assert (found[0], found[-1], found == sorted(set(found))) == (0, many - 1, True)
    assert min(many, MOST) <= len(found) <= 2 * MOST


@pytest.mark.parametrize(
    ("losses", "lines"), [([], 0), ([(1, 2.0)], 1), ([(1, 2.0), (2, 2.0)], 1), ([(1, 3.0), (2, -1.0)], 1)]
)
def test_a_curve_is_drawn_within_its_picture(losses: list[tuple[int, float]], lines: int) -> None:
    curve = Curve()
    curve.add(losses)
    curve.incidents = (1,)
    drawn = curve.svg(2)
    assert (drawn.count("<polyline"), drawn.count("<line")) == (lines, lines)
    for x, y in re.findall(r"([\d.-]+),([\d.-]+)", drawn.partition('points="')[2].partition('"')[0]):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 140
