"""The machines of a simulated fleet: which are up, and which the controller has seen go or come. Knows no jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import UserError
from workers.models.spec import Spec


class FleetSpec(Spec):
    """Nodes that are alike, filled into racks in their order."""

    nodes: int = Field(gt=0, le=1_000_000)
    slots: int = Field(gt=0, le=1024, description="of a node")
    rack: int = Field(default=0, ge=0, description="nodes of a rack; 0: every node is its own")
    nvlink: int = Field(default=0, ge=0, description="nodes of an NVLink domain; 0: every node is its own")
    device: Literal["cpu", "gpu"] = "gpu"
    gpu: str = Field(default="H100", description="kind; for the choice of a layout and an estimate of its step")

    def made(self) -> tuple[Node, ...]:
        width = len(str(self.nodes - 1))
        names = [f"n{index:0{width}}" for index in range(self.nodes)]
        kind = self.gpu if self.device == "gpu" else ""
        return tuple(
            Node(
                name,
                name,
                self.slots,
                rack=f"r{index // self.rack}" if self.rack else "",
                device=self.device,
                nvlink=f"d{index // self.nvlink}" if self.nvlink else "",
                accelerator=kind,
            )
            for index, name in enumerate(names)
        )


def parse(value: Any) -> FleetSpec:
    """What a person wrote; UserError names the field."""
    try:
        return FleetSpec.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        known = ", ".join(FleetSpec.model_fields)
        raise UserError(f"fleet: {field}: {first['msg']}", hint=f"fields: {known}", field=field) from None


class Machines:
    """A node that comes back is another node to Ray, and so it gets another id."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.total = sum(node.slots for node in nodes)
        self.alive = self.total  # slots
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self._down: dict[int, int] = {}  # index -> when it went down
        self._missed: set[int] = set()  # down, and the controller knows
        self._times = [0] * len(nodes)

    def index(self, node_id: str) -> int:
        """Of the machine that has or had this id."""
        return self._index[node_id]

    def up(self, index: int) -> bool:
        return index not in self._down

    def is_up(self, node_ids: Iterable[str]) -> bool:
        """Whether all these are up, and have been since they got their ids."""
        return all(self.nodes[index].id == one and self.up(index) for one in node_ids for index in [self._index[one]])

    def lose(self, index: int, at: int) -> None:
        self._down[index] = at
        self.alive -= self.nodes[index].slots

    def restore(self, index: int) -> None:
        del self._down[index]
        self._missed.discard(index)
        node = self.nodes[index]
        self.alive += node.slots
        self._times[index] += 1
        again = dataclasses.replace(node, id=f"{node.name}.{self._times[index]}")
        self.nodes[index] = again
        self._index[again.id] = index

    def notice(self, lost_by: int) -> bool:
        """The controller sees that nodes are gone that were lost by then; whether that is news."""
        new = {index for index, at in self._down.items() if at <= lost_by} - self._missed
        self._missed |= new
        return bool(new)

    def seen(self) -> Fleet:
        """As the controller knows it."""
        return Fleet(tuple(node for index, node in enumerate(self.nodes) if index not in self._missed))
