"""The training under Ray Train v2's TorchTrainer: eight workers on four nodes of two slots, and a spare node beside.

Ray notices the death of a node as fast as in our own local fleet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}

from service import roster
from service.local import HEALTH, OBJECT_STORE_BYTES
from tests.bench import recovery_rank
from tests.bench.recovery_fault import VICTIM, Done, Fault, again

os.environ |= {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
NODES, SLOTS = 5, 2


def train(config: Mapping[str, str]) -> None:
    """A worker's part. The group that TorchTrainer made gives way to the trainer's own, which meets at its store."""
    import ray
    import torch.distributed as dist

    kept = dist.distributed_c10d._get_default_store()  # rank 0 hosts it
    dist.destroy_process_group()
    recovery_rank.run(
        Path(config["folder"]),
        {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        ray.util.get_node_ip_address(),
    )
    del kept


class RayTrain:
    def __init__(self, folder: Path, cluster: Any) -> None:
        self.folder, self.cluster = folder, cluster
        self.nodes: dict[str, Any] = {}
        self.lost: list[str] = []
        for number in range(NODES):
            self.join(f"127.0.78.{number + 2}")
        threading.Thread(target=self.fit, name="fit", daemon=True).start()

    def join(self, address: str) -> None:
        self.nodes[address] = self.cluster.add_node(
            num_cpus=SLOTS, node_ip_address=address, object_store_memory=OBJECT_STORE_BYTES
        )

    def fit(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        TorchTrainer(
            train,
            train_loop_config={"folder": str(self.folder)},
            scaling_config=ScalingConfig(num_workers=8),
            run_config=RunConfig(
                name="recovery", storage_path=str(self.folder / "ray"), failure_config=FailureConfig(max_failures=-1)
            ),
        ).fit()

    def steps(self) -> Sequence[Done]:
        return recovery_rank.steps(self.folder)

    def mend(self) -> None:
        while self.lost:
            self.join(self.lost.pop())

    def kill(self, fault: Fault) -> None:
        pid, address = recovery_rank.newest(self.folder, VICTIM)
        if fault == "rank":
            os.kill(pid, signal.SIGKILL)
            return
        node = self.nodes.pop(address)
        self.lost.append(address)
        roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
        family = [process for root in roots for process in roster.family(root)]
        self.cluster.remove_node(node, allow_graceful=False)
        roster.end(family)

    def redone(self, broken: int) -> int:
        return again(self.steps(), broken)

    def parts(self, broken: int) -> Mapping[str, float]:
        return {}


@contextlib.contextmanager
def started(folder: Path) -> Iterator[RayTrain]:
    import ray
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 0, "node_ip_address": "127.0.78.1", "include_dashboard": False, "temp_dir": str(folder / "temp"),
        "object_store_memory": OBJECT_STORE_BYTES,
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False)
    yield RayTrain(folder, cluster)
