"""What agents say waits bounded while the store is away, and nothing of it is lost."""

from __future__ import annotations

import pytest

from service.runtime.outbox import AT_ONCE, Outbox
from service.runtime.reign import QUEUED, Deliveries, Heard

pytestmark = pytest.mark.ray

AGENT = ("job", 1, "n0")


def test_no_more_than_a_few_deliveries_of_an_agent_wait() -> None:
    deliveries = Deliveries()
    assert [deliveries.enter(AGENT) for _ in range(QUEUED + 3)] == [True] * QUEUED + [False] * 3
    assert deliveries.enter(("job", 1, "n1"))  # each agent has its own
    deliveries.leave(AGENT)
    assert deliveries.enter(AGENT)


def test_what_was_turned_away_is_told_again_and_heard_once() -> None:
    outbox, deliveries, heard = Outbox(), Deliveries(), []
    for number in range(3 * AT_ONCE):
        outbox.say(1, f"word {number}")
    while outbox.waiting():
        ((attempt, said),) = outbox.waiting()
        assert len(said) <= AT_ONCE
        for _ in range(2):  # the answer to the first was lost
            heard += deliveries.fresh(Heard(AGENT, said))
        deliveries.commit()
        outbox.confirm(attempt, deliveries.committed(AGENT))
    assert heard == [f"word {number}" for number in range(3 * AT_ONCE)]
