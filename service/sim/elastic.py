"""Fewer replicas while nodes are missing: a stand-in for what the core is to decide by itself.

The core gives a job the slots that it asks for, and else lets it wait. This policy asks for fewer in the job's name:
the layout of the job with another dp, at the same global batch. `simulate` writes what it chooses into the job's spec
before `decide` looks for slots; once the core plans again by itself, this file goes.

Where the nodes seen have no room for the layout asked for, it takes the fastest that they have room for, and of equally
fast ones the smallest: what that leaves free is spare. It lets a running gang grow where the time gained pays for the
pause within `payback_s`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from pydantic import ValidationError

from service.contracts.cluster import Fleet, Node
from service.contracts.job import JobSpec
from service.sim.pace import Pace
from workers.spec import ParallelLayout, layout_problem

PAYBACK_S = 3600.0


_LEVELS: dict[str, Callable[[Node], str]] = {
    "node": lambda node: node.id,
    "nvlink": lambda node: node.domain_key,
    "any": lambda node: "",
}
"""What a tp group must not leave, within a rack."""


@dataclasses.dataclass
class Elastic:
    spec: JobSpec  # as asked for
    pace: Pace
    min_slots: int
    payback_s: float = PAYBACK_S

    def __post_init__(self) -> None:
        full = self.pace.full
        legal = (self._with(dp) for dp in range(1, full.dp + 1) if dp * full.pp * full.tp >= self.min_slots)
        self._legal = {layout.dp: self.pace.of(layout) for layout in legal if layout is not None}
        self._specs: dict[int, JobSpec] = {}

    @property
    def paces(self) -> list[int]:
        """Microseconds of a step under each layout that it may choose."""
        return list(self._legal.values())

    def fitted(self, fleet: Fleet) -> JobSpec:
        """The job with the best layout that these nodes have room for; as it was asked for where there is none."""
        dp = self._best(fleet)
        return self.spec if dp is None else self._asking(dp)

    def grows(self, now: ParallelLayout, fleet: Fleet, pause_s: float) -> bool:
        """Whether a larger layout would gain more within `payback_s` than the pause takes."""
        dp = self._best(fleet)
        if dp is None or dp <= now.dp:
            return False
        gained = 1 - self._legal[dp] / self.pace.of(now)
        return gained * (self.payback_s - pause_s) > pause_s

    def _best(self, fleet: Fleet) -> int | None:
        most = self._pipelines(fleet)
        if most >= self.pace.full.dp:
            return self.pace.full.dp
        return min((dp for dp in self._legal if dp <= most), key=lambda dp: (self._legal[dp], dp), default=None)

    def _pipelines(self, fleet: Fleet) -> int:
        """How many replicas find room, as placement counts it."""
        full, policy = self.pace.full, self.spec.placement
        domains: Counter[tuple[str, str]] = Counter()
        for node in fleet.nodes:
            if node.device == self.spec.resources.device:
                domains[node.rack_key, _LEVELS[policy.tp](node)] += node.slots
        racks: Counter[str] = Counter()
        for (rack, _), slots in domains.items():
            racks[rack] += slots // full.tp
        if policy.pp == "rack":
            return sum(groups // full.pp for groups in racks.values())
        astray = sum(slots % full.tp for slots in domains.values()) if policy.tp == "any" else 0
        return (racks.total() + astray // full.tp) // full.pp

    def _asking(self, dp: int) -> JobSpec:
        if dp not in self._specs:
            layout = self._with(dp)
            assert layout is not None
            resources = self.spec.resources.model_copy(update={"slots": layout.world})
            self._specs[dp] = self.spec.model_copy(update={"resources": resources, "parallel": layout})
        return self._specs[dp]

    def _with(self, dp: int) -> ParallelLayout | None:
        """The job's layout with another dp, where it can train the job."""
        fields = self.pace.full.model_dump() | {"dp": dp}
        try:
            layout = ParallelLayout.model_validate(fields)
        except ValidationError:
            return None
        return layout if layout_problem(layout, self.spec.model, self.spec.train) is None else None
