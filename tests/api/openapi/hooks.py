"""For schemathesis: streams that end with their job are left out."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if case.query:
        case.query.pop("follow", None)
