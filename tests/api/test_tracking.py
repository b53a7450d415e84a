"""What trackers are told, each read back by its own reader: every step once, one run over all attempts and calls."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api.tracking.following
from api.tracking import following, standing, tracker
from api.tracking.following import Following
from api.tracking.tracker import Batch, Mark, Point
from api.turns import Cursor
from service.contracts import errors
from service.contracts.status import JobView
from tests.api import steps
from tests.api.commands import Run
from tests.api.world import World, until

LOSSES = {step: steps.loss(step) for step in range(1, 17)}


class Memory:
    """A tracker that keeps what it is told, and fails when it is to."""

    def __init__(self) -> None:
        self.cursor, self.batches, self.ended, self.failures = Cursor(), list[Batch](), list[JobView | None](), 0
        self.heard: Callable[[int], None] = lambda step: None  # told of the last step of each batch

    def begin(self, job: JobView) -> Cursor:
        return self.cursor

    def write(self, batch: Batch) -> None:
        if self.failures:
            self.failures -= 1
            raise errors.ClusterError("the tracker is away")
        self.batches.append(batch)
        self.cursor = batch.cursor
        self.heard(batch.cursor.step)

    def end(self, job: JobView | None) -> None:
        self.ended.append(job)

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(p.step, p.values["train/loss"]) for b in self.batches for p in b.points if "train/loss" in p.values]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tracking.following, "POLL_S", 0.05)


def test_each_step_once_over_attempts_calls_and_failures(world: World) -> None:
    uid, memory = steps.trained(world), Memory()
    with world.client() as client:
        memory.failures = 2
        one = Following(client, uid, memory)
        assert not one.turn()
        assert not one.turn()
        following.run([one], once=True)
        assert memory.losses == [(step, LOSSES[step]) for step in range(1, 13)]
        assert memory.ended == [None]

        def trains_on(step: int) -> None:
            if step < 16:
                steps.told(world, uid, [step + 1], attempt=2)
            elif not client.get(uid).phase.terminal:  # to be over is news as well
                steps.over(world, uid, step)

        memory.heard = trains_on
        steps.told(world, uid, [13], attempt=2)
        following.run([Following(client, uid, memory)])
    assert memory.losses == sorted(LOSSES.items())
    assert [job and job.phase for job in memory.ended] == [None, "succeeded"]


def test_what_a_batch_has(world: World) -> None:
    uid, memory = steps.trained(world), Memory()
    with world.client() as client:
        following.run([Following(client, uid, memory)], once=True)
    points = [point for batch in memory.batches for point in batch.points]
    assert points[0] == Point(1, steps.AT + 1, {
        "train/loss": LOSSES[1], "train/grad_norm": 0.5, "train/learning_rate": 0.25, "train/tokens_per_s": 1024.0,
        "train/step_s": 1.0,
    })  # fmt: skip
    others = [point for point in points if "train/loss" not in point.values]
    assert others == [
        Point(4, steps.AT + 4, {"eval/loss": LOSSES[4] + 0.5}), Point(6, steps.AT + 6, {"incidents": 1}),
    ]  # fmt: skip
    assert [mark for batch in memory.batches for mark in batch.marks] == [
        Mark(6, steps.AT + 6, "incident 1", "node n1 is gone"),
        Mark(6, steps.AT + 6, "incident 1 over", "over after 2 s"),
    ]


@pytest.mark.parametrize(
    ("data", "values"),
    [
        ({"loss": 2.0, "sources": [["wiki", 2.0, 64]]}, {"eval/loss": 2.0}),
        (
            {"loss": 2.0, "sources": [["wiki", 1.0, 32], ["code", 3.0, 32]]},
            {"eval/loss": 2.0, "eval/loss/wiki": 1.0, "eval/loss/code": 3.0},
        ),
        ({"loss": None, "sources": [["wiki", 1.0, 32], ["code", None, 32]]}, {"eval/loss/wiki": 1.0}),
    ],
)
def test_an_evaluation_is_told_by_source_where_there_are_several(
    world: World, data: dict[str, Any], values: dict[str, float]
) -> None:
    uid, memory = world.submit().uid, Memory()
    steps.happened(world, uid, "Evaluated", 4, "evaluation", **data)
    with world.client() as client:
        following.run([Following(client, uid, memory)], once=True)
    assert [point.values for batch in memory.batches for point in batch.points] == [values]


def test_a_tracker_that_stays_away_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tracking.following, "PATIENCE_S", 0.0)
    memory = Memory()
    memory.failures = 1
    with world.client() as client:
        one = Following(client, steps.trained(world), memory)
        with pytest.raises(errors.ClusterError, match="the tracker is away"):
            following.run([one])
    assert memory.ended == [None]


def test_the_api_may_be_away_for_a_while(world: World) -> None:
    uid, memory = steps.trained(world), Memory()
    with world.client() as client:
        one = Following(client, uid, memory)
        world.stop()
        assert not one.turn()
        world.start()
        following.run([one], once=True)
    assert len(memory.losses) == 12


@pytest.mark.parametrize("content", [None, "", "{}", '{"event": "x", "step": 1}', '{"colour": 1}', "[]"])
def test_a_cursor_file_that_says_nothing_is_the_start(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "c.json").write_text(content)
    assert standing.read(tmp_path / "c.json") == Cursor()
    standing.write(tmp_path / "c.json", Cursor(3, 4))
    assert standing.read(tmp_path / "c.json") == Cursor(3, 4)


def test_a_library_that_is_not_installed_is_told() -> None:
    with pytest.raises(errors.UserError, match="no_such_library is not installed") as raised:
        tracker.library("no_such_library.inner", "mlflow")
    assert raised.value.hint == "pip install 'phalanx[mlflow]'"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("job",), "it is not said where to"),
        (("--tensorboard", "x"), "a job or a sweep is named"),
        (("job", "--sweep", "s", "--tensorboard", "x"), "a job or a sweep is named"),
    ],
)
def test_what_track_refuses(run: Run, words: tuple[str, ...], says: str) -> None:
    done = run("track", *words)
    assert (done.exit_code, says in done.stderr) == (2, True)


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("tensorboard")

    def scalars(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder), size_guidance={"tensors": 0})
        read.Reload()
        tags = read.Tags()["tensors"]
        found = {tag: [(event.step, event.tensor_proto) for event in read.Tensors(tag)] for tag in tags}
        return {
            tag: [
                (step, proto.string_val[0].decode() if proto.string_val else proto.float_val[0]) for step, proto in row
            ]
            for tag, row in found.items()
        }

    def test_one_run_over_two_calls(self, run: Run, world: World, tmp_path: Path) -> None:
        uid = steps.trained(world)
        words = ("track", uid, "--tensorboard", str(tmp_path))
        assert run(*words, "--once").stdout == f"{uid} is running: 12 steps written, up to step 12\n"
        steps.told(world, uid, range(13, 17), attempt=2)
        steps.over(world, uid, 16)
        assert run(*words).stdout == f"{uid} is succeeded: 4 steps written, up to step 16\n"
        assert [one.name for one in tmp_path.iterdir()] == [uid]
        found = self.scalars(tmp_path / uid)
        assert found["train/loss"] == sorted(LOSSES.items())
        assert found["train/learning_rate"] == [(step, 0.25) for step in LOSSES]
        assert (found["eval/loss"], found["incidents"]) == ([(4, LOSSES[4] + 0.5)], [(6, 1.0)])
        assert (found["incident 1"], len(found["job"])) == ([(6, "node n1 is gone")], 1)

    @pytest.mark.parametrize("known", [None, Cursor(0, 7)])
    def test_what_a_cut_wrote_twice_is_read_once(self, run: Run, world: World, tmp_path: Path, known: Any) -> None:
        uid = steps.trained(world)
        words = ("track", uid, "--tensorboard", str(tmp_path), "--once")
        run(*words)
        cursor = tmp_path / uid / "phalanx.json"
        cursor.unlink()
        if known:
            standing.write(cursor, known)
        run(*words)
        assert self.scalars(tmp_path / uid)["train/loss"] == sorted(LOSSES.items())[:12]

    def test_a_sweep_is_a_run_a_job(self, run: Run, world: World, tmp_path: Path) -> None:
        uids = {steps.trained(world, changes={"labels.sweep": "tracked"}) for _ in range(2)}
        done = run("track", "--sweep", "tracked", "--tensorboard", str(tmp_path), "--once")
        assert done.exit_code == 0, done.output
        assert {one.name for one in tmp_path.iterdir()} == uids

    def test_a_folder_that_can_not_be_written(self, run: Run, world: World, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = run("track", steps.trained(world), "--tensorboard", str(tmp_path / "file"))
        assert (done.exit_code, "can't be written" in done.stderr) == (2, True), done.output


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # of MLflow with SQLAlchemy 2.1
class TestMLflow:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        pytest.importorskip("mlflow")

    def test_one_run_over_two_calls(self, run: Run, world: World, tmp_path: Path) -> None:
        from mlflow.tracking import MlflowClient

        uri, uid = f"sqlite:///{tmp_path / 'mlflow.db'}", steps.trained(world, changes={"labels.team": "vision"})
        words = ("track", uid, "--mlflow", uri, "--experiment", "topics")
        done = run(*words, "--once")
        assert done.exit_code == 0, done.output
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("topics")
        assert experiment is not None

        def one() -> Any:
            (found,) = client.search_runs([experiment.experiment_id])
            return found

        made = one()
        assert (made.info.run_name, made.info.status, made.data.tags["team"]) == (uid, "RUNNING", "vision")
        assert (made.data.params["train.steps"], made.data.params["model.hidden"]) == ("20", "64")
        assert made.data.tags["incident 1"] == "step 6: node n1 is gone"
        client.set_tag(made.info.run_id, "phalanx.cursor", json.dumps({"step": 7}))  # as a cut leaves it
        steps.told(world, uid, range(13, 17), attempt=2)
        steps.over(world, uid, 16)
        assert run(*words).exit_code == 0
        assert (one().info.run_id, one().info.status) == (made.info.run_id, "FINISHED")
        history = client.get_metric_history(made.info.run_id, "train/loss")
        assert sorted((each.step, each.value) for each in history) == sorted(LOSSES.items())
        assert {each.timestamp for each in history} == {round((steps.AT + step) * 1000) for step in LOSSES}
        (evaluation,) = client.get_metric_history(made.info.run_id, "eval/loss")
        assert (evaluation.step, evaluation.value) == (4, LOSSES[4] + 0.5)

    def test_a_server_that_does_not_answer(self, run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        done = run("track", steps.trained(world), "--mlflow", "http://127.0.0.1:9", "--once")
        assert (done.exit_code, "MLflow at http://127.0.0.1:9: " in done.stderr) == (3, True), done.output


def logged(content: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format: blocks of 32 KiB, in them pieces of checksum, length, kind and data."""
    place, record = 7, b""  # after W&B's own header
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


