"""Makes the controller when there is none: a named, detached actor, off the head where the fleet has another node."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.contracts.cluster import CONTROL, ROLE_LABEL
from service.runtime.controller import ControllerActor
from service.runtime.named import CONTROLLER, NAMESPACE
from service.settings import Settings

log = logging.getLogger("phalanx.ensure")


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


def controller(settings: Settings) -> bool:
    """True when there is a controller, made now or before; False when the cluster can't be asked."""
    try:
        ControllerActor.options(
            name=CONTROLLER,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=_where(),
        ).remote(settings)
    except ray.exceptions.RayError as error:
        log.warning("no controller could be made: %s", error)
        return False
    return True


def handle() -> Any:
    """The controller's. Raises ValueError when there is none."""
    return ray.get_actor(CONTROLLER, namespace=NAMESPACE)


def _where() -> NodeAffinitySchedulingStrategy | str:
    """A node of role control, else one that is not the head, and then soft, so that it moves when the node dies.

    Soft is not kept: Ray goes elsewhere also where the node would do (half the time, of a node without CPUs). Where the
    control node has died, nothing can be there, and whoever keeps the controller asks again for another place.
    """
    rows = [row for row in ray.nodes() if row["Alive"]]
    control = [row for row in rows if row.get("Labels", {}).get(ROLE_LABEL) == CONTROL]
    others = [row for row in rows if "node:__internal_head__" not in row.get("Resources", {})]
    chosen = min(control or others, key=lambda row: str(row["NodeID"]), default=None)
    return NodeAffinitySchedulingStrategy(chosen["NodeID"], soft=not control) if chosen else "DEFAULT"
