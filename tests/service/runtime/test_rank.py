from __future__ import annotations

import errno

import pytest
from torch.distributed import DistBackendError

from service.runtime import rank
from workers.blame import NonFinite

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
        (FileNotFoundError("corpus.txt"), "user"),
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (NonFinite("loss is nan"), "numeric"),
        (DistBackendError("anything"), "peer"),
        (RuntimeError(CLOSED), "peer"),
        (wrapped(RuntimeError(CLOSED)), "peer"),
        (wrapped(wrapped(DistBackendError("anything"))), "peer"),
        (wrapped(ValueError("no")), "user"),
    ],
)
def test_whose_fault_it_is(error: BaseException, kind: str) -> None:
    assert rank.kind_of(error) == kind


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError: "),
        (ValueError("first\nsecond"), "ValueError: first"),
        (wrapped(ValueError("no")), "RuntimeError: [Stage 0] failed to run forward:, from ValueError: no"),
    ],
)
def test_the_message_is_one_line_with_the_cause(error: BaseException, says: str) -> None:
    assert rank.message_of(error) == says
