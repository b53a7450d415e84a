"""A checkpoint's model as a Hugging Face folder; of an adapted one merged with its base, or PEFT's of its adapters.

The base is read from the folder that the run began with, and one tensor is held at a time. Source:
huggingface.co/docs/peft, "PEFT checkpoint format".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import torch

from workers.checkpoint import manifest
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.storage import Storage
from workers.models import families, huggingface, lora, safetensors
from workers.models.huggingface import Refused, Weight
from workers.models.spec import LoraSpec, ModelSpec

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Taken = Callable[[str, manifest.Tensor], torch.Tensor]


def export(storage: Storage, document: Manifest, uri: str, *, dtype: str | None = None, adapter: bool = False) -> None:
    """Write the model to an empty folder in `dtype`, by default as stored; `adapter`: what was trained alone.

    Raises Refused, families.Unsupported and BadCheckpoint.
    """
    spec = ModelSpec.model_validate(document.model)
    if spec.lora is None:
        if adapter:
            raise Refused(document.path, ["its model has no adapters; export it whole"])
        huggingface.export(storage, document, uri, dtype=dtype)
        return
    stored = {name.removeprefix("model."): t for name, t in document.tensors.items() if name.startswith("model.")}
    reading = huggingface.reading(storage, document)
    folder, base = huggingface.emptied(uri), document.header.get("base")
    own = {name: functools.partial(reading, f"model.{name}", tensor) for name, tensor in stored.items()}
    if adapter:
        _peft(folder, spec, spec.lora, base, own, {n: t.shape for n, t in stored.items()}, dtype or _dtype(stored))
        return
    if base is None:
        raise Refused(document.path, ["its base came from the seed and no folder has it; export the adapter alone"])
    _merged(folder, spec.lora, base, own, dtype or _dtype(stored))


def _merged(folder: Storage, spec: LoraSpec, base: str, own: dict[str, Callable[[], torch.Tensor]], dtype: str) -> None:
    model, weights = huggingface.read(base)
    origins = families.origins(model, {name: weight.shape for name, weight in weights.items()})

    def whole(name: str, weight: Weight, number: int | None) -> torch.Tensor:
        value = weight.whole() if number is None else weight.rows(number, 1)[0]
        matrix = name.removesuffix(".weight")
        pair = [f"{matrix}.{part}" for part in (lora.DOWN, lora.UP)]
        if pair[0] not in own:
            return value
        delta = lora.deltas({part: own[part]() for part in pair}, spec)[name]
        return value.to(delta.dtype) + delta

    sources = [
        huggingface.written(
            folder.uri, origin, dtype, functools.partial(whole, name, weight, None if len(many) == 1 else number)
        )
        for name, weight in weights.items()
        for many in [origins[name]]
        for number, origin in enumerate(many)
    ]
    huggingface.write(folder, model, sources)


def _peft(
    folder: Storage,
    model: ModelSpec,
    spec: LoraSpec,
    base: str | None,
    own: dict[str, Callable[[], torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
) -> None:
    sources, modules = [], set()
    for name, read in own.items():
        matrix, _, part = name.rpartition(".")
        (origin,) = families.origins(model, {f"{matrix}.weight": shapes[name]})[f"{matrix}.weight"]
        module = origin.tensor.removesuffix(".weight")
        modules.add(lora.last(module))
        theirs = f"{PREFIX}{module}.{'lora_A' if part == lora.DOWN else 'lora_B'}.weight"
        sources.append(
            huggingface.written(folder.uri, families.Origin(theirs, shapes[name], shapes[name]), dtype, read)
        )
    safetensors.write(folder, FILE, sources)
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": spec.rank, "lora_alpha": spec.scale * spec.rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(modules), "fan_in_fan_out": False,
    }  # fmt: skip
    folder.create(CONFIG, json.dumps(told, indent=2).encode() + b"\n")


def _dtype(stored: dict[str, manifest.Tensor]) -> str:
    return next(iter(stored.values())).dtype
