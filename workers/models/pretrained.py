"""Begins with the weights of a Hugging Face folder: each rank reads the rows that it holds, none of the others.

Nothing is left out in silence: names, shapes and dtypes fit one by one, or all that doesn't is listed. Of a vocabulary
that has grown, the rows that are not there keep what the seed gave them, and are named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from workers.checkpoint import logical
from workers.models import families, huggingface
from workers.models.huggingface import Refused, Weight
from workers.models.spec import ModelSpec

GROWS = ("embedding.weight", "head.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What of the whole model came from the folder."""

    uri: str
    tensors: int
    parameters: int
    new: tuple[str, ...]  # rows that were not there

    def __str__(self) -> str:
        new = f"; from the seed: {', '.join(self.new)}" if self.new else ""
        return f"{self.uri}: {self.tensors} tensors, {self.parameters:,} parameters{new}"


class Pretrained:
    """A folder whose model is the one of a run. Raises Refused, families.Unsupported and safetensors.BadFile."""

    def __init__(self, uri: str, model: ModelSpec, vocabulary: int) -> None:
        self.uri = uri
        spec, self.weights = huggingface.read(uri, model.seq_len)
        problems = families.differences(model, spec, vocabulary)
        if model.lora and vocabulary > (spec.vocab_size or 0):
            problems.append(f"the vocabulary has {spec.vocab_size} rows there: beside adapters nothing new is trained")
        if problems:
            raise Refused(uri, problems)
        self.vocabulary, self.theirs = vocabulary, spec.vocab_size or 0

    @torch.no_grad()
    def fill(self, state: Mapping[str, torch.Tensor]) -> None:
        """The model's tensors in place; the optimizer's stay as they are."""
        for name, tensor in state.items():
            if (weight := self.weights.get(name.removeprefix("model."))) is not None and name.startswith("model."):
                self._fill(name, tensor, weight)

    def loaded(self) -> Loaded:
        new = f"rows {self.theirs} to {self.vocabulary - 1} of "
        grown = tuple(new + name for name in GROWS if name in self.weights and self.vocabulary > self.theirs)
        numbers = [weight.shape for weight in self.weights.values()]
        return Loaded(self.uri, len(numbers), sum(torch.Size(shape).numel() for shape in numbers), grown)

    def _fill(self, name: str, tensor: torch.Tensor, weight: Weight) -> None:
        if not huggingface.holds(str(tensor.dtype).removeprefix("torch."), weight.dtype):
            raise Refused(self.uri, [f"{name} is {weight.dtype}, which {tensor.dtype} would round"])
        offset, extent, into = logical.held(name, tensor)
        first, end = offset[0], min(offset[0] + extent[0], weight.shape[0])
        for begin, count in huggingface.row_ranges((max(0, end - first), *weight.shape[1:]), weight.dtype):
            part = weight.rows(first + begin, count)
            for dim in range(1, part.ndim):
                part = part.narrow(dim, offset[dim], extent[dim])
            into.narrow(0, begin, count).copy_(part)
