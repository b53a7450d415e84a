"""Jobs followed into trackers, a turn of each after the other, until they are over. Knows no library."""

from __future__ import annotations

import time
from collections.abc import Sequence

from api import turns
from api.client import Client
from api.tracking import tracker
from api.tracking.tracker import Tracker
from api.wire import PATIENCE_S, Patience
from service.contracts import errors

POLL_S = 1.0


class Following:
    """One job and one tracker."""

    def __init__(self, client: Client, uid: str, into: Tracker) -> None:
        self._client, self._uid, self._into = client, uid, into
        self._patience = Patience(PATIENCE_S)
        self.job = client.get(uid)
        self.cursor = into.begin(self.job)
        self.steps = 0  # written

    def turn(self) -> bool:
        """Write what is new; whether there was any. What fails for a while is tried again."""
        try:
            turn = turns.look(self._client, self._uid, self.cursor)
            self.job = turn.job
            if not turn.events and not turn.steps:
                self._patience.found()
                return False
            self._into.write(tracker.batch(turn))
        except errors.ClusterError as error:
            self._patience.lose(error, time.monotonic())
            return False
        self._patience.found()
        self.cursor = turn.cursor
        self.steps += len(turn.steps)
        return True

    def end(self) -> None:
        self._into.end(self.job if self.job.phase.terminal else None)


def run(found: Sequence[Following], once: bool = False) -> None:
    """Until each job is over and all of it written; `once`: until what there is now is."""
    going = list(found)
    try:
        while going:
            news = [one for one in going if one.turn()]
            going = [one for one in going if one in news or not (once or one.job.phase.terminal)]
            if going and not news:
                time.sleep(POLL_S)
    finally:
        for one in found:
            one.end()
