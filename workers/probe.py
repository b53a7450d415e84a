"""`python -m workers.probe --device cuda:0 --json`: whether a device computes, keeps and sends what it should, and how
fast.

Three checks, the same code on CPU and GPU: a matrix product, against rows of it in float64 on the CPU; memory, written
and read back as two patterns; an all-reduce of two processes. Each is timed against a floor, where one is known: a
share of what the data sheet says, or of what an earlier result of this node says. Run in a process of its own, with a
deadline: a sick device may hang it. Knows nothing of what is done about its findings.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from workers import hardware

Code = Literal["wrong", "slow", "failed"]  # another value than it should be, below its floor, not got through

NAMES = ("gemm", "memory", "pair")
UNITS = {"gemm": "FLOP/s", "memory": "bytes/s", "pair": "bytes/s"}

OF_PEAK = 0.4  # of the data sheet's dense FLOP/s: large products reach more on a sound device
OF_EARLIER = 0.7
ROWS = 256  # of a product that are computed again on the CPU
CHUNK = 1 << 23  # words of 8 bytes
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # times it, numbers that follow each other differ in every bit
BF16_SIZE, FP32_SIZE = 8192, 1024
CPU_BYTES, PAIR_BYTES = 64 << 20, 64 << 20
SHARE = 0.5  # of a GPU's free memory
PAIR_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a check found: how fast it was, and what was wrong, if anything."""

    value: float
    seconds: float  # of the whole check
    wrong: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    check: str
    code: Code
    value: float | None
    message: str


