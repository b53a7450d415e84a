"""One attempt in virtual time: where it stands, what it has done, when it broke. Decides nothing."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

from service.contracts.cluster import Fleet
from service.contracts.events import Step
from service.core import peers
from service.core.commands import StartGang
from service.core.state import Placement
from service.sim import clock
from service.sim.ledger import Use
from service.sim.stretch import Parts, Stretch
from workers.spec import ParallelLayout

SETTLING = 64
"""The core learns a step's time from the newest steps: so many are told one by one, those before in one lump."""


@dataclasses.dataclass
class Gang:
    order: StartGang
    fleet: Fleet  # as it was seen when the gang was placed
    speed: Fraction  # of its steps over those of the layout that the job wants
    stretch: Stretch | None = None  # once it makes steps
    broken_at: int | None = None
    stopping: bool = False
    counted: Parts = dataclasses.field(default_factory=Parts)  # of the stretch, that the ledger has
    told: int = 0  # last step that the core knows of

    @property
    def layout(self) -> ParallelLayout:
        return self.order.layout

    @property
    def steps(self) -> bool:
        """Whether it makes steps now."""
        return self.stretch is not None and not self.stopping and self.broken_at is None

    @property
    def use(self) -> Use:
        if self.broken_at is not None and not self.stopping:
            return Use.DETECTION
        return Use.USEFUL if self.steps else Use.RESTART

    @functools.cached_property
    def ranks(self) -> dict[str, int]:
        """First rank on each node, by the node's id."""
        slots = self.order.placement.slots
        return {slot.node: rank for rank, slot in reversed(list(enumerate(slots)))}

    def completed(self, now: int) -> int:
        """The last step that it completed by now; 0 where it makes none."""
        if self.stretch is None:
            return 0
        return self.stretch.completed(now if self.broken_at is None else min(now, self.broken_at))

    def reported(self, step: int, batch: int, seq_len: int) -> tuple[Step, ...]:
        """The steps up to `step` that the core does not know of: repeated ones, the first new one, then the others.

        A step whose number jumps stands for those that it leaves out, and has their seconds and tokens.
        """
        assert self.stretch is not None
        cuts = {step, min(step, self.stretch.high), min(step, self.stretch.high + 1)}
        cuts |= set(range(max(self.told + 1, step - SETTLING), step))
        steps, last = [], self.told
        for cut in sorted(one for one in cuts if one > self.told):
            many, own_s = cut - last, clock.seconds(self.stretch.step_us)
            at = clock.seconds(self.stretch.completes(cut))
            steps.append(Step(cut, at, 1.0, 1.0, 0.0, many * batch * seq_len, cut * batch, many * own_s))
            last = cut
        self.told = step
        return tuple(steps)


@dataclasses.dataclass
class Kept:
    """What is kept of the job's state, and which nodes were lost since the newest snapshot was taken."""

    checkpoint: int = 0  # step; 0: none
    snapshot: int = 0
    layout: ParallelLayout | None = None
    placement: Placement | None = None
    fleet: Fleet | None = None
    lost: set[str] = dataclasses.field(default_factory=set)  # node ids
    holders: dict[str, str] | None = None  # node -> its peer, of `placement`; None: not looked up yet

    def save(self, gang: Gang, now: int, snapshot_every: int, checkpoint_every: int) -> None:
        """What the gang has saved by now."""
        if not gang.steps:
            return
        assert gang.stretch is not None
        self.checkpoint = gang.stretch.held(now, checkpoint_every) or self.checkpoint
        snapshot = gang.stretch.held(now, snapshot_every)
        if snapshot is not None:
            if snapshot != self.snapshot or gang.order.placement is not self.placement:
                self.lost = set()
            if gang.order.placement is not self.placement:
                self.holders = None
            self.snapshot, self.layout = snapshot, gang.layout
            self.placement, self.fleet = gang.order.placement, gang.fleet

    def hold(self, gang: Gang, step: int) -> None:
        """The gang paused after a step, and its nodes keep its state."""
        if step > self.snapshot or gang.order.placement is not self.placement:
            self.lost, self.holders = set(), None
            self.snapshot, self.layout = step, gang.layout
            self.placement, self.fleet = gang.order.placement, gang.fleet

    def pass_over(self, step: int, checkpoint_every: int) -> None:
        """Nothing after `step` is continued with."""
        if self.snapshot > step:
            self.snapshot = 0
        if self.checkpoint > step:
            self.checkpoint = step // checkpoint_every * checkpoint_every

    def newest(self) -> tuple[int, bool]:
        """The step to continue after, and whether its state is in memory."""
        if self.snapshot and self.snapshot >= self.checkpoint and self._whole():
            return self.snapshot, True
        return self.checkpoint, False

    def _whole(self) -> bool:
        """Whether of each node's part one copy is left: its own or its peer's."""
        if not self.lost:
            return True
        assert self.layout is not None
        assert self.placement is not None
        assert self.fleet is not None
        if len(self.lost) == 1 and len(self.fleet.nodes) > 1:
            return True
        if self.holders is None:
            self.holders = peers.choose(self.layout, self.placement, self.fleet)
        stood = set(self.placement.nodes) & self.lost
        return not any(self.holders.get(node, node) in self.lost for node in stood)
