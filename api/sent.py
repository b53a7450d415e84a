"""What a request's body is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from workers.models.spec import without_truth


class Sent(BaseModel):
    """Closed, and strict: an unknown field is an error, and so is a number that is not finite, or `true`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, known: ValidationInfo) -> Any:
        return without_truth(cls, value, known)
