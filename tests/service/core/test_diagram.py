from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.contracts.errors import UserError
from service.contracts.job import Phase
from service.core import diagram, machine

PAGE = f"# Head\n\n{diagram.BEGIN}\nold\n{diagram.END}\n\ntail\n"


def test_every_phase_and_edge_is_drawn() -> None:
    drawn = machine.diagram()
    assert drawn.startswith("stateDiagram-v2\n    [*] --> queued: JobSubmitted\n")
    assert "    placing --> queued: GangRefused\n" in drawn
    assert all(f"    {phase} --> " in drawn and f" --> {phase}: " in drawn for phase in Phase)
    assert sum(" --> " in line for line in drawn.splitlines()) == len(machine.edges()) + 3


def test_only_the_block_is_drawn_anew() -> None:
    page = diagram.embed(PAGE)
    assert page.startswith(f"# Head\n\n{diagram.BEGIN}\n```mermaid\nstateDiagram-v2\n")
    assert page.endswith(f"```\n{diagram.END}\n\ntail\n")
    assert diagram.embed(page) == page


def test_a_page_without_a_block_is_an_error() -> None:
    with pytest.raises(UserError, match="no diagram block"):
        diagram.embed("# Head\n")


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    assert "behind" in (diagram.main(["--check", str(page)]) or "")
    assert page.read_text(encoding="utf-8") == PAGE
    assert diagram.main([str(page)]) is None
    assert diagram.main(["--check", str(page)]) is None
    page.write_text("no block", encoding="utf-8")
    assert "no diagram block" in (diagram.main([str(page)]) or "")


def test_the_core_loads_neither_torch_nor_ray_nor_a_database() -> None:
    code = (
        "import sys, service.core.machine, service.core.codec, service.core.status\n"
        "print(*({'torch', 'ray', 'sqlalchemy', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
