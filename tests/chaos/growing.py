"""`python -m tests.chaos.growing ADDRESS`: what an autoscaler makes of what is asked of it, in two lines of CPUs."""

from __future__ import annotations

import sys

import ray

from service.core.demand import Bundle
from service.runtime import growth
from service.runtime.growth import Wanted
from tests.e2e.world import until

SCALED_S = 60.0
ASKED: tuple[dict[Bundle, int], ...] = ({("cpu", 2): 2}, {})


def main(address: str) -> None:
    ray.init(address, log_to_driver=False)
    for asked in ASKED:
        wanted = Wanted(asked)
        growth.request(wanted)
        cpus = sum(slots for _, slots in wanted.elements())
        until(lambda cpus=cpus: ray.cluster_resources().get("CPU", 0) == cpus, f"{cpus} CPUs", SCALED_S)
        sys.stdout.write(f"{cpus}\n")


if __name__ == "__main__":
    main(sys.argv[1])
