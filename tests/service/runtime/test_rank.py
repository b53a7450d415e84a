from __future__ import annotations

import errno

import pytest
import torch
from torch.distributed import DistBackendError

from service.runtime import rank
from service.runtime.own_code import NoCode
from workers import reports
from workers.blame import Drifted, NonFinite
from workers.models.registry import NoModel
from workers.replay import Corrupted

pytestmark = [pytest.mark.ray, pytest.mark.torch]

CLOSED = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.77.3]:24119"


def wrapped(cause: BaseException) -> BaseException:
    """As a pipeline's stage tells what it met."""
    made = RuntimeError("\n            [Stage 0] failed to run forward:\n            args: (1, 2)\n")
    made.__cause__ = cause
    return made


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "user"),
        (NoModel("no module"), "code"),
        (NoCode("another archive"), "code"),
        (FileNotFoundError("corpus.txt"), "user"),
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (NonFinite("loss is nan"), "numeric"),
        (Drifted("copies"), "drift"),
        (Corrupted("layer 3"), "peer"),  # another rank is suspected
        (DistBackendError("anything"), "peer"),
        (RuntimeError(CLOSED), "peer"),
        (wrapped(RuntimeError(CLOSED)), "peer"),
        (wrapped(wrapped(DistBackendError("anything"))), "peer"),
        (wrapped(ValueError("no")), "user"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "out_of_memory"),
        (
            wrapped(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
            "out_of_memory",
        ),
    ],
)
def test_whose_fault_it_is(error: BaseException, kind: str) -> None:
    assert rank.kind_of(error) == kind


def test_who_is_suspected_of_wrong_figures_says_so() -> None:
    error = Corrupted("layer 3")
    error.suspected = True
    assert rank.kind_of(error) == "corruption"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError: "),
        (ValueError("first\nsecond"), "ValueError: first"),
        (Drifted("after step 4"), "Drifted: after step 4"),
        (wrapped(ValueError("no")), "RuntimeError: [Stage 0] failed to run forward:, from ValueError: no"),
    ],
)
def test_the_message_is_one_line_with_the_cause(error: BaseException, says: str) -> None:
    assert rank.message_of(error) == says


SENTENCES: list[tuple[reports.Report, str]] = [
    (
        reports.StepDone(4, 90.0, 1.5, 0.25, 1e-3, tokens=256, samples=64, step_s=0.5),
        "step 4  loss 1.5000  grad_norm 0.250  lr 0.001  512 tokens/s",
    ),
    (reports.StepSkipped(5, 90.0, "skip", "loss nan", (1, 2)), "step 5 skipped (skip): loss nan"),
    (reports.LossSpiked(5, 90.0, 9.0, 2.0, 2.5, (32, 40)), "step 5 has loss 9.0000, a spike: up to 2.5000 is usual"),
    (reports.Evaluated(5, 90.0, 2.5, 4096), "evaluation after step 5  loss 2.5000  tokens 4096"),
    (reports.Resumed(4, "m4"), "continuing after step 4 from m4"),
    (reports.Resumed(0, None), "continuing after step 0 from the seed"),
    (reports.Resumed(4, None), "continuing after step 4 from memory"),
    (reports.SaveFailed(4, 1, "disk full"), "step 4 could not be saved: disk full"),
    (reports.SaveDelayed(4, 1, "no answer"), "step 4 is not saved yet: no answer"),
    (reports.SnapshotFailed(4, 1, "no room"), "no snapshot of step 4: no room"),
    (reports.SnapshotRefused(4, "torn"), "the snapshot of step 4 is passed over: torn"),
    (reports.SnapshotTaken(4, 1, 4096, 0.001), ""),
    (reports.Finished(0, 9), "finished after step 9"),
    (reports.Moved(0, "step", 4, 90.0), ""),
    (reports.Failed(0, "user", 4, "no", "Traceback"), ""),
]


@pytest.mark.parametrize(("report", "line"), SENTENCES)
def test_what_the_log_says(report: reports.Report, line: str) -> None:
    assert rank.sentence(report) == line
