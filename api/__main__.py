"""`python -m api`: serve the API until SIGTERM or SIGINT. `service.settings` reads the environment for it."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys

from api import logs, serve
from service.contracts import errors
from service.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser("python -m api", description="Serve the Phalanx API.")
    parser.add_argument("--port", type=int, help="instead of PHALANX_API_PORT; 0: a free one")
    port = parser.parse_args().port
    logs.configure()
    for number in (signal.SIGTERM, signal.SIGINT):  # what the server hands on once it has ended in order
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = Settings.read()
        serve.run(settings if port is None else dataclasses.replace(settings, api_port=port))
    except errors.PhalanxError as error:
        sys.stderr.write(f"phalanx api: {error.message}{'; ' if error.hint else ''}{error.hint}\n")
        return 2 if isinstance(error, errors.UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
