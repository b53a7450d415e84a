"""What the operator allows. Knows no environment: the settings say it."""

from __future__ import annotations

import dataclasses

from api.oidc import Trust

ANY = "*"


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    allowed_roots: tuple[str, ...] = ()  # where besides the storage root checkpoints may be kept
    models: tuple[str, ...] = ()  # packages and modules that a job's own model may come from
    trust: Trust | None = None  # whose tokens open the API besides its own
    per_s: float = 0.0  # requests of each token; 0: no bound
    own_code: tuple[str, ...] = ()  # projects whose fleet is their own; * stands for all
    secrets: tuple[str, ...] = ()  # references that jobs may name; {project} is theirs, and * or / at an end goes on

    def brings_code(self, project: str) -> bool:
        return ANY in self.own_code or project in self.own_code

    def names_secret(self, project: str, reference: str) -> bool:
        """Whether a job of this project may have what the reference stands for."""
        for pattern in self.secrets:
            known = pattern.replace("{project}", project)
            if known.endswith(("*", "/")):
                if reference.startswith(known.removesuffix("*")):
                    return True
            elif reference == known:
                return True
        return False
