"""Job files with variables: what is put in, what is refused, and the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.cli import variables
from service.contracts.errors import UserError
from tests.api.commands import Run
from tests.api.world import job

VARS = {"n": 4, "lr": 3e-4, "on": True, "name": "topics", "betas": [0.9, 0.95], "none": None}


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        ("${n}", 4),
        ("${lr}", 3e-4),
        ("${on}", True),
        ("${name}", "topics"),
        ("${betas}", [0.9, 0.95]),
        ("${none}", None),
        ("a-${name}-${n}", "a-topics-4"),
        ("${n}${n}", "44"),
        ("${lr} ${on} ${none}", "0.0003 true null"),
        ("$${", "${"),
        ("$${n}", "${n}"),
        ("$${n}-${n}", "${n}-4"),
        ("$n {n} $", "$n {n} $"),
        (["${n}", {"deep": "${n}"}], [4, {"deep": 4}]),
        (7, 7),
    ],
)
def test_what_a_value_becomes(value: Any, becomes: Any) -> None:
    assert variables.fill({"vars": VARS, "x": value}, {}) == {"x": becomes}


@pytest.mark.parametrize(
    ("options", "becomes"),
    [
        ([], [4, "topics"]),
        (["n=8"], [8, "topics"]),
        (["n=1e-3", "name=b=c"], [1e-3, "b=c"]),
        (["n='8'", "name=no"], ["8", False]),
        (["n=[1, 2e3]"], [[1, 2e3], "topics"]),
        (["n=${name}"], ["${name}", "topics"]),
        (["n=1", "n=2"], [2, "topics"]),
    ],
)
def test_what_is_given_goes_before_the_defaults(options: list[str], becomes: list[Any]) -> None:
    made = variables.fill({"vars": VARS, "x": ["${n}", "${name}"]}, variables.given(options))
    assert made == {"x": becomes}


def test_a_variable_needs_no_default_when_it_is_given() -> None:
    assert variables.fill({"x": "${n}"}, {"n": 1}) == {"x": 1}


def test_names_of_fields_stay_and_aliases_too() -> None:
    inner: dict[str, Any] = {"${n}": "${n}"}
    inner["self"] = inner
    made = variables.fill({"vars": VARS, "x": inner, "y": inner}, {})
    assert made["x"]["${n}"] == 4
    assert made["x"] is made["y"] is made["x"]["self"]


@pytest.mark.parametrize(
    ("document", "given", "says", "hints"),
    [
        ({"vars": {"a": 1, "b": 2}, "x": "${c}"}, {}, "unknown variable c in '${c}'", "known: a, b;"),
        ({"x": "${HOME}"}, {}, "unknown variable HOME", "known: none;"),
        ({"vars": {"a": 1, "b": 2}, "x": "${a}"}, {"b": 3}, "the file uses no variable b", "it uses a"),
        ({"vars": {"a": 1}, "x": 1}, {"c": 3}, "the file uses no variable c", "it uses none"),
        ({"vars": {"a": [1]}, "x": "is ${a}"}, {}, "variable a is a list, and stands within", "let the value be ${a}"),
        ({"vars": {"a": "${b}", "b": 1}}, {}, "variable a uses another one", "write out"),
        ({"vars": {"1a": 1}}, {}, "'1a' is no name", "letters"),
        ({"vars": {1: 1}}, {}, "1 is no name", "letters"),
        ({"vars": ["a"]}, {}, "vars is a mapping", "lr: 3e-4"),
        ({"x": "${}"}, {}, "'${}' names no variable", "$${"),
        ({"x": "${a b}"}, {}, "names no variable", "$${"),
        ({"x": "a ${b"}, {}, "names no variable", "$${"),
    ],
)
def test_what_is_refused(document: dict[str, Any], given: dict[str, Any], says: str, hints: str) -> None:
    with pytest.raises(UserError) as raised:
        variables.fill(document, given)
    assert says in raised.value.message
    assert hints in raised.value.hint


@pytest.mark.parametrize(
    ("option", "says"),
    [("n", "'n' changes nothing"), ("=1", "'=1' changes nothing"), ("n=[", "the value of n can't be read")],
)
def test_what_is_no_assignment(option: str, says: str) -> None:
    with pytest.raises(UserError, match="^" + says.replace("[", r"\[")):
        variables.given([option])


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    path = tmp_path / "varied.yaml"
    changes = {"vars": {"lr": 3e-4, "slots": 4}, "train.learning_rate": "${lr}", "resources.slots": "${slots}"}
    path.write_text(yaml.safe_dump(job({**changes, "labels.run": "lr-${lr}"})))
    return path


@pytest.mark.parametrize(
    ("options", "rate", "label"), [([], 3e-4, "lr-0.0003"), (["--var", "lr=1e-2", "--var", "slots=2"], 0.01, "lr-0.01")]
)
def test_submit_fills_them_in(run: Run, varied: Path, options: list[str], rate: float, label: str) -> None:
    spec = json.loads(run("submit", str(varied), "--json", *options).stdout)["spec"]
    assert (spec["train"]["learning_rate"], spec["labels"]["run"]) == (rate, label)
    assert run("submit", str(varied), "--dry-run", *options).exit_code == 0


def test_plan_and_simulate_fill_them_in(run: Run, varied: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"device": "cpu", "racks": [{"nodes": 1, "slots": 8}]}))
    done = run("plan", str(varied), "--fleet", str(fleet), "--json", "--var", "slots=2")
    assert json.loads(done.stdout)["slots"] == 2
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(yaml.safe_dump({"device": "cpu", "nodes": 4, "slots": 4}))
    words = ("simulate", "--job", str(varied), "--fleet", str(nodes), "--days", "0.001", "--step-s", "1", "--json")
    done = run(*words, "--var", "slots=8")
    assert done.exit_code == 0, done.output
    assert run(*words, "--var", "colour=red").exit_code == 2


def test_an_unknown_variable_is_told_in_two_lines(run: Run, varied: Path) -> None:
    done = run("submit", str(varied), "--var", "colour=red")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == ["error: the file uses no variable colour", "hint: it uses lr, slots"]
