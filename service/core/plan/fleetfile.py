"""A fleet that somebody describes, instead of one that is seen: racks of nodes with GPUs of one kind, or nodes one by
one. What `phalanx simulate` reads as a fleet is read here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, ValidationError, model_validator

from service.contracts.cluster import Fleet, Node
from service.contracts.errors import UserError
from workers.models.spec import Spec

MOST_SLOTS = 131_072


class Rack(Spec):
    """Nodes that are alike."""

    nodes: int = Field(gt=0, le=MOST_SLOTS)
    slots: int = Field(default=8, gt=0, le=1024, description="of a node")
    name: str = Field(default="", max_length=80, description="default r0, r1, ...")
    accelerator: str = Field(default="", max_length=80, description="default the fleet's")
    count: int = Field(default=1, gt=0, le=MOST_SLOTS, description="racks like this one")


class NodeSpec(Spec):
    name: str = Field(default="", max_length=80, description="default n0, n1, ...")
    slots: int = Field(default=8, gt=0, le=1024)
    rack: str = Field(default="", max_length=80)
    zone: str = Field(default="", max_length=80)
    nvlink: str = Field(default="", max_length=80, description="name of its NVLink domain, which may span nodes")
    accelerator: str = Field(default="", max_length=80, description="default the fleet's")


def _branch(value: Any) -> str:
    return "listed" if isinstance(value, list | tuple) else "counted"


Nodes = Annotated[
    Annotated[Annotated[int, Field(gt=0, le=MOST_SLOTS)], Tag("counted")]
    | Annotated[tuple[NodeSpec, ...], Tag("listed")],
    Discriminator(_branch),
]


class FleetFile(Spec):
    """Either `racks`; or `nodes`, a list of them, or a number with `slots` and `rack`."""

    accelerator: str = Field(
        default="",
        max_length=80,
        validation_alias=AliasChoices("accelerator", "gpu"),
        description="kind of GPU: H100, A100-40GB, ...",
    )
    device: Literal["cpu", "gpu"] = "gpu"
    racks: tuple[Rack, ...] = ()
    nodes: Nodes | None = None
    slots: int = Field(default=8, gt=0, le=1024, description="of a node, where nodes is a number")
    rack: int = Field(default=0, ge=0, description="nodes of a rack, where nodes is a number; 0: each is its own")
    nvlink: int = Field(default=0, ge=0, description="nodes of an NVLink domain, where nodes are alike; 0: one")

    @model_validator(mode="after")
    def _one_of(self) -> FleetFile:
        if bool(self.racks) == (self.nodes is not None):
            raise ValueError("a fleet has either racks or nodes")
        if isinstance(self.nodes, tuple):
            named = Counter(node.name or f"n{number}" for number, node in enumerate(self.nodes))
            if twice := [name for name, times in named.items() if times > 1]:
                raise ValueError(f"two nodes are called {twice[0]}")
        if not 0 < self._total() <= MOST_SLOTS:
            raise ValueError(f"a fleet has 1 to {MOST_SLOTS:,} slots, not {self._total():,}")
        return self

    def _total(self) -> int:
        if isinstance(self.nodes, tuple):
            return sum(node.slots for node in self.nodes)
        if isinstance(self.nodes, int):
            return self.nodes * self.slots
        return sum(rack.nodes * rack.count * rack.slots for rack in self.racks)

    def fleet(self) -> Fleet:
        if isinstance(self.nodes, tuple):
            return Fleet(tuple(self._node(number, node) for number, node in enumerate(self.nodes)))
        return Fleet(tuple(self._alike()))

    def _node(self, number: int, node: NodeSpec) -> Node:
        name = node.name or f"n{number}"
        return Node(
            name,
            name,
            node.slots,
            rack=node.rack,
            zone=node.zone,
            device=self.device,
            nvlink=node.nvlink,
            accelerator=node.accelerator or self.accelerator,
        )

    def _alike(self) -> Iterator[Node]:
        number = 0
        for name, rack in self._racks():
            for _ in range(rack.nodes):
                domain = f"d{number // self.nvlink}" if self.nvlink else ""
                yield Node(
                    f"n{number}",
                    f"n{number}",
                    rack.slots,
                    rack=name,
                    device=self.device,
                    nvlink=domain,
                    accelerator=rack.accelerator or self.accelerator,
                )
                number += 1

    def _racks(self) -> Iterator[tuple[str, Rack]]:
        """Each with its name; empty: its node is its own rack."""
        if isinstance(self.nodes, int):
            size = self.rack or 1
            for number in range(-(-self.nodes // size)):
                nodes = min(size, self.nodes - number * size)
                yield f"r{number}" if self.rack else "", Rack(nodes=nodes, slots=self.slots)
            return
        number = 0
        for rack in self.racks:
            for _ in range(rack.count):
                yield rack.name if rack.name and rack.count == 1 else f"{rack.name or 'r'}{number}", rack
                number += 1


def parse(value: Any) -> FleetFile:
    """What a person wrote; UserError names the field."""
    if not isinstance(value, dict):
        raise UserError("fleet: a fleet is a mapping of fields", hint=_known(FleetFile), field="fleet")
    try:
        return FleetFile.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"] if part not in ("counted", "listed")]
        inner = Rack if path[:1] == ["racks"] else NodeSpec if path[:1] == ["nodes"] and len(path) > 1 else FleetFile
        field = ".".join(["fleet", *path])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{field}: {message}", hint=_known(inner), field=field) from None


def _known(spec: type[Spec]) -> str:
    return f"fields: {', '.join(spec.model_fields)}"
