"""Low-rank adapters beside matrices that stay as they are (LoRA, arXiv 2106.09685). Knows no meshes.

A matrix W [out, in] becomes W + alpha/rank B A with A [rank, in] and B [out, rank]. B begins at zero, so that the
adapted model begins as the model. Of a matrix that is split by rows B is, of one that is split by columns A; the other
one is whole on every rank, which sees a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from workers.models.parts import Matrix
from workers.models.sharding import Rules
from workers.models.spec import LoraSpec

DOWN, UP = "lora_a", "lora_b"


def apply(model: nn.Module, spec: LoraSpec | None) -> None:
    """Give the matrices that `spec` names their adapters; nothing else of the model is trained."""
    if spec is None:
        return
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = [one for name, one in model.named_modules() if isinstance(one, Matrix) and last(name) in spec.targets]
    if not found:
        raise ValueError(f"model.lora: the model has none of {', '.join(spec.targets)}")
    for matrix in found:
        matrix.adapt(spec.rank, spec.scale)


def rules(known: Rules) -> Rules:
    """How adapters are cut, of matrices that are cut as known."""
    made = {}
    for name, (axis, dim) in known.items():
        matrix, _, kind = name.rpartition(".")
        if kind == "weight" and axis == "tp":
            made[f"{matrix}.{DOWN}"] = (axis, 1 if dim == 1 else None)
            made[f"{matrix}.{UP}"] = (axis, 0 if dim == 0 else None)
    return {**known, **made}


def adapted(name: str) -> bool:
    """Whether a parameter's or a logical tensor's name is an adapter's."""
    return last(name) in (DOWN, UP)


def last(name: str) -> str:
    return name.rpartition(".")[2]


def deltas(tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> dict[str, torch.Tensor]:
    """What adapters add to the weights of these names, from all their A and B by name of the parameter."""
    pairs = {name.removesuffix(f".{DOWN}"): down for name, down in tensors.items() if last(name) == DOWN}
    return {f"{name}.weight": spec.scale * (tensors[f"{name}.{UP}"] @ down) for name, down in pairs.items()}
