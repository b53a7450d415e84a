"""Any order of events, by a runtime that answers late, in any order, or never; then one that answers all."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from service.contracts import events
from service.contracts.cluster import Fleet
from service.contracts.job import Phase
from service.core import accounts, health, liveness
from service.core.commands import Decision, PauseGang, RaiseStandbys, ReleaseGang, SaveGang, StartGang
from tests.service.core import world
from tests.service.core.world import World

NODES = world.fleet(2, 2, 1)
STEPS = 6
ANSWERS = ["start", "resume", "step", "step", "finish", "pause", "stop", "save", "evaluate", "skip", "rollback"]
WISHES = {
    "suspend": events.SuspendRequested,
    "resume": events.ResumeRequested,
    "restart": events.RestartRequested,
    "save": events.SaveRequested,
}
LIMITS = liveness.Limits(settle_s=1.0, cooldown_s=1.0, pausing_s=5.0)
FAULTS = st.lists(
    st.builds(
        events.Fault,
        st.sampled_from(
            [
                "process_died",
                "out_of_memory",
                "device",
                "node_lost",
                "gang_lost",
                "peer",
                "user",
                "numeric",
                "drift",
                "corruption",
                "hang",
                "start_failed",
            ]
        ),
        st.sampled_from(["one", "two", "three"]),
        rank=st.integers(0, 3),
    ),
    min_size=1,
    max_size=3,
)


@dataclasses.dataclass
class Gang:
    """What the runtime knows of one attempt."""

    uid: str
    attempt: int
    started: bool = False
    step: int | None = None
    stop: bool = False
    pause: bool = False


class Runtime(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(limits=LIMITS)
        self.gangs: dict[str, Gang] = {}
        self.times = 0  # that nodes came back
        self.over = Counter[str]()  # slots that each project held before

    @initialize()
    def cluster(self) -> None:
        self.act(self.world.observe(NODES))

    @precondition(lambda self: len(self.world.state.jobs) < 5)
    @rule(
        slots=st.sampled_from([1, 2, 4, 8]),
        budget=st.sampled_from([1, 100]),
        elastic=st.booleans(),
        spares=st.sampled_from([0, 0, 1]),
        priority=st.sampled_from([0, 0, 1, 2]),
        project=st.sampled_from(["default", "vision"]),
    )
    def submit(self, slots: int, budget: int, elastic: bool, spares: int, priority: int, project: str) -> None:
        uid = f"j{len(self.world.state.jobs)}"
        budgets = (("infrastructure", budget), ("user_error", budget), ("preemption", budget))
        job = world.spec(slots, STEPS, uid, budgets, elastic, spares, priority)
        self.act(self.world.submit(uid, job, project=project))

    @rule(priority=st.sampled_from([0, 1]), quota=st.sampled_from([2, 4, None]))
    def share(self, priority: int, quota: int | None) -> None:
        self.act(self.world.share({"default": priority}, {} if quota is None else {"vision": quota}))

    @precondition(lambda self: self.world.state.jobs)
    @rule(data=st.data(), wish=st.sampled_from(["suspend", "suspend", "resume", "resume", "restart", "save"]))
    def wish(self, data: st.DataObject, wish: str) -> None:
        uid = data.draw(st.sampled_from(sorted(self.world.state.jobs)))
        self.act(self.world.tell(WISHES[wish](uid, self.world.now)))

    @precondition(lambda self: self.world.state.jobs)
    @rule(data=st.data(), slots=st.sampled_from([1, 2, 3, 4]))
    def rescale(self, data: st.DataObject, slots: int) -> None:
        self.act(self.world.rescale(slots, data.draw(st.sampled_from(sorted(self.world.state.jobs)))))

    @rule(
        name=st.sampled_from([node.name for node in NODES.nodes]),
        action=st.sampled_from(["log", "restart", "restart", "reset", "drain", "reboot"]),
    )
    def health(self, name: str, action: str) -> None:
        self.act(self.world.tell(events.HealthFound(name, action, "Xid", self.world.now, (0,) * (action == "reset"))))

    @rule(name=st.sampled_from([node.name for node in NODES.nodes]))
    def forgive(self, name: str) -> None:
        self.act(self.world.tell(events.NodeForgiven(name, self.world.now)))

    @rule(name=st.sampled_from([node.name for node in NODES.nodes]), seconds=st.sampled_from([5.0, 60.0]))
    def notice(self, name: str, seconds: float) -> None:
        nodes = self.world.state.fleet.nodes
        going = self.world.now + seconds
        told = [dataclasses.replace(node, draining=going) if node.name == name else node for node in nodes]
        self.act(self.world.observe(Fleet(tuple(told))))

    @rule(gone=st.sets(st.sampled_from([node.name for node in NODES.nodes]), max_size=3))
    def fleet_changes(self, gone: set[str]) -> None:
        """Nodes that come back are other nodes to Ray."""
        now = {node.name: node for node in self.world.state.fleet.nodes}
        for name in {node.name for node in NODES.nodes} - set(now) - gone:
            self.times += 1
            now[name] = dataclasses.replace(next(n for n in NODES.nodes if n.name == name), id=f"{name}.{self.times}")
        self.act(self.world.observe(Fleet(tuple(now[name] for name in sorted(now) if name not in gone))))

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 61.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.act(self.world.tick(seconds))

    @precondition(lambda self: self.world.state.jobs)
    @rule(data=st.data(), graceful=st.booleans())
    def cancel(self, data: st.DataObject, graceful: bool) -> None:
        self.act(self.world.cancel(data.draw(st.sampled_from(sorted(self.world.state.jobs))), graceful))

    @precondition(lambda self: any(job.checkpoint for job in self.world.state.jobs.values()))
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        jobs = {uid: job for uid, job in self.world.state.jobs.items() if job.checkpoint}
        uid = data.draw(st.sampled_from(sorted(jobs)))
        step = data.draw(st.integers(1, jobs[uid].checkpoint_step))
        self.act(self.world.restore(step, uid))

    @precondition(lambda self: self.gangs)
    @rule(data=st.data(), answer=st.sampled_from(ANSWERS))
    def answers(self, data: st.DataObject, answer: str) -> None:
        self.answer(self.gangs[data.draw(st.sampled_from(sorted(self.gangs)))], answer)

    @precondition(lambda self: self.gangs)
    @rule(data=st.data())
    def refuses(self, data: st.DataObject) -> None:
        gang = self.gangs[data.draw(st.sampled_from(sorted(self.gangs)))]
        if not gang.started and gang.step is None:
            del self.gangs[gang.uid]
            self.tell(events.GangRefused, gang, reason="no room")

    @precondition(lambda self: self.gangs)
    @rule(data=st.data(), faults=FAULTS)
    def breaks(self, data: st.DataObject, faults: list[events.Fault]) -> None:
        gang = self.gangs[data.draw(st.sampled_from(sorted(self.gangs)))]
        self.tell(events.GangFaulted, gang, faults=tuple(faults))

    @precondition(lambda self: any(job.attempt for job in self.world.state.jobs.values()))
    @rule(data=st.data(), kind=st.sampled_from([events.GangStarted, events.GangFinished, events.GangStopped]))
    def an_old_attempt_speaks(self, data: st.DataObject, kind: type) -> None:
        jobs = self.world.state.jobs
        uid = data.draw(st.sampled_from(sorted(uid for uid, job in jobs.items() if job.attempt)))
        before = jobs[uid]
        stale = data.draw(st.integers(0, before.attempt - 1))
        decision = self.world.gang(kind, uid, attempt=stale)
        assert self.world.job(uid) == before or before.phase in (Phase.QUEUED, Phase.RECOVERING)
        self.act(decision)

    def answer(self, gang: Gang, answer: str) -> None:
        if answer == "start":
            gang.started = True
            self.tell(events.GangStarted, gang)
        elif answer == "resume" and gang.step is None:
            gang.step = self.world.job(gang.uid).checkpoint_step or 0
            self.tell(events.GangResumed, gang, step=gang.step, manifest=None)
        elif answer == "step" and gang.step is not None and gang.step < STEPS:
            gang.step += 1
            self.world.now += world.STEP_S
            self.tell(events.StepsCompleted, gang, steps=(world.step(gang.step, self.world.now),))
        elif answer == "save" and gang.step:
            self.tell(events.CheckpointPublished, gang, step=gang.step, manifest=f"m{gang.step}")
        elif answer == "evaluate" and gang.step:
            self.tell(events.Evaluated, gang, step=gang.step, loss=1.0, tokens=256)
        elif answer in ("skip", "rollback") and gang.step is not None and gang.step < STEPS:
            self.tell(events.StepSkipped, gang, step=gang.step + 1, action=answer, reason="loss nan", samples=())
            if answer == "rollback":
                gang.step = self.world.job(gang.uid).checkpoint_step or 0
                self.tell(events.GangResumed, gang, step=gang.step, manifest=None)
        elif answer == "pause" and gang.pause and gang.step is not None:
            self.tell(events.GangPaused, gang, step=gang.step)
        elif answer == "finish" and gang.step == STEPS:
            self.tell(events.GangFinished, gang)
        elif answer == "stop" and gang.stop:
            del self.gangs[gang.uid]
            self.tell(events.GangStopped, gang)

    def tell(self, kind: type, gang: Gang, **fields: object) -> None:
        self.act(self.world.gang(kind, gang.uid, gang.attempt, **fields))

    def act(self, decision: Decision) -> None:
        for command in decision.commands:
            if isinstance(command, StartGang):
                assert command.uid not in self.gangs
                self.gangs[command.uid] = Gang(command.uid, command.attempt)
                self._check_nodes(command)
            elif isinstance(command, PauseGang):
                self.gangs[command.uid].pause = True
            elif not isinstance(command, ReleaseGang | RaiseStandbys | SaveGang):
                self.gangs[command.uid].stop = True
        for project in ("default", "vision"):  # what runs goes on when a quota shrinks
            self.over[project] = sum(len(j.held) for j in self.world.state.jobs.values() if j.project == project)
        held = {uid for uid, job in self.world.state.jobs.items() if job.placement}
        assert held == set(self.gangs), "what is held is what the runtime has"

    def _check_nodes(self, command: StartGang) -> None:
        state, alive = self.world.state, {node.id: node for node in self.world.state.fleet.nodes}
        project = state.jobs[command.uid].project
        held = sum(len(job.held) for job in state.jobs.values() if job.project == project)
        assert held <= state.quotas.get(project, held) or self.over[project] >= held, "placed beyond the quota"
        for slot in command.placement.slots:
            assert health.bar(alive[slot.node], state.health, self.world.now) is None, "placed on a barred node"
            assert slot.index not in state.health.get(slot.name, health.CLEAN).resets, "placed on a device to be reset"

    def teardown(self) -> None:
        """All nodes are back and forgiven, and every command is answered: every job ends."""
        for node in NODES.nodes:
            self.act(self.world.tell(events.NodeForgiven(node.name, self.world.now)))
        self.act(self.world.observe(NODES))
        self.act(self.world.share())
        for uid in sorted(self.world.state.jobs):
            self.act(self.world.resume(uid))
        for _ in range(40):
            for gang in list(self.gangs.values()):
                for answer in ["start", "resume", *["step"] * STEPS, "finish", "pause", "stop"]:
                    if self.gangs.get(gang.uid) is gang:
                        self.answer(gang, answer)
            self.act(self.world.tick(30))
        for job in self.world.state.jobs.values():
            assert job.phase.terminal, (job.uid, job.phase, job.reason)
            assert job.ended_at is not None
            assert job.productive_s == job.high_step * world.STEP_S
            assert job.kept is None
            booked = accounts.accounts(job, job.ended_at)
            assert booked.total_s == job.ended_at - job.submitted_at
            assert min(booked.redone_s, booked.detect_s, *dataclasses.astuple(booked.spent), booked.between_s) >= 0
            if job.phase is Phase.SUCCEEDED:
                assert job.high_step == STEPS
                assert all(incident.recover_s is not None for incident in job.incidents)


TestRandomOrders = Runtime.TestCase
TestRandomOrders.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
