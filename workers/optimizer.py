"""The optimizer: AdamW or SGD over sharded parameters, its learning rate by step, its state as plain named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

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
    """Steps over parameters. Matrices decay, vectors don't."""

    def __init__(self, train: TrainSpec, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.train, self.parameters, self.steps = train, parameters, 0
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.inner: torch.optim.Optimizer
        if train.optimizer == "adamw":
            self.inner = torch.optim.AdamW(
                groups, lr=train.learning_rate, betas=train.betas, eps=train.eps, foreach=True
            )
            self.slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            self.inner = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, foreach=True)
            self.slots = ("momentum_buffer",) if train.momentum else ()
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """State as before the first step."""
        self.steps = 0
        for parameter in self.parameters:
            self.inner.state[parameter] = {slot: torch.zeros_like(parameter) for slot in self.slots}
        self._count()

    def step(self) -> float:
        """Apply the gradients; the learning rate used."""
        rate = learning_rate(self.train, self.steps + 1)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1
        return rate

    def state(self, named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Tensors of these parameters by logical name, shaped and sharded like them."""
        return {
            f"optimizer.{slot}.{name}": self.inner.state[parameter][slot]
            for slot in self.slots
            for name, parameter in named.items()
        }

    def resume(self, steps: int) -> None:
        """Continue after `steps` steps; the tensors of `state` have been filled."""
        self.steps = steps
        self._count()

    def _count(self) -> None:
        if self.train.optimizer == "adamw":
            for parameter in self.parameters:
                self.inner.state[parameter]["step"] = torch.tensor(float(self.steps))


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Local parts of the gradients, in the order of the parameters."""
    return [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters if p.grad is not None]
