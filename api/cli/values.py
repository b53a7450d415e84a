"""Values that are given on the command line: YAML, in which 3e-4 is a number as well."""

from __future__ import annotations

import re
from typing import Any

import yaml

from service.contracts import errors

FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 wants a dot and a sign in it


def assigned(option: str, form: str) -> tuple[str, Any]:
    """(name, value) of NAME=VALUE. `form`: how it is written, with an example."""
    name, text = _split(option, form)
    return name, _read(name, text)


def listed(option: str, form: str) -> tuple[str, list[Any]]:
    """(name, values) of NAME=VALUE,VALUE,..."""
    name, text = _split(option, form)
    return name, _read(name, f"[{text}]")


def numbers(value: Any) -> Any:
    """With floats in place of texts such as 3e-4."""
    match value:
        case str() if FLOAT.fullmatch(value):
            return float(value)
        case list():
            return [numbers(inner) for inner in value]
    return value


def _read(name: str, text: str) -> Any:
    try:
        return numbers(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise errors.UserError(f"the value of {name} can't be read: {text!r}", hint="quote it") from None


def _split(option: str, form: str) -> tuple[str, str]:
    name, sign, text = option.partition("=")
    if not sign or not name:
        raise errors.UserError(f"{option!r} changes nothing", hint=f"write {form}")
    return name, text
