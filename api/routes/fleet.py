"""The nodes, as the controller last saw them."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter

from api.door import Given
from api.views import Nodes, NodeView

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/nodes")
def nodes(given: Given) -> Nodes:
    return Nodes(nodes=tuple(NodeView(**dataclasses.asdict(row)) for row in given.store.nodes()))
