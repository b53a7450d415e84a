from __future__ import annotations

import pytest
import torch

from workers.pulse import Pulse

pytestmark = pytest.mark.torch


def test_a_beat_takes_as_long_as_its_work() -> None:
    pulse = Pulse(torch.device("cpu"), every_s=0.0)
    beats = [pulse.beat() for _ in range(5)]
    assert all(beat is not None and 0 < beat < 1 for beat in beats)
    pulse.matrix = torch.ones(1024, 1024) / 1024
    pulse.out = torch.empty_like(pulse.matrix)
    slow = [pulse.beat() for _ in range(5)]
    assert min(beat for beat in slow if beat) > 4 * min(beat for beat in beats if beat)


def test_it_beats_no_more_often_than_asked() -> None:
    pulse = Pulse(torch.device("cpu"), every_s=3600.0)
    assert pulse.beat() is not None
    assert pulse.beat() == pulse.beat()
