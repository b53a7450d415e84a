"""Finds what a reference to a secret stands for, on the node where it is asked."""

from __future__ import annotations

import os
from pathlib import Path

from service.contracts.errors import ClusterError

MOUNTED = Path("/etc/phalanx/secrets")
"""Kubernetes secrets are mounted here: a folder each, with a file for each of their keys."""


def value(reference: str, mounted: Path = MOUNTED) -> str:
    """Of env:NAME, file:/PATH or kubernetes:SECRET/KEY; without the line's end of a file. ClusterError: it is not
    there."""
    kind, _, where = reference.partition(":")
    if kind == "env" and (found := os.environ.get(where)):
        return found
    path = {"file": Path(where), "kubernetes": mounted / where}.get(kind)
    try:
        if path is not None and (found := path.read_text().strip()):
            return found
    except (OSError, ValueError) as error:
        raise _missing(reference, type(error).__name__) from None  # its text may hold what was read
    raise _missing(reference, "nothing is there")


def _missing(reference: str, why: str) -> ClusterError:
    hint = f"set it on every node, or where the controller runs; {MOUNTED} is where Kubernetes secrets are mounted"
    return ClusterError(f"the secret {reference} can't be had: {why}", hint=hint)
