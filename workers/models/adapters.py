"""A checkpoint's model as a Hugging Face folder; of an adapted one merged with its base, or PEFT's of its adapters.

The base is read from the folder that the run began with, and one tensor is held at a time. Source:
huggingface.co/docs/peft, "PEFT checkpoint format".
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping

import torch

from workers.checkpoint import manifest
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.storage import Storage
from workers.models import families, huggingface, lora, safetensors
from workers.models.huggingface import Refused, Weight
from workers.models.spec import LoraSpec, ModelSpec

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIRS = {lora.DOWN: "lora_A", lora.UP: "lora_B"}


@dataclasses.dataclass(frozen=True, slots=True)
class Adapters:
    """Of a checkpoint in a job's storage; none of them read yet."""

    document: Manifest
    reading: huggingface.Reading
    tensors: Mapping[str, manifest.Tensor]  # by name of the parameter
    spec: LoraSpec
    dtype: str

    def whole(self, name: str) -> torch.Tensor:
        return self.reading(f"model.{name}", self.tensors[name])

    def delta(self, weight: str) -> torch.Tensor | None:
        """What is added to the weight of this name; None: it has no adapter."""
        pair = [f"{weight.removesuffix('.weight')}.{part}" for part in (lora.DOWN, lora.UP)]
        if pair[0] not in self.tensors:
            return None
        return lora.deltas({name: self.whole(name) for name in pair}, self.spec)[weight]


def export(storage: Storage, document: Manifest, uri: str, *, dtype: str | None = None, adapter: bool = False) -> None:
    """Write the model to an empty folder in `dtype`, by default as stored; `adapter`: what was trained alone.

    Raises Refused, families.Unsupported and BadCheckpoint.
    """
    model = ModelSpec.model_validate(document.model)
    if model.lora is None:
        if adapter:
            raise Refused(document.path, ["its model has no adapters; export it whole"])
        huggingface.export(storage, document, uri, dtype=dtype)
        return
    stored = {name.removeprefix("model."): t for name, t in document.tensors.items() if name.startswith("model.")}
    asked = dtype or next(iter(stored.values())).dtype
    own = Adapters(document, huggingface.reading(storage, document), stored, model.lora, asked)
    (_peft if adapter else _merged)(huggingface.emptied(uri), own, model)


def _merged(folder: Storage, own: Adapters, _: ModelSpec) -> None:
    """As the base has it, one tensor of theirs after the other: an expert at a time."""
    base = own.document.header.get("base")
    if base is None:
        raise Refused(own.document.path, ["its base came from the seed; export the adapter alone"])
    model, weights = huggingface.read(base)
    origins = families.origins(model, {name: weight.shape for name, weight in weights.items()})

    def whole(name: str, weight: Weight, number: int) -> torch.Tensor:
        value = weight.whole() if len(origins[name]) == 1 else weight.rows(number, 1)[0]
        delta = own.delta(name)
        return value if delta is None else value.to(delta.dtype) + delta

    sources = [
        huggingface.written(folder.uri, origin, own.dtype, functools.partial(whole, name, weight, number))
        for name, weight in weights.items()
        for number, origin in enumerate(origins[name])
    ]
    huggingface.write(folder, model, sources)


def _peft(folder: Storage, own: Adapters, model: ModelSpec) -> None:
    sources, modules = [], set()
    for name, tensor in own.tensors.items():
        matrix, _, part = name.rpartition(".")
        (origin,) = families.origins(model, {f"{matrix}.weight": tensor.shape})[f"{matrix}.weight"]
        module = origin.tensor.removesuffix(".weight")
        modules.add(lora.last(module))
        theirs = families.Origin(f"{PREFIX}{module}.{THEIRS[part]}.weight", tensor.shape, tensor.shape)
        sources.append(huggingface.written(folder.uri, theirs, own.dtype, functools.partial(own.whole, name)))
    safetensors.write(folder, FILE, sources)
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none", "fan_in_fan_out": False,
        "base_model_name_or_path": own.document.header.get("base"), "target_modules": sorted(modules),
        "r": own.spec.rank, "lora_alpha": own.spec.scale * own.spec.rank, "lora_dropout": 0.0,
    }  # fmt: skip
    folder.create(CONFIG, json.dumps(told, indent=2).encode() + b"\n")
