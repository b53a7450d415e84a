"""Collectives and bytes of a step by mesh axis, as this rank takes part in them: counted where torch hands them out.

A dispatch mode sees each operator of the threads it is active in, autograd's too, so a counted step takes longer; when
none is active nothing is paid. Blocks that torch.compile has compiled run uncompiled in a counted step. A group is
known by the description its mesh gave it: nothing is known of layouts. What torch runs in the default group is the
world's, also that of an axis so long that its mesh took the default group for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

AXES = {
    "mesh_pp": "pp",
    "mesh_replicate": "dp",
    "mesh_shard": "dp",
    "mesh_edp": "dp",
    "mesh_tp": "tp",
    "mesh_ep": "ep",
    "default_pg": "world",
    "mesh_default": "world",
}
"""By a group's description. What has no entry is `other`: a group that crosses axes."""

NAMESPACES = ("c10d", "_c10d_functional")
RECEIVES = {"recv_", "recv_any_source_", "irecv"}
"""A message is counted where it is sent."""

HANDED_IN = {"alltoall_": "input_tensors", "alltoall_base_": "input", "all_to_all_single": "input"}
"""Where the bytes are those of one argument: an all-to-all may get more than it gives."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """Of some collectives of one rank. Bytes are of the tensors, not of the wire: the larger of what the rank hands in
    and what it gets, so that a reduction, a gather and a scatter of the same tensor have the same."""

    collectives: int = 0
    nbytes: int = 0

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.collectives + other.collectives, self.nbytes + other.nbytes)


class Traffic(TorchDispatchMode):
    """`with Traffic() as traffic:` around a step. Counts this rank alone; calls nothing collective itself."""

    supports_higher_order_operators = True  # compiled or recomputed blocks may use them

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], Figure] = {}  # (axis, operator) -> figure

    def axes(self) -> dict[str, dict[str, int]]:
        """{axis: {collectives, bytes}} of this rank; an axis without any is left out."""
        totals: dict[str, Figure] = {}
        for (axis, _), figure in self.counts.items():
            totals[axis] = totals.get(axis, Figure()) + figure
        return {axis: {"collectives": one.collectives, "bytes": one.nbytes} for axis, one in totals.items()}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = operator(*args, **(kwargs or {}))
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace in NAMESPACES:
            self._count(operator, dict(zip(_names(operator), args, strict=False)) | (kwargs or {}), result)
        return result

    def _count(self, operator: torch._ops.OpOverload, given: dict[str, Any], result: Any) -> None:
        name, group = operator._opname, _group(given)
        if group is None or name in RECEIVES:
            return
        sides = [given[HANDED_IN[name]]] if name in HANDED_IN else [*given.values(), result]
        nbytes = 0 if "barrier" in name else max(sum(one.nbytes for one in _tensors(side)) for side in sides)
        key = AXES.get(group.group_desc, "other"), name.strip("_")
        self.counts[key] = self.counts.get(key, Figure()) + Figure(1, nbytes)


@cache
def _names(operator: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _group(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """Whose collective it is; None where it is none, as waiting for one."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given.get("group_name")
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
