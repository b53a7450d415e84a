"""Numbers in the order of commits: whoever reads up to n never finds a smaller number later.

A database's own sequence hands out numbers that may commit in another order, and a reader that keeps a cursor
would miss the late one. Here the counter's row stays locked from the drawing until the transaction ends. Draw
in the order jobs, events, log_chunks, or two transactions may wait for each other.
"""

from __future__ import annotations

import sqlalchemy as sa

from service.store import models

_value = models.counters.c.value
_ADVANCE = (
    sa.update(models.counters)
    .where(models.counters.c.name == sa.bindparam("counter"))
    .values(value=_value + sa.bindparam("count"))
    .returning(_value)
)


def draw(connection: sa.Connection, name: str, count: int = 1) -> range:
    """The next `count` numbers."""
    last: int = connection.execute(_ADVANCE, {"counter": name, "count": count}).scalar_one()
    return range(last - count + 1, last + 1)