def gemm(
    device: torch.device, size: int, repeats: int = 5,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> Measured:  # fmt: skip
    """FLOP/s of size x size products in bf16 on a GPU, fp32 on a CPU. The same product comes out the same each time."""
    began = time.perf_counter()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    draw = torch.Generator().manual_seed(size)
    left, right = (torch.randn(size, size, generator=draw).to(dtype) for _ in range(2))
    a, b = left.to(device), right.to(device)
    first = multiply(a, b)
    best, same = math.inf, True
    for _ in range(repeats):
        elapsed, again = _timed(device, lambda: multiply(a, b))
        best, same = min(best, elapsed), same and torch.equal(first, again)
    wrong = _wrong_rows(left, right, first) or ("" if same else "the same product came out differently")
    return Measured(2.0 * size**3 / best, time.perf_counter() - began, wrong)


def _wrong_rows(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> str:
    """Rows all over the product against float64. The reference itself is checked through another order of sums."""
    size = left.shape[0]
    rows = torch.arange(0, size, max(1, size // ROWS))
    a, b = left[rows].double(), right.double()
    reference = a @ b
    ones = torch.ones(size, 1, dtype=torch.float64)
    if not torch.allclose(reference @ ones, a @ (b @ ones), rtol=1e-9, atol=1e-6 * size):
        return "the CPU's own float64 product is wrong"
    rounding, summing = torch.finfo(left.dtype).eps * math.sqrt(size), torch.finfo(torch.float32).eps * size
    bound = 8 * (rounding + summing)  # of sums of `size` products of normal numbers, taken in fp32
    off = (product[rows.to(product.device)].cpu().double() - reference).abs()
    bad = int((~(off <= bound)).sum())  # also what is no number
    return f"{bad} of {off.numel()} values are off by more than {bound:.2g}" if bad else ""


def memory(
    device: torch.device, nbytes: int, between: Callable[[torch.Tensor], object] = lambda words: None
) -> Measured:
    """Bytes/s that a copy reads and writes. `between`: what happens to the words until they are read, in tests."""
    began = time.perf_counter()
    words = torch.empty(max(2, nbytes // 16 * 2), dtype=torch.int64, device=device)
    bad = 0
    for inverted in (False, True):
        for start in range(0, len(words), CHUNK):
            words[start : start + CHUNK] = _pattern(start, min(CHUNK, len(words) - start), inverted, device)
        between(words)
        for start in range(0, len(words), CHUNK):
            chunk = words[start : start + CHUNK]
            bad += int((chunk != _pattern(start, len(chunk), inverted, device)).sum())
    half = len(words) // 2
    best = min(_timed(device, lambda: words[:half].copy_(words[half:]))[0] for _ in range(3))
    wrong = f"{bad} of {2 * len(words)} words were not as they had been written" if bad else ""
    return Measured(2.0 * half * words.element_size() / best, time.perf_counter() - began, wrong)


def _pattern(start: int, count: int, inverted: bool, device: torch.device) -> torch.Tensor:
    words = torch.arange(start, start + count, dtype=torch.int64, device=device).mul_(ODD)
    return words.bitwise_not_() if inverted else words


def pair(devices: Sequence[torch.device], nbytes: int, timeout_s: float = PAIR_S) -> Measured:
    """Bytes/s of an all-reduce between two processes, one a device: gloo on CPUs, NCCL on GPUs."""
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="phalanx-probe-") as folder:
        members = []
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, len(devices), f"file://{folder}/store", str(device), nbytes, timeout_s)
            process = context.Process(target=_member, args=arguments, daemon=True)
            process.start()
            theirs.close()
            members.append((process, ours))
        try:
            answers = _answers([pipe for _, pipe in members], began + timeout_s)
        finally:
            for process, pipe in members:
                process.kill()
                process.join()
                pipe.close()
    wrong = next((text for _, text in answers if text), "")
    return Measured(min(value for value, _ in answers), time.perf_counter() - began, wrong)


def _answers(pipes: list[Any], deadline: float) -> list[tuple[float, str]]:
    answers = []
    for pipe in pipes:
        if not wait([pipe], timeout=max(0.0, deadline - time.perf_counter())):
            raise TimeoutError("the two processes did not get through")
        try:
            answers.append(pipe.recv())
        except EOFError:
            raise RuntimeError("one of the two processes died") from None
    return answers


def _member(pipe: Any, rank: int, world: int, store: str, device_name: str, nbytes: int, timeout_s: float) -> None:
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both are on this node: no name is looked up
    backend = "gloo" if device.type == "cpu" else "nccl"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store, timeout, world, rank)
    numbers = torch.arange(max(1, nbytes // 4), dtype=torch.int32, device=device).remainder_(1_000_003)
    best, bad = math.inf, 0
    for _ in range(4):  # the first sets connections up
        total = numbers * (rank + 1)
        dist.barrier()
        elapsed, _ = _timed(device, lambda total=total: dist.all_reduce(total))
        best, bad = min(best, elapsed), max(bad, unlike(total, numbers * (world * (world + 1) // 2)))
    moved = 2.0 * (world - 1) / world * numbers.numel() * 4  # bytes that each sends
    pipe.send((moved / best, f"{bad} of {len(numbers)} sums are wrong" if bad else ""))
    dist.destroy_process_group()


def unlike(values: torch.Tensor, expected: torch.Tensor) -> int:
    return int((values != expected).sum())


def _timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, result


def floors(name: str, earlier: Mapping[str, Any] | None = None) -> dict[str, float]:
    """What each check should reach on a device of this name, where that is known. `earlier`: this node's own result."""
    known: dict[str, float] = {}
    if peak := hardware.peak(name, "bf16"):
        known["gemm"] = OF_PEAK * peak
    for check, told in (earlier or {}).get("checks", {}).items():
        known[check] = max(known.get(check, 0.0), OF_EARLIER * told["value"])
    return known


def judged(check: str, measured: Measured, floor: float | None) -> Found | None:
    """A wrong value says more than a slow one."""
    if measured.wrong:
        return Found(check, "wrong", measured.value, measured.wrong)
    if floor is not None and measured.value < floor:
        message = f"{measured.value:.3g} {UNITS[check]}, the floor is {floor:.3g}"
        return Found(check, "slow", measured.value, message)
    return None


def probe(
    device: torch.device, known: Mapping[str, float], skipped: Mapping[str, str] | None = None,
    size: int | None = None, nbytes: int | None = None, pair_s: float = PAIR_S,
) -> dict[str, Any]:  # fmt: skip
    """All checks but those `skipped`, which has the reasons; a check that raises is a finding."""
    skipped = dict(skipped or {})
    others = _pair_of(device)
    if others is None:
        skipped.setdefault("pair", "no second GPU is visible")
    size = size or (FP32_SIZE if device.type == "cpu" else BF16_SIZE)
    nbytes = nbytes or _free(device)
    work: dict[str, Callable[[], Measured]] = {
        "gemm": lambda: gemm(device, size),
        "memory": lambda: memory(device, nbytes),
        "pair": lambda: pair(others or (), min(nbytes, PAIR_BYTES), pair_s),
    }
    checks: dict[str, Any] = {}
    findings: list[Found] = []
    for check in (check for check in NAMES if check not in skipped):
        try:
            measured = work[check]()
        except Exception as error:  # whatever a sick device makes torch raise
            findings.append(Found(check, "failed", None, f"{type(error).__name__}: {error}"[:500]))
            continue
        floor = known.get(check)
        checks[check] = {
            "value": measured.value, "unit": UNITS[check], "floor": floor, "seconds": round(measured.seconds, 3)
        }  # fmt: skip
        findings += filter(None, [judged(check, measured, floor)])
    return {
        "device": str(device),
        "name": device_name(device),
        "checks": checks,
        "skipped": skipped,
        "findings": [dataclasses.asdict(found) for found in findings],
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _pair_of(device: torch.device) -> tuple[torch.device, torch.device] | None:
    if device.type == "cpu":
        return device, device
    count = torch.cuda.device_count()
    index = device.index or 0
    return (torch.device("cuda", index), torch.device("cuda", (index + 1) % count)) if count > 1 else None


def _free(device: torch.device) -> int:
    """Bytes to check: a share of what is free."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    return min(CPU_BYTES, int(SHARE * psutil.virtual_memory().available))


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found, 1: something, 2: could not be asked."""
    options = _options(arguments)
    try:
        device = torch.device(options.device)
        name = device_name(device)
        earlier = json.loads(options.earlier.read_text()) if options.earlier else None
        known = floors(name, earlier) | dict(options.floor)
    except (RuntimeError, AssertionError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    skipped = dict.fromkeys(options.skip, "not asked for")
    result = probe(device, known, skipped, options.size, options.bytes, options.pair_s)
    sys.stdout.write(json.dumps(result) + "\n" if options.json else _text(result))
    return 1 if result["findings"] else 0


def _text(result: Mapping[str, Any]) -> str:
    lines = [f"{result['device']} ({result['name']})"]
    for check, told in result["checks"].items():
        floor = "no floor is known" if told["floor"] is None else f"floor {told['floor']:.3g}"
        lines.append(f"  {check}: {told['value']:.3g} {told['unit']}, {floor}, {told['seconds']:g} s")
    lines += [f"  {check}: skipped, {why}" for check, why in result["skipped"].items()]
    lines += [f"  {found['check']} is {found['code']}: {found['message']}" for found in result["findings"]]
    return "\n".join(lines) + "\n"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.probe", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ... (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--earlier", type=Path, help="a result of this node as --json prints it: what it should reach")
    parser.add_argument(
        "--floor", type=_floor, action="append", default=[], help="gemm=3e14: in place of what is known"
    )
    parser.add_argument("--skip", choices=NAMES, action="append", default=[], help="leave this check out")
    parser.add_argument("--size", type=_positive, help="of the matrices")
    parser.add_argument("--bytes", type=_positive, help="of memory to check")
    parser.add_argument(
        "--pair-s", type=float, default=PAIR_S, help="seconds that the pair may take, its start included"
    )
    return parser.parse_args(arguments)


def _floor(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is no check: {', '.join(NAMES)}")
    return name, float(value)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
