"""`python -m tests.chaos.storm --minutes 10 --seed 1`: a job among random faults, compared with the same job in calm.

One fault after the other: it strikes, holds for a while, is undone, and the next comes once every job has completed a
new step. A job that ends in the meantime is checked, and another begins. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.contracts.errors import ClusterError
from service.contracts.job import Phase
from service.contracts.status import JobView
from tests.chaos import faults, invariants, job, net
from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet
from tests.e2e.world import until

STEP_S = 180.0  # from the end of a fault to the next new step
FINISH_S = 300.0
POLL_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Struck:
    """A fault that came: what it hit, and how long after its end every job had a new step."""

    kind: str
    what: str
    at: float
    held_s: float
    back_s: float
    alive: frozenset[int]  # pids on the hosts just before


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    seed: int
    struck: tuple[Struck, ...]
    recoveries: Mapping[str, int]  # warm: every rank was alive before the fault; cold: some process had to start
    sources: Mapping[str, int]  # where attempts after the first continued from
    jobs: int
    broken: tuple[str, ...]  # what does not hold

    @property
    def kinds(self) -> dict[str, int]:
        return dict(collections.Counter(one.kind for one in self.struck))

    def as_json(self) -> str:
        seconds = sorted(one.back_s for one in self.struck)
        return json.dumps({
            "seed": self.seed, "faults": len(self.struck), "kinds": self.kinds, "jobs": self.jobs,
            "recoveries": dict(self.recoveries), "sources": dict(self.sources),
            "back_s_median": round(seconds[len(seconds) // 2], 2) if seconds else None,
            "back_s_max": round(seconds[-1], 2) if seconds else None,
            "load": round(os.getloadavg()[0], 1), "broken": list(self.broken),
        })  # fmt: skip


class Storm:
    """On a fleet that is up and quiet. `say` hears one sentence a fault."""

    def __init__(
        self,
        fleet: Fleet,
        seed: int,
        spec: Mapping[str, Any],
        jobs: int = 1,
        kinds: Collection[str] = tuple(faults.KINDS),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.fleet, self.seed, self.spec, self.kinds, self.say = fleet, seed, dict(spec), tuple(kinds), say
        self.rng = random.Random(seed)
        self.wanted = jobs
        self.running: list[str] = []
        self.ended: list[str] = []
        self.struck: list[Struck] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def calm(self) -> dict[int, float]:
        """The losses of the job where nothing happens."""
        uid = self.fleet.client.submit(self.spec).uid
        view = self._finished(uid)
        assert view.status.attempt == 1, f"the calm run was not calm: {view.status.incidents}"
        return {row.step: row.model_dump()["loss"] for row in self.fleet.client.metrics(uid)}

    def rage(self, minutes: float) -> None:
        """Fault after fault. AssertionError: a job failed, or made no new step after one."""
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            self._refill()
            view = self._view(self.rng.choice(self.running))
            if view is not None and (chosen := self._choose(view)) is not None:
                self._strike(chosen, view)
            time.sleep(POLL_S)

    def settle(self) -> None:
        """Every job comes to its end, and every host has its node."""
        for uid in self.running:
            self._finished(uid)
        self.ended += self.running
        self.running = []
        until(lambda: not self.fleet.tend() and self._whole(), "whole fleet", FINISH_S)

    def report(self, calm: Mapping[int, float]) -> Report:
        broken: list[str] = []
        views = [self.fleet.client.get(uid) for uid in self.ended]
        recoveries: collections.Counter[str] = collections.Counter(warm=0, cold=0)
        sources: collections.Counter[str] = collections.Counter()
        for view in views:
            events = list(self.fleet.client.events(view.uid))
            placed = [event for event in events if event.type == "GangPlaced"]
            broken += [f"{view.uid}: {sentence}" for sentence in invariants.same_run(self.fleet, view, calm)]
            recoveries.update(self._ways(view.uid, [event.at for event in placed]))
            resumed = [event.reason for event in events if event.type == "GangResumed"]
            sources.update("storage" if "manifests/" in one else one.rpartition(" ")[2] for one in resumed[1:])
        broken += invariants.nothing_left(self.fleet, [view.storage for view in views])
        return Report(self.seed, tuple(self.struck), recoveries, sources, len(views), tuple(broken))

    # A fault

    def _choose(self, view: JobView) -> Fault | None:
        """One of the kinds that came least often so far, of those that may come now."""
        for kind in sorted(self.kinds, key=lambda kind: (self.counts[kind], self.rng.random())):
            fault = faults.KINDS[kind]()
            if fault.wants(self.fleet, view):
                return fault
        return None

    def _strike(self, fault: Fault, view: JobView) -> None:
        before = {uid: self._step(uid) for uid in self.running}
        alive = frozenset(pid for host in self.fleet.rack_of for pid in self.fleet.net.pids(host))
        at, holds = time.time(), self.rng.uniform(*fault.holds)
        what = fault.strike(self.fleet, view, self.rng)
        self.counts[fault.name] += 1
        try:
            self._wait(holds)
        finally:
            fault.undo(self.fleet)
        undone = time.time()
        for uid, step in before.items():
            self._stepped(uid, step, undone, f"{fault.name} of {what}")
        back_s = time.time() - undone
        self.struck.append(Struck(fault.name, what, at, holds, back_s, alive))
        self.say(f"{fault.name} of {what}, held {holds:.1f} s: new steps {back_s:.1f} s after")

    def _wait(self, seconds: float) -> None:
        """While the fault lasts."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))

    def _stepped(self, uid: str, beyond: int, since: float, after: str) -> None:
        """A step was completed `since` then that was not completed before; or the job is over."""

        def there() -> bool:
            self.fleet.tend()
            with contextlib.suppress(ClusterError):
                view = self.fleet.client.get(uid)
                assert not view.phase.terminal or view.phase is Phase.SUCCEEDED, f"{after}: {view.reason}"
                return view.phase.terminal or any(row.at > since for row in self.fleet.client.metrics(uid, beyond))
            return False

        try:
            until(there, f"new step of {uid} after {after}", STEP_S)
        except AssertionError as error:
            view = self._view(uid)
            raise AssertionError(f"{error}; {f'{view.phase}: {view.reason}' if view else 'the API is away'}") from None

    # Jobs

    def _refill(self) -> None:
        """As many jobs run as are wanted, and each has taken a step."""
        for uid in list(self.running):
            if (view := self._view(uid)) is not None and view.phase.terminal:
                assert view.phase is Phase.SUCCEEDED, f"{uid}: {view.reason}"
                self.running.remove(uid)
                self.ended.append(uid)
        while len(self.running) < self.wanted:
            uid = self.fleet.client.submit(self.spec).uid
            self.running.append(uid)
            self._stepped(uid, 0, 0.0, "its submission")

    def _finished(self, uid: str) -> JobView:
        def over() -> JobView | None:
            self.fleet.tend()
            view = self._view(uid)
            return view if view is not None and view.phase.terminal else None

        view = until(over, f"end of {uid}", FINISH_S)
        assert view.phase is Phase.SUCCEEDED, f"{uid}: {view.reason}"
        return view

    def _view(self, uid: str) -> JobView | None:
        """None while the API is away."""
        with contextlib.suppress(ClusterError):
            return self.fleet.client.get(uid)
        return None

    def _step(self, uid: str) -> int:
        return until(lambda: self._view(uid), "answer of the API").status.progress.step

    def _whole(self) -> bool:
        with contextlib.suppress(ClusterError):
            return {node.name for node in self.fleet.client.nodes()} == self.fleet.up == self.fleet.rack_of.keys()
        return False

    def _ways(self, uid: str, placed: Sequence[float]) -> Iterator[str]:
        """How each attempt after the first came to its processes."""
        pids: dict[int, set[int]] = collections.defaultdict(set)
        for line in self.fleet.client.logs(uid):
            if found := re.search(r"^rank \d+ of .*, pid (\d+)$", line.text):
                pids[line.attempt].add(int(found[1]))
        for attempt, at in enumerate(placed, 1):
            before = [one for one in self.struck if one.at <= at]
            if attempt > 1 and before and pids[attempt]:
                yield "warm" if pids[attempt] <= before[-1].alive else "cold"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600, help="of each job")
    parser.add_argument("--kinds", nargs="+", choices=sorted(faults.KINDS), default=sorted(faults.KINDS))
    parser.add_argument("--home", type=Path, help="keeps the logs; default a temporary folder that is removed")
    options = parser.parse_args()
    if reason := net.missing():
        sys.stderr.write(f"{reason}\n")
        return 2
    with contextlib.ExitStack() as stack:
        home = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-")))
        fleet = stack.enter_context(Fleet(home, redis=True))
        storm = Storm(fleet, options.seed, job.spec(options.steps), options.jobs, options.kinds, _say)
        calm = storm.calm()
        _say(f"calm: {len(calm)} steps")
        storm.rage(options.minutes)
        storm.settle()
        report = storm.report(calm)
    _say(report.as_json())
    return 1 if report.broken else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
