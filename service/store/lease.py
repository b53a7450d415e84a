"""Who may act: one lease, held by one controller at a time, whose epoch grows with every change of hands.

Functions of a connection inside a write transaction. Time is the database's clock, so that controllers on
machines with different clocks agree. A holder keeps its epoch until another takes the lease or it is
released, also past the expiry: nobody has acted in between. A holder's name must be one process's own.
"""

from __future__ import annotations

import sqlalchemy as sa

from service.contracts.errors import Fenced
from service.store import models
from service.store.database import now

_lease = models.lease


def acquire(connection: sa.Connection, holder: str, ttl_s: float) -> int | None:
    """The epoch when the lease is free, expired or already `holder`'s; None when another holds it."""
    ours = _lease.c.holder == holder
    taken = connection.execute(
        sa.update(_lease)
        .where(sa.or_(ours, _lease.c.holder == "", _lease.c.expires_at <= now()))
        .values(
            epoch=sa.case((ours, _lease.c.epoch), else_=_lease.c.epoch + 1),
            holder=holder,
            expires_at=now() + ttl_s,
        )
    )
    return connection.execute(sa.select(_lease.c.epoch)).scalar_one() if taken.rowcount else None


def renew(connection: sa.Connection, holder: str, epoch: int, ttl_s: float) -> bool:
    """False: another has taken the lease, or it was released."""
    renewed = connection.execute(_held(holder, epoch).values(expires_at=now() + ttl_s))
    return renewed.rowcount == 1


def release(connection: sa.Connection, holder: str, epoch: int) -> None:
    """Free the lease if it is still `holder`'s under this epoch."""
    connection.execute(_held(holder, epoch).values(holder="", expires_at=0.0))


def holder(connection: sa.Connection) -> tuple[str, int]:
    """(who holds the lease, expired or not; empty: nobody, its epoch)."""
    row = connection.execute(sa.select(_lease.c.holder, _lease.c.epoch)).one()
    return row.holder, row.epoch


def check(connection: sa.Connection, epoch: int) -> None:
    """Fenced unless the lease is held under `epoch`; it can't change hands until the transaction ends."""
    held = connection.execute(sa.select(_lease.c.epoch, _lease.c.holder).with_for_update()).one()
    if held.holder == "":
        raise Fenced(f"epoch {epoch} of the lease was released", hint="acquire the lease again")
    if held.epoch != epoch:
        raise Fenced(f"the lease is at epoch {held.epoch}, held by {held.holder}; this is epoch {epoch}")


def _held(holder: str, epoch: int) -> sa.Update:
    return sa.update(_lease).where(_lease.c.holder == holder, _lease.c.epoch == epoch)
