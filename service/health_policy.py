"""Reads the health policy: `health_policy.yaml` beside this file, or one that an operator wrote in its place.

Knows the form of the file and where in it a mistake is; what rules mean is `core.policy`'s.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, StrictInt, StrictStr, ValidationError, model_validator

from service.contracts.errors import UserError
from service.contracts.events import HealthAction
from service.core.policy import Policy, Repeat, Rule, Source
from workers.models.spec import Spec

NAME = "health_policy.yaml"


class RepeatSpec(Spec):
    times: int = Field(ge=2, le=10_000)
    within_s: float = Field(gt=0)
    action: HealthAction


class RuleSpec(Spec):
    source: Source
    codes: tuple[StrictInt | StrictStr, ...] | None = Field(default=None, min_length=1)
    action: HealthAction
    why: str = Field(min_length=1, max_length=200)
    repeat: RepeatSpec | None = None
    at_least: float = Field(default=0.0, ge=0)
    echo: bool = False

    @model_validator(mode="after")
    def _fits(self) -> RuleSpec:
        self.rule()
        return self

    def rule(self) -> Rule:
        repeat = Repeat(**self.repeat.model_dump()) if self.repeat else None
        return Rule(self.source, self.action, self.why, self.codes or (), repeat, self.at_least, self.echo)


class PolicySpec(Spec):
    storm_s: float = Field(default=30.0, gt=0)
    rules: tuple[RuleSpec, ...]

    @model_validator(mode="after")
    def _fits(self) -> PolicySpec:
        self.policy()
        return self

    def policy(self) -> Policy:
        return Policy(tuple(rule.rule() for rule in self.rules), self.storm_s)


def read(path: Path | None = None) -> Policy:
    """The shipped policy, or that of `path`. UserError names the field at fault and its line."""
    source = importlib.resources.files("service").joinpath(NAME) if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} can't be read: {error}", hint="name a file of rules", field=str(source)) from None
    return parse(text, str(source))


def parse(text: str, name: str = NAME) -> Policy:
    try:
        tree, value = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is no YAML: {error}", hint=f"{NAME} of this package is an example") from None
    if not isinstance(value, dict):
        raise UserError(f"{name}, line 1: the file is no mapping with rules", hint=_hint([]))
    try:
        return PolicySpec.model_validate(value).policy()
    except ValidationError as error:
        raise _refusal(error, tree, name) from None


def _refusal(error: ValidationError, tree: yaml.Node | None, name: str) -> UserError:
    first = error.errors()[0]
    path = [part for part in first["loc"] if part not in ("int", "str")]  # branches of a union, no fields
    field, line = ".".join(map(str, path)), _line(tree, path)
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{name}, line {line}: {field or 'the file'}: {message}", hint=_hint(path), field=field)


def _hint(path: list[Any]) -> str:
    return f"{NAME} of this package is an example" if len(path) < 2 else "each rule has a source, an action and a why"


def _line(node: yaml.Node | None, path: list[Any]) -> int:
    """The line, from 1, of the innermost part of `path` that the file has."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in path:
        key: yaml.Node | None = None
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            key = node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            key, node = next(((k, v) for k, v in node.value if k.value == part), (None, None))
        if key is None:
            return line
        line = key.start_mark.line + 1
    return line
