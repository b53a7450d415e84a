"""The optimizer: AdamW or SGD over sharded parameters, its learning rate by step, its state as plain named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from workers.numerics import local
from workers.spec import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Of step number `step`, from 1: linear warm-up, then the decay to the minimum, which holds on past the horizon."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * _remaining(train, step)


def _remaining(train: TrainSpec, step: int) -> float:
    """1 at the end of the warm-up, 0 at the horizon."""
    end = train.end_of_decay
    start = train.warmup_steps
    if train.decay == "wsd":
        start = max(start, end - (train.decay_steps or max(1, end // 10)))
    done = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    match train.decay:
        case "constant":
            return 1.0
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "linear" | "wsd":
            return 1.0 - done


class Optimizer:
    """Steps over this rank's shards of the parameters, as plain tensors. Matrices decay, vectors don't.

    Its update of an element needs no other element, so a shard is all it has to see.
    """

    def __init__(self, train: TrainSpec, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.train, self.parameters, self.steps = train, parameters, 0
        self.shards = [torch.nn.Parameter(local(parameter.detach())) for parameter in parameters]
        pairs = list(zip(parameters, self.shards, strict=True))
        groups = [
            {"params": [shard for whole, shard in pairs if whole.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [shard for whole, shard in pairs if whole.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]] or groups[:1]  # a stage may have nothing to train
        fused = all(shard.device.type == "cuda" for shard in self.shards)
        how = {"fused": True} if fused else {"foreach": True}
        self.inner: torch.optim.Optimizer
        if train.optimizer == "adamw":
            self.inner = torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps, **how)
            self.slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            self.inner = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, **how)
            self.slots = ("momentum_buffer",) if train.momentum else ()
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """State as before the first step."""
        self.steps = 0
        self.tensors = {
            parameter: {slot: torch.zeros_like(parameter) for slot in self.slots} for parameter in self.parameters
        }
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            self.inner.state[shard] = {slot: local(whole) for slot, whole in self.tensors[parameter].items()}
        self._count()

    def step(self) -> float:
        """Apply the gradients; the learning rate used."""
        rate = learning_rate(self.train, self.steps + 1)
        for group in self.inner.param_groups:
            group["lr"] = rate
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        self.inner.step()
        self.drop()
        self.steps += 1
        return rate

    def drop(self) -> None:
        """Forget the gradients."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.grad = shard.grad = None

    def state(self, named: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(slot, name, tensor) of those of these parameters that are trained, shaped and sharded like them."""
        trained = {name: parameter for name, parameter in named.items() if parameter in self.tensors}
        return (
            (slot, name, self.tensors[parameter][slot]) for slot in self.slots for name, parameter in trained.items()
        )

    def resume(self, steps: int) -> None:
        """Continue after `steps` steps; the tensors of `state` have been filled."""
        self.steps = steps
        self._count()

    def _count(self) -> None:
        if self.train.optimizer == "adamw":
            for shard in self.shards:
                device = shard.device if shard.device.type == "cuda" else None
                self.inner.state[shard]["step"] = torch.tensor(float(self.steps), device=device)


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Local parts of the gradients, in the order of the parameters."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
