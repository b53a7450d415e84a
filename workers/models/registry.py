"""Models by name: the built-in decoder, and a class of your own by its import path.

Such a class takes what `Decoder` takes, has `layers` (an nn.ModuleDict by global layer number), `first` and `seams`,
calls its seams where `Decoder` does, and names in `SHARDING` how its parameters are cut; as `workers.models.example`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from workers.models import frozen, lora
from workers.models.decoder import Decoder
from workers.models.sharding import Rules
from workers.models.spec import BUILT_IN, ModelSpec

NEEDED = ("SHARDING", "forward")


class NoModel(ValueError):
    """The import path leads to no model."""


def part(spec: ModelSpec, vocabulary: int, freeze: Sequence[str] = (), **which: Any) -> Decoder:
    """The layers that `which` names, as Decoder takes it, with adapters and with what is not trained marked so."""
    made = of(spec)(spec, vocabulary, **which)
    lora.apply(made, spec.lora)
    frozen.apply(made, freeze)
    return made


def rules(spec: ModelSpec) -> Rules:
    """How the parameters of a model are cut, its adapters too."""
    return lora.rules(of(spec).SHARDING)


def of(spec: ModelSpec) -> type[Decoder]:
    """The class of a model. Raises NoModel."""
    if spec.family == BUILT_IN:
        return Decoder
    path, _, name = spec.family.partition(":")
    try:
        found = getattr(importlib.import_module(path), name)
    except Exception as error:  # whatever the module does when it is imported
        what = f"{type(error).__name__}: {error}"
        raise NoModel(f"model.family {spec.family}: {what}; it has to be importable on every node") from error
    missing = [attribute for attribute in NEEDED if not hasattr(found, attribute)]
    if missing or not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise NoModel(
            f"model.family {spec.family} is no nn.Module with {', '.join(NEEDED)}: see workers.models.registry"
        )
    return found
