"""Copies of a rank's tensors in host memory, taken while the device computes on. Knows no files.

On a GPU the copies are queued on a stream of their own, into pinned memory, behind what was queued so far; forward and
backward of the next step run beside them, and only what writes the tensors again has to `order` itself behind. On a
CPU a copy is done when it was taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Copies:
    """Their memory is used again by the next tensor of the same name and shape."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, torch.Tensor]] = {}
        self._stream: torch.Stream | None = None
        self._begun = False
        self._taken: torch.Event | None = None

    def take(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A copy that is whole once `taken()` has been waited for."""
        like = (local.shape, local.dtype, local.stride(), local.device)
        made_for, copy = self._kept.get(name, (None, None))
        if copy is None or made_for != like:
            copy = torch.empty_like(local, device="cpu", pin_memory=local.device.type != "cpu")
            self._kept[name] = like, copy
        if local.device.type == "cpu":
            return copy.copy_(local)
        if not self._begun:
            self._stream = self._stream or torch.Stream(device=local.device)
            self._stream.wait_stream(torch.accelerator.current_stream(local.device))
            self._begun = True
        with self._stream:
            return copy.copy_(local, non_blocking=True)

    def taken(self) -> Callable[[], None]:
        """Ends a round of copies; the answer waits for it, in any thread."""
        if not self._begun:
            return lambda: None
        assert self._stream is not None
        self._begun = False
        event = self._taken = self._stream.record_event()
        return event.synchronize

    def order(self) -> None:
        """What is queued from here on begins when the copies have been taken."""
        if self._taken is not None:
            torch.accelerator.current_stream().wait_event(self._taken)
            self._taken = None
