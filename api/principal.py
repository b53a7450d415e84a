"""Who asks, and what he may. Knows no HTTP beyond the words of its methods."""

from __future__ import annotations

import dataclasses
import re

from service.contracts import errors
from service.store.records import Scope

SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
"""Each may what the ones before it may."""

READS = frozenset({"GET", "HEAD", "OPTIONS"})

ADMIN = re.compile(r"/v1/(projects|queues|tokens|hooks|audit|nodes)(/.*|:.*)?")
"""Paths on which a change is the operator's; tokens, projects and the audit log are for his eyes alone as well."""
PRIVATE = re.compile(r"/v1/(projects|tokens|hooks|audit)(/.*|:.*)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """`project`: the only one that is his; None: all of them."""

    name: str
    scope: Scope
    project: str | None = None

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def sees(self, project: str) -> bool:
        return self.project in (None, project)

    def works_in(self, project: str | None) -> str:
        """The project that a new job is in. NotFound for one that is not his: nobody learns which there are."""
        if project is None:
            return self.project or "default"
        if not self.sees(project):
            raise errors.NotFound(f"there is no project {project}", field="project")
        return project


ROOT = Principal("root", "admin")
"""Whoever holds the token of the API's home."""


def needed(method: str, path: str) -> Scope:
    """What a request needs, by its method and path alone: no route can be forgotten."""
    reads = method in READS
    if (PRIVATE if reads else ADMIN).fullmatch(path):
        return "admin"
    return "read" if reads or path == "/v1/plan" else "submit"
