"""The learning rate by step, as a table; and that state, put back, continues as if nothing had happened."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workers.optimizer import Optimizer, gradients, learning_rate
from workers.spec import TrainSpec

pytestmark = pytest.mark.torch


def train(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate({"steps": 10, "learning_rate": 1.0} | fields)


LONG = {"warmup_steps": 2}
FLOOR = {"warmup_steps": 2, "min_learning_rate": 0.2}
AT_5, AT_8 = ((1 + math.cos(math.pi * part)) / 2 for part in (3 / 8, 6 / 8))  # of a cosine over steps 2 to 10
TABLE = {
    # decay and its fields; rates of steps 1, 2, 5, 6, 8, 10, 11, 50
    "cosine": (LONG, [0.5, 1, AT_5, 0.5, AT_8, 0, 0, 0]),
    "cosine to a minimum": (FLOOR, [0.5, 1, 0.2 + 0.8 * AT_5, 0.6, 0.2 + 0.8 * AT_8, 0.2, 0.2, 0.2]),
    "linear": (LONG | {"decay": "linear"}, [0.5, 1, 5 / 8, 4 / 8, 2 / 8, 0, 0, 0]),
    "linear to a minimum": (FLOOR | {"decay": "linear"}, [0.5, 1, 0.7, 0.6, 0.4, 0.2, 0.2, 0.2]),
    "linear without a warm-up": ({"decay": "linear"}, [0.9, 0.8, 0.5, 0.4, 0.2, 0, 0, 0]),
    "linear, horizon 6": ({"decay": "linear", "horizon": 6, "warmup_steps": 1}, [1, 0.8, 0.2, 0, 0, 0, 0, 0]),
    "wsd, the last tenth": (LONG | {"decay": "wsd"}, [0.5, 1, 1, 1, 1, 0, 0, 0]),
    "wsd, the last four": (LONG | {"decay": "wsd", "decay_steps": 4}, [0.5, 1, 1, 1, 0.5, 0, 0, 0]),
    "wsd, longer than the run": (LONG | {"decay": "wsd", "decay_steps": 99}, [0.5, 1, 5 / 8, 4 / 8, 2 / 8, 0, 0, 0]),
    "constant": (FLOOR | {"decay": "constant"}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
    "constant without a warm-up": ({"decay": "constant"}, [1, 1, 1, 1, 1, 1, 1, 1]),
    "warm-up to the horizon": ({"warmup_steps": 10}, [0.1, 0.2, 0.5, 0.6, 0.8, 1, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "rates"), TABLE.values(), ids=TABLE)
def test_learning_rates(fields: dict[str, Any], rates: list[float]) -> None:
    spec = train(**fields)
    assert [learning_rate(spec, step) for step in (1, 2, 5, 6, 8, 10, 11, 50)] == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "constant"])
def test_more_steps_under_a_fixed_horizon_change_no_rate(decay: str) -> None:
    short, long = (train(steps=steps, horizon=12, decay=decay, warmup_steps=3) for steps in (10, 20))
    assert [learning_rate(short, n) for n in range(1, 11)] == [learning_rate(long, n) for n in range(1, 11)]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_rates_never_rise_after_the_warm_up(decay: str) -> None:
    spec = train(steps=40, decay=decay, warmup_steps=5, min_learning_rate=0.1)
    rates = [learning_rate(spec, step) for step in range(5, 60)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.1)


Named = dict[str, torch.nn.Parameter]


def parameters() -> Named:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "vector": (4,)}
    return {name: torch.nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def made(spec: TrainSpec) -> tuple[Optimizer, Named]:
    named = parameters()
    return Optimizer(spec, list(named.values())), named


def stepped(optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        for parameter in optimizer.parameters:
            parameter.grad = parameter.detach().sin() + optimizer.steps
        optimizer.step()


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, ["exp_avg", "exp_avg_sq"]),
        ({"optimizer": "sgd", "momentum": 0.9}, ["momentum_buffer"]),
        ({"optimizer": "sgd"}, []),
    ],
    ids=["adamw", "sgd with momentum", "sgd"],
)
def test_state_put_back_continues(fields: dict[str, Any], slots: list[str]) -> None:
    spec = train(**fields, learning_rate=0.1)
    whole, named = made(spec)
    stepped(whole, 3)
    assert [(slot, name) for slot, name, _ in whole.state(named)] == [(slot, name) for slot in slots for name in named]
    again, others = made(spec)
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(named[name])
        for (_, _, tensor), (_, _, old) in zip(again.state(others), whole.state(named), strict=True):
            tensor.copy_(old)
    again.resume(3)
    stepped(whole, 4)
    stepped(again, 4)
    for name, parameter in named.items():
        assert torch.equal(parameter, others[name])


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer, named = made(train(decay="constant", weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(named["matrix"], before["matrix"] * 0.5)
    assert torch.equal(named["vector"], before["vector"])


def test_a_step_leaves_no_gradients() -> None:
    optimizer, named = made(train())
    stepped(optimizer, 1)
    assert gradients(named.values()) == []
