"""What a job brings along for its ranks: variables, references to secrets, own code. Never a secret itself."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from workers.models.spec import Spec

NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
KUBERNETES = r"kubernetes:[a-z0-9][a-z0-9.-]{0,252}/[A-Za-z0-9._-]{1,253}"
REFERENCE = rf"^(env:[A-Za-z_][A-Za-z0-9_]{{0,127}}|file:/[^\x00]+|{KUBERNETES})$"

EnvName = Annotated[str, Field(pattern=NAME)]
EnvValue = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Reference = Annotated[str, Field(max_length=1000, pattern=REFERENCE)]
"""Where a secret is found: env:NAME, file:/PATH, or kubernetes:SECRET/KEY, which is mounted there as a file."""

_TELLING = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)


class Runtime(Spec):
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, max_length=64, description="variables of every rank; secrets go into `secrets`"
    )
    secrets: dict[EnvName, Reference] = Field(
        default_factory=dict,
        max_length=64,
        description="variable of every rank -> where each node finds its value: env:NAME, file:/PATH or "
        "kubernetes:SECRET/KEY",
    )
    working_dir: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="URI of a zip archive of own code: ranks stand in it, and import from it",
    )
    digest: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the archive, as the service found it"
    )

    @model_validator(mode="after")
    def _sound(self) -> Runtime:
        if twice := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{twice[0]} stands in env and in secrets")
        for name in self.env:
            if _TELLING.search(name):
                raise ValueError(f"env.{name} looks like a secret, and a job is shown to others: name it in secrets")
        for name, reference in self.secrets.items():
            if ".." in re.split(r"[:/]", reference):
                raise ValueError(f"secrets.{name}: {reference} has '..' in it")
        return self
