"""`phalanx plan calibrate`: a short probe of this machine, into a file that `phalanx plan --probe` reads.

The probe runs in a process of its own: it needs torch, which nothing here loads.
"""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from api.cli import show
from service.contracts import errors
from service.core.plan import calibration
from workers.timings import Probe

PATIENCE_S = 300.0
GIGA = 1e9


class Device(enum.StrEnum):
    CPU = "cpu"
    GPU = "gpu"


def calibrate(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="a job's file: shapes of its model; default a usual one's")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="default gpu where there is one")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="what is written")] = Path("probe.json"),
    as_json: Annotated[bool, typer.Option("--json", help="print what is written, and nothing else")] = False,
) -> None:
    """Time products, attention, copies and all-reduces on this machine, for plans that use what it reaches."""
    words = [*(("--job", str(job)) if job else ()), *(("--device", device) if device else ())]
    found = _probed(words)
    try:
        out.write_text(f"{found.model_dump_json(indent=2)}\n", encoding="utf-8")
    except OSError as error:
        raise errors.UserError(f"{out} can't be written: {error.strerror}") from None
    if as_json:
        typer.echo(found.model_dump_json())
        return
    show.console().print(f"{found.device}, over what the cost model says of it; plan with it by --probe {out}")
    show.console().print(_table(found))


def read(path: Path) -> Probe:
    """UserError says what is wrong with the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.UserError(f"{path} can't be read: {error.strerror}", hint=calibration.HINT) from None
    except (ValueError, RecursionError) as error:
        raise errors.UserError(f"{path} is no probe: it is not JSON: {error}", hint=calibration.HINT) from None
    return calibration.parse(value)


def _probed(words: list[str]) -> Probe:
    command = [sys.executable, "-m", "workers.calibrate", "--json", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise errors.ClusterError(f"the probe took more than {PATIENCE_S:g} s", hint="probe an idle machine") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        kind = errors.UserError if done.returncode == 2 else errors.ClusterError
        raise kind(f"nothing was probed: {said[-1]}")
    return calibration.parse(json.loads(done.stdout))


def _table(found: Probe) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("PRECISION", "PRODUCTS", "OF THE MODEL'S", "ATTENTION", "MEMORY", "LINKS", "LATENCY"):
        table.add_column(column, no_wrap=True)
    for precision in dict.fromkeys(product.precision for product in found.products):
        reached = calibration.gpu(found, precision).reached
        fastest = max(one.flops / one.seconds for one in found.products if one.precision == precision)
        ratios = (reached.products, reached.attention, reached.memory, reached.nvlink, reached.latency)
        table.add_row(precision, f"{fastest / GIGA:,.0f} GFLOP/s at best", *(f"x {ratio:.3g}" for ratio in ratios))
    return table
