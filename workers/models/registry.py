"""Models by name: the built-in decoder, and a class of your own by its import path.

Such a class takes what `Decoder` takes, has `layers` (an nn.ModuleDict by global layer number), `first` and `seams`,
calls its seams where `Decoder` does, and names in `SHARDING` how its parameters are cut; as `workers.models.example`.
"""

from __future__ import annotations

import importlib

from torch import nn

from workers.models.decoder import Decoder
from workers.models.spec import BUILT_IN, ModelSpec

NEEDED = ("SHARDING", "forward")


class NoModel(ValueError):
    """The import path leads to no model."""


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
