"""`python -m service`: keeps a controller alive on a Ray cluster. Runs beside the head, and anywhere else.

It only makes the controller again whenever there is none; who acts is the lease's business, so that any number of these
loops may run.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading

from service.settings import Settings

log = logging.getLogger("phalanx.ensure")

CHECK_S = 1.0


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = Settings.read()
    over = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: over.set())
    from service.runtime import ensure

    with ensure.connected(settings.ray_address):
        while not over.wait(CHECK_S if ensure.controller(settings) else 0.1):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
