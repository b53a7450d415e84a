"""The command line against a live API."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from api.cli import show
from service.contracts.job import Phase
from tests.api.commands import Run, submitted
from tests.api.world import World, job


def test_submit_takes_yaml_json_and_standard_input(run: Run, file: Path, tmp_path: Path) -> None:
    as_json = tmp_path / "job.json"
    as_json.write_text(json.dumps(job()))
    for done in (
        run("submit", str(file)),
        run("submit", str(as_json)),
        run("submit", "-", given=file.read_text()),
    ):
        assert done.exit_code == 0
        assert done.stdout.startswith("submitted topics-")
    assert json.loads(run("submit", str(file), "--json").stdout)["phase"] == "queued"
    uids = {run("submit", str(file), "--key", "same").stdout for _ in range(2)}
    assert len(uids) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "neither YAML nor JSON: line"),
        ("a: !!python/object:os.system {}", "neither YAML nor JSON"),
        ("- a\n- b\n", "holds no job"),
        ("", "holds no job"),
        (yaml.safe_dump(job({"colour": "red"})), "unknown field 'colour'"),
        (yaml.safe_dump(job({"data.source": "/no/such.txt"})), "builtin:topics"),
        (yaml.safe_dump(job()).replace("name: topics", "name: 2026-01-01"), "can't be JSON"),
    ],
)
def test_a_wrong_file_is_told_in_two_lines_at_most(run: Run, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    done = run("submit", str(path))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 2
    assert not done.stdout


def test_a_file_that_is_not_there(run: Run) -> None:
    done = run("submit", "/no/such.yaml")
    assert (done.exit_code, "No such file" in done.stderr) == (2, True)


def test_list_and_nodes_fit_eighty_columns(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    world.move(uid, Phase.RUNNING, step=7, loss=3.25)
    with world.fleet(4, 4):
        for done, words in (
            (run("list"), [uid, "running", "7/20", "3.250"]),
            (run("list", "--phase", "running", "--limit", "1"), [uid]),
            (run("nodes"), ["n1", "n2", "4"]),
        ):
            assert done.exit_code == 0
            assert all(word in done.stdout for word in words)
            assert max(map(len, (line.rstrip() for line in done.stdout.splitlines()))) <= 80
            assert "\x1b" not in done.stdout


def test_get_in_three_forms(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    world.move(uid, Phase.FAILED, "the same error [again]", step=7, loss=3.25, loss_first=5.5)
    shown = run("get", uid).stdout
    assert "failed: the same error [again]" in shown
    assert "5.5000 at first, 3.2500 now" in shown
    assert "evaluation" not in shown
    world.move(uid, Phase.FAILED, step=7, loss=3.25, eval_loss=3.5, eval_step=5)
    assert "loss 3.5000 on other text, after step 5" in run("get", uid).stdout
    assert json.loads(run("get", uid, "-o", "json").stdout) == yaml.safe_load(run("get", uid, "-o", "yaml").stdout)


def test_logs_and_events(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    world.log(uid, "logs/0.jsonl", [(0, "step 1 [loss]"), (1, "hello")])
    world.move(uid, Phase.SUCCEEDED)
    assert run("logs", uid).stdout == "[1.0 n1] step 1 [loss]\n[1.1 n1] hello\n"
    assert run("logs", uid, "-f", "--rank", "1").stdout == "[1.1 n1] hello\n"
    lines = run("events", uid, "--follow").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["JobSubmitted", "PhaseChanged"]


def test_cancel(run: Run, world: World, file: Path) -> None:
    uid = submitted(run, file)
    assert "cancellation is asked for" in run("cancel", uid).stdout
    world.move(uid, Phase.CANCELLED)
    done = run("cancel", uid)
    assert (done.exit_code, "cancelled" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["get", "logs", "events", "cancel"])
def test_a_job_that_is_not_there(run: Run, command: str) -> None:
    done = run(command, "nobody-00000000")
    assert (done.exit_code, "nobody-00000000" in done.stderr) == (2, True)


def test_an_api_that_does_not_answer_is_told_with_what_to_do(run: Run, tmp_path: Path) -> None:
    done = run("list", PHALANX_API_URL="http://127.0.0.1:9")
    assert done.exit_code == 3
    assert "http://127.0.0.1:9 does not answer" in done.stderr
    assert "phalanx up" in done.stderr
    done = run("list", PHALANX_HOME=str(tmp_path / "nowhere"))
    assert (done.exit_code, "no API is known" in done.stderr) == (3, True)
    assert run("list", PHALANX_TOKEN="wrong").exit_code == 2


@pytest.mark.parametrize(("phase", "code"), [(Phase.SUCCEEDED, 0), (Phase.FAILED, 1), (Phase.CANCELLED, 1)])
def test_follow_ends_with_the_job_and_its_outcome(
    run: Run, world: World, file: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, code: int
) -> None:
    def finish(client: Any, uid: str, out: Console) -> Any:
        world.say(uid, "a rank died: it is replaced")
        world.move(uid, phase, "done", step=20, loss=2.0)
        return followed(client, uid, out)

    followed = show.follow
    monkeypatch.setattr(show, "follow", finish)
    done = run("submit", str(file), "--follow")
    assert done.exit_code == code
    assert "a rank died: it is replaced" in done.stdout
    assert f"{phase}: done" in done.stdout


def test_follow_draws_a_line_of_progress_on_a_terminal(world: World) -> None:
    uid = world.submit().uid
    world.move(uid, Phase.RUNNING, step=7, loss=3.25, eval_loss=3.5, eval_step=5, tokens_per_s=1234.0, eta_s=65.0)

    class Screen(io.StringIO):
        """The job ends once its progress has been drawn."""

        def write(self, text: str) -> int:
            if "7/20" in text and not self.getvalue().count("7/20"):
                world.move(uid, Phase.SUCCEEDED, "all steps done", step=20, loss=2.0)
            return super().write(text)

    screen = Screen()
    out = Console(file=screen, force_terminal=True, width=80, highlight=False, markup=False, color_system=None)
    with world.client() as client:
        view = show.follow(client, uid, out)
    assert view.phase is Phase.SUCCEEDED
    assert "7/20  loss 3.250  eval 3.500  1,234 tok/s  eta 1m05s" in screen.getvalue()
    assert "succeeded: all steps done" in screen.getvalue()
