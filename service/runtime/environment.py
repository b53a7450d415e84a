"""The environment of a rank's process: what its job brings along, in place before anything of the job is imported."""

from __future__ import annotations

import os
from pathlib import Path

from service.contracts.runtime import Runtime
from service.runtime import own_code, references
from service.runtime.redaction import Redaction


class Environment:
    def __init__(self) -> None:
        self.redaction = Redaction()

    def enter(self, runtime: Runtime, scratch: Path) -> Exception | None:
        """Variables, secrets, own code. What of it can't be had here: the process is there all the same, and says so
        when it is to work."""
        try:
            os.environ.update(runtime.env)
            for name, reference in runtime.secrets.items():
                os.environ[name] = value = references.value(reference)
                self.redaction.learn([value])
            if runtime.working_dir is not None:
                own_code.enter(runtime.working_dir, runtime.digest or "", scratch / "code")
        except Exception as error:  # storage libraries have their own; whatever it is, it is the job's to know
            return error
        return None
