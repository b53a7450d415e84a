"""What a job that is forgotten had in storage."""

from __future__ import annotations

import logging

from service.contracts import errors
from workers.checkpoint.storage import Storage

log = logging.getLogger("phalanx.api")


def emptied(folder: str) -> None:
    """ClusterError where storage can't be written; what is left may be removed by hand."""
    try:
        storage = Storage.open(folder)
        storage.delete("")
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("not removed", extra={"data": {"folder": folder, "error": str(error)}})
        hint = f"the job is forgotten; remove {folder} by hand"
        raise errors.ClusterError(f"storage can't be written: {error}", hint=hint) from error
