"""Silent corruption: every replica computes the same samples once more, and what differs in a bit was computed wrong.

A device that errs now and then spoils the gradients of all replicas alike, since they are summed: copies never drift
apart, and nothing else shows it. Compared are the results of each block forward, the losses, and the gradients that
each block hands back; products for the gradients of weights are not, since the sum over replicas comes before anyone
sees them. With three replicas or more the odd one is known; of two both are suspected. One alone has nobody to compare
with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.engine import Engine
from workers.numerics import fingerprint


class Corrupted(ArithmeticError):
    """Replicas computed the same and did not get the same; on all ranks. `suspected`: this rank may have erred."""

    suspected = False


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Place:
    """In the order in which an error would spread: forward through the layers, the losses, and back."""

    backward: bool
    position: int
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Odd:
    """The first place at which replicas differ, and the ranks there that may have erred."""

    place: Place
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        return f"{self.place.what}, suspected {'is' if len(self.ranks) == 1 else 'are'} {ranks}"


class Replay:
    """Of one engine. Collective: all ranks call it with the same samples."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.watching = engine, False
        self.prints: dict[Place, list[torch.Tensor]] = defaultdict(list)
        for part in engine.parts:
            for name, block in part.get_submodule("layers").named_children():
                block.register_forward_hook(partial(self._passed, int(name)))

    @property
    def samples(self) -> int:
        """That are computed: what the longest replica computes in a step, as far as there are so many."""
        run = self.engine.run
        return min(run.train.global_batch, self._micro_batches * run.parallel.micro_batch)

    @property
    def _micro_batches(self) -> int:
        run = self.engine.run
        return max(run.parallel.runs(run.train.global_batch))

    def odd(
        self, tokens: torch.Tensor, targets: torch.Tensor, first: int, starts: torch.Tensor | None = None
    ) -> Odd | None:
        """What differs between replicas over [samples, seq], the same answer on all ranks. The training state, and what
        the next step computes, are as if it had not been."""
        self.watching = True
        try:
            with deterministic():
                losses = self.engine.again(tokens, targets, first, self._micro_batches, starts)
        finally:
            self.watching = False
        if losses is not None:
            self.prints[Place(False, self.engine.run.model.layers, "losses")].append(fingerprint(losses))
        own, self.prints = self.prints, defaultdict(list)
        return self._agreed(own)

    def _agreed(self, own: dict[Place, list[torch.Tensor]]) -> Odd | None:
        places = sorted(own)
        columns = [place for place in places for _ in own[place]]
        mine = torch.stack([figure for place in places for figure in own[place]])
        found: tuple[Place, bool] | None = None
        for place, values in zip(columns, self._gathered(mine).T.tolist(), strict=True):
            if len(set(values)) > 1:
                found = place, _errs(values, self.engine.replica)
                break
        everyone: list[tuple[Place, bool] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        at = min((one[0] for one in everyone if one is not None), default=None)
        if at is None:
            return None
        return Odd(at, tuple(rank for rank, one in enumerate(everyone) if one == (at, True)))

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """[figures] -> [replicas, figures]"""
        found = mine[None]
        for axis in ("shard", "replicate"):
            group, size = self.engine.mesh[axis].get_group(), self.engine.mesh[axis].size()
            parts = [torch.empty_like(found) for _ in range(size)]
            dist.all_gather(parts, found, group=group)
            found = torch.cat(parts)
        return found

    def _passed(self, layer: int, block: nn.Module, inputs: Any, out: torch.Tensor) -> None:
        if not self.watching:
            return
        layers = self.engine.run.model.layers
        self.prints[Place(False, layer, f"the result of layer {layer}")].append(fingerprint(out))
        back = Place(True, layers - layer, f"the gradient from layer {layer}")
        inputs[0].register_hook(lambda gradient: self.prints[back].append(fingerprint(gradient)))


def _errs(values: list[int], replica: int) -> bool:
    """Whether this replica is not of the majority; without one everybody may be wrong."""
    usual = max(set(values), key=values.count)
    return 2 * values.count(usual) <= len(values) or values[replica] != usual


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, where there are such."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
