"""Variables of a job file: `vars:` holds their defaults, `${name}` stands for one in any value. Reads no environment.

A value that is only `${name}` becomes what the variable holds, a number or a list too; within text it is put in. `$${`
is the text `${`. What is put in is not looked at again. Names of fields are left as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from api.cli import values
from service.contracts import errors

SECTION = "vars"
FORM = "--var NAME=VALUE, such as --var lr=3e-4"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
PLACE = re.compile(r"\$\$\{|\$\{([^}]*)\}|\$\{")
ESCAPE = "$${"


def given(options: Sequence[str]) -> dict[str, Any]:
    """Of `--var NAME=VALUE`; a value is YAML."""
    return dict(values.assigned(option, FORM) for option in options)


def fill(document: Mapping[str, Any], set_: Mapping[str, Any]) -> dict[str, Any]:
    """The job without `vars` and with their values. `set_` goes before the file's defaults."""
    filling = _Filling({**_defaults(document), **set_})
    made = {name: filling.value(value) for name, value in document.items() if name != SECTION}
    if idle := sorted(set(set_) - filling.used):
        used = _names(filling.used)
        raise errors.UserError(
            f"the file uses no variable {idle[0]}", hint=f"it uses {used}", field=f"{SECTION}.{idle[0]}"
        )
    return made


def _defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get(SECTION)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise errors.UserError("vars is a mapping of names to values", hint="vars: {lr: 3e-4}", field=SECTION)
    for name, value in found.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            hint = "letters, digits, _ and -, with a letter or _ at first"
            raise errors.UserError(f"{name!r} is no name of a variable", hint=hint, field=SECTION)
        if isinstance(value, str) and "${" in value:
            hint = "write out the value, or use both variables where it is used"
            raise errors.UserError(f"variable {name} uses another one: {value!r}", hint=hint, field=f"{SECTION}.{name}")
    return found


class _Filling:
    """Notes which variables were used. What is an alias of itself stays one."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self._done: dict[int, Any] = {}
        self.used: set[str] = set()

    def value(self, value: Any) -> Any:
        match value:
            case str():
                return self._text(value)
            case dict() | list() if id(value) in self._done:
                return self._done[id(value)]
            case dict():
                made = self._done[id(value)] = {}
                made.update((key, self.value(inner)) for key, inner in value.items())
                return made
            case list():
                row = self._done[id(value)] = []
                row.extend(self.value(inner) for inner in value)
                return row
        return value

    def _text(self, text: str) -> Any:
        whole = PLACE.fullmatch(text)
        if whole is not None and text != ESCAPE:
            return self._of(whole, text)
        return PLACE.sub(lambda place: self._within(place, text), text)

    def _within(self, place: re.Match[str], text: str) -> str:
        if place[0] == ESCAPE:
            return "${"
        value = self._of(place, text)
        if isinstance(value, str):
            return value
        if isinstance(value, list | dict):
            hint = f"let the value be ${{{place[1]}}} and nothing else"
            raise errors.UserError(f"variable {place[1]} is a {_kind(value)}, and stands within {text!r}", hint=hint)
        return json.dumps(value, default=str)

    def _of(self, place: re.Match[str], text: str) -> Any:
        name = place[1]
        if name is None or not NAME.fullmatch(name):
            raise errors.UserError(f"{text!r} names no variable", hint="${name} does; write $${ for the text ${")
        if name not in self._known:
            hint = f"known: {_names(self._known)}; add it to vars or give --var {name}=...; $${{ is the text ${{"
            raise errors.UserError(f"unknown variable {name} in {text!r}", hint=hint, field=f"{SECTION}.{name}")
        self.used.add(name)
        return self._known[name]


def _kind(value: list[Any] | dict[Any, Any]) -> str:
    return "list" if isinstance(value, list) else "mapping"


def _names(found: Any) -> str:
    return ", ".join(sorted(found)) or "none"
