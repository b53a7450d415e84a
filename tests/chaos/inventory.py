"""`python -m tests.chaos.inventory ADDRESS`: what a Ray cluster holds of Phalanx's, as one line of JSON.

A process of its own, run on a host of the cluster: whoever asks stays free of Ray, and bounds how long it may take.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.util.placement_group import placement_group_table

from service.runtime import ensure


def main() -> int:
    with ensure.connected(sys.argv[1]):
        actors = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
        groups = [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
    sys.stdout.write(json.dumps({"actors": sorted(actors), "groups": sorted(groups)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
