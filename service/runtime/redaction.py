"""Takes the secrets of a job out of what is told of it. Knows what they are; tells nobody."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeVar

from service.contracts.errors import ClusterError
from service.runtime import references

HIDDEN = "[secret]"
SHORTEST = 6  # characters; what is shorter would be found in everything, and is no secret

T = TypeVar("T")


class Redaction:
    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known: tuple[str, ...] = ()
        self.learn(known)

    def learn(self, values: Iterable[str]) -> None:
        """Whole, and line by line: logs are cut into lines."""
        parts = {part.strip() for value in values for part in (value, *value.splitlines())}
        wanted = {part for part in parts if len(part) >= SHORTEST} | set(self._known)
        self._known = tuple(sorted(wanted, key=lambda part: (-len(part), part)))

    def look_up(self, secrets: Mapping[str, str]) -> None:
        """What these references stand for on this node now; of what is not there nothing can be told."""
        for reference in secrets.values():
            with contextlib.suppress(ClusterError):
                self.learn([references.value(reference)])

    def text(self, text: str) -> str:
        for value in self._known:
            text = text.replace(value, HIDDEN)
        return text

    def report(self, report: T) -> T:
        """A dataclass, with every text in it redacted."""
        if not self._known:
            return report
        fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}  # type: ignore[arg-type]
        texts = {name: self.text(value) for name, value in fields.items() if isinstance(value, str)}
        return dataclasses.replace(report, **texts)  # type: ignore[type-var]
