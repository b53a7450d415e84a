"""The errors of Phalanx: one root, each with a published code and a hint at what would work."""

from __future__ import annotations


class PhalanxError(Exception):
    """Root of all. `code` is published, `hint` says what would work, `field` names the input at fault."""

    code = "internal"

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.field = message, hint, field

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.field)


def _rebuild(kind: type[PhalanxError], message: str, hint: str, field: str) -> PhalanxError:
    return kind(message, hint=hint, field=field)


class UserError(PhalanxError):
    """What was asked for can't be done as asked."""

    code = "invalid"


class NotFound(UserError):
    code = "not_found"


class Conflict(UserError):
    code = "conflict"


class Changed(UserError):
    """It is not any more what the request takes it for."""

    code = "changed"


class Unconditional(UserError):
    """A change that must name what it takes the thing for did not."""

    code = "unconditional"


class Unauthorized(UserError):
    code = "unauthorized"


class Forbidden(UserError):
    """He is known, and may not."""

    code = "forbidden"


class TooMany(UserError):
    """He asks more often than he may."""

    code = "too_many"


class ClusterError(PhalanxError):
    """The cluster failed to do what it should; trying again may work."""

    code = "cluster"


class StoreUnavailable(ClusterError):
    code = "store_unavailable"


class Fenced(ClusterError):
    """Another controller holds the lease: this one must not act."""

    code = "fenced"


class PlacementRefused(ClusterError):
    """The layout does not fit the fleet now; the message counts what is missing."""

    code = "placement_refused"
