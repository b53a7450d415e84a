"""`python -m service.rerun RUNTIME`: enters what a job brings along, and does steps of it again (`workers.rerun`).

RUNTIME is JSON; the stretch comes by standard input. Secrets are not looked up: a variable that a job needs for its
storage or its data has to be set here already.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from service.contracts.runtime import Runtime
from service.runtime.environment import Environment


def main(runtime: Runtime, text: str) -> int:
    scratch = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    unfit = Environment().enter(runtime.model_copy(update={"secrets": {}}), scratch)
    if unfit is not None:
        sys.stderr.write(f"{unfit}\n")
        return 2
    from workers import rerun  # after the variables, which torch may read

    return rerun.main(text)


if __name__ == "__main__":
    sys.exit(main(Runtime.model_validate_json(sys.argv[1]), sys.stdin.read()))