class TestWandB:
    """Offline: what W&B keeps of a run is a folder a call, which `wandb sync` puts together by the run's id."""

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        monkeypatch.setenv("WANDB_SILENT", "true")
        pytest.importorskip("wandb")

    def losses(self, folder: Path) -> list[tuple[int, float]]:
        from wandb.proto.wandb_internal_pb2 import Record

        found = []
        for data in logged(next(folder.glob("*.wandb")).read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in row:
                found.append((row["step"], row["train/loss"]))
        return found

    def test_one_id_over_two_calls(self, run: Run, world: World, tmp_path: Path) -> None:
        uid = steps.trained(world)
        words = ("track", uid, "--wandb", "topics")
        done = run(*words, "--once")
        assert done.exit_code == 0, done.output
        (first,) = (tmp_path / "wandb").glob(f"offline-run-*-{uid}")
        steps.told(world, uid, range(13, 17), attempt=2)
        steps.over(world, uid, 16)
        until(lambda: time.strftime("%Y%m%d_%H%M%S") not in first.name)  # W&B names them by the second
        assert run(*words).stdout == f"{uid} is succeeded: 4 steps written, up to step 16\n"
        (second,) = set((tmp_path / "wandb").glob(f"offline-run-*-{uid}")) - {first}
        until(lambda: len(self.losses(second)) == 4)  # a process of W&B's own writes it
        assert self.losses(first) + self.losses(second) == sorted(LOSSES.items())
