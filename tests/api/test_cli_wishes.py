"""Commands that change a job, look at it whole, and look after an installation."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import yaml

from api.cli import doctor
from service.contracts.job import Phase
from service.settings import Settings
from service.store.jobs import Store
from tests.api.commands import Run, submitted
from tests.api.world import World


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("cancel", "--graceful"), "cancel"),
        (("suspend",), "suspend"),
        (("restart",), "restart"),
        (("rescale", "--slots", "2"), "rescale"),
        (("change", "priority=5", "checkpoint.keep=7", "labels={team: a}"), "change"),
    ],
)
def test_a_wish_is_left_for_the_controller(
    run: Run,
    world: World,
    file: Path,
    words: tuple[str, ...],
    kind: str,
) -> None:
    uid = submitted(run, file)
    world.move(uid, Phase.RUNNING)
    done = run(words[0], uid, *words[1:])
    assert done.exit_code == 0, done.output
    assert [asked for asked, _ in world.intents(uid)] == [kind]


def test_a_change_says_what_it_is_now(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    assert run("change", uid, "priority=5", "budgets.hang=-1").stdout == f"{uid}: generation 2 of its spec\n"
    spec = world.store.job(uid).spec
    assert (spec["priority"], spec["budgets"]["hang"]) == (5, -1)
    for words, says in (
        (("priority",), "changes nothing"),
        (("x=[",), "can't be read"),
        (("train.steps=1",), "can't be changed"),
    ):
        done = run("change", uid, *words)
        assert (done.exit_code, says in done.stderr) == (2, True)


def test_suspend_and_resume(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    assert run("resume", uid).exit_code == 2
    assert run("suspend", uid).exit_code == 0
    world.move(uid, Phase.SUSPENDED)
    assert run("resume", uid).exit_code == 0
    assert [kind for kind, _ in world.intents(uid)] == ["suspend", "resume"]


def test_delete(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    assert run("delete", uid).exit_code == 2
    world.move(uid, Phase.FAILED)
    assert run("delete", uid, "--data").exit_code == 0
    assert run("get", uid).exit_code == 2


def test_a_list_for_programs(run: Run, file: Path) -> None:
    uid = submitted(run, file)
    as_json = json.loads(run("list", "-o", "json", "--limit", "2").stdout)
    assert as_json[0]["uid"] == uid
    assert yaml.safe_load(run("list", "-o", "yaml", "--limit", "1").stdout)[0]["uid"] == uid


def test_submit_waits_and_its_exit_code_is_the_jobs(run: Run, world: World, file: Path) -> None:
    before = {row.uid for row in world.store.jobs(limit=1000)}

    def end() -> None:
        while not (new := {row.uid for row in world.store.jobs(limit=1000)} - before):
            pass
        world.move(new.pop(), Phase.FAILED)

    other = threading.Thread(target=end)
    other.start()
    done = run("submit", str(file), "--wait")
    other.join(10)
    assert done.exit_code == 1
    assert done.stdout.count("\n") == 1


def test_describe_and_top(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    world.say(uid, "something happened")
    told = run("describe", uid).stdout
    assert "something happened" in told
    assert "place" in told  # where its time went
    assert uid in run("top").stdout


def test_queues(run: Run) -> None:
    assert run("queue", "create", "night", "--priority", "-5").exit_code == 0
    assert run("queue", "priority", "night", "--priority", "-7").exit_code == 0
    assert "-7" in run("queue", "list").stdout


def test_a_healthy_installation(run: Run, world: World) -> None:
    done = run("doctor", PHALANX_STORE=f"sqlite:///{world.home}/store.sqlite3", PHALANX_STORAGE=world.root)
    assert done.exit_code == 0, done.output
    assert "bad" not in done.stdout
    assert not list(Path(world.root).glob(".doctor*"))


@pytest.mark.parametrize(
    ("environ", "what", "says"),
    [
        ({"PHALANX_STORE": "sqlite:////nowhere/at/all.sqlite3"}, "store", "there is no store at"),
        ({"PHALANX_STORAGE": "/proc/nowhere"}, "storage", "FileNotFoundError"),
        ({"PHALANX_RAY_ADDRESS": "127.0.0.1:9"}, "ray", "ConnectionRefusedError"),
    ],
)
def test_each_fault_is_named(
    run: Run,
    world: World,
    environ: dict[str, str],
    what: str,
    says: str,
) -> None:
    here = {"PHALANX_STORE": f"sqlite:///{world.home}/store.sqlite3", "PHALANX_STORAGE": world.root, **environ}
    done = run("doctor", **here)
    assert done.exit_code == 1
    assert says in done.stdout
    assert any(line.startswith("bad") and f" {what} " in line for line in done.stdout.splitlines())


def test_storage_that_lets_two_create_the_same_is_no_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.checkpoint.storage import LocalStorage

    monkeypatch.setattr(LocalStorage, "create", lambda self, path, data: Path(self.root, path).write_bytes(data))
    found = doctor.storage(str(tmp_path))
    assert (found.good, found.told) == (False, "it lets two writers create the same object")


def test_a_clock_that_is_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.read({"PHALANX_HOME": str(tmp_path)})
    Store.open(settings.store).close()
    assert doctor.clock(settings).good
    monkeypatch.setattr(Store, "now", lambda self: 1000.0)
    assert "s from the store's" in doctor.clock(settings).told
    assert not doctor.clock(settings).good
