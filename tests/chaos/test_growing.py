"""Ray's autoscaler makes the nodes that are asked for, and takes them away when nobody wants them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.local import OBJECT_STORE_BYTES
from tests.chaos import net
from tests.chaos.net import CORE, Net

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

HEAD_ID = "f" * 51 + "00000"  # that the provider of nodes which are processes expects
ROOT = Path(__file__).parents[2]
PORT = 6379
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"  # nodes that are processes
CONFIG = {
    "cluster_name": "growing", "max_workers": 3, "idle_timeout_minutes": 0.05, "head_node_type": "ray.head.default",
    "provider": {"type": "external", "module": PROVIDER, "launch_multiple": True, "head_node_id": HEAD_ID},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 2, "object_store_memory": OBJECT_STORE_BYTES}, "node_config": {}, "min_workers": 0,
            "max_workers": 3,
        },
    },
    **{f"{which}setup_commands": [] for which in ("", "head_", "worker_")},
    **{name: [] for name in ("initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{which}_start_ray_commands": [] for which in ("head", "worker")},
    "auth": {}, "docker": {}, "file_mounts": {}, "upscaling_speed": 1.0,
}  # fmt: skip


@pytest.fixture
def host() -> Iterator[Net]:
    if reason := net.missing():
        pytest.skip(reason)
    made = Net({CORE: ["head"]})
    yield made
    made.remove()


def test_nodes_come_and_go_as_they_are_asked_for(host: Net, tmp_path: Path) -> None:
    config, address = tmp_path / "autoscaler.json", host.addresses["head"]
    config.write_text(json.dumps(CONFIG))
    environment = {
        **os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=f"{host.prefix}-") as temp:
        head = (
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--port", str(PORT), "--num-cpus", "0",
            "--node-ip-address", address, "--temp-dir", temp, "--object-store-memory", str(OBJECT_STORE_BYTES),
            "--include-dashboard", "false", "--autoscaling-config", str(config), "--disable-usage-stats",
        )  # fmt: skip
        ask = (sys.executable, "-m", "tests.chaos.growing", f"{address}:{PORT}")
        said = ""
        try:
            for command in (head, ask):
                done = subprocess.run(
                    host.command("head", *command), env=environment, cwd=ROOT, capture_output=True, text=True,
                    timeout=150, check=False,
                )  # fmt: skip
                said = done.stdout
                assert done.returncode == 0, f"{done.stderr[-2000:]}\n{_monitor(Path(temp))}"
        finally:
            host.end("head")
    assert said.split() == ["4", "0"]


def _monitor(temp: Path) -> str:
    """The end of what the autoscaler said."""
    logs = sorted(temp.glob("session_*/logs/monitor.*"))
    return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if not log.parent.parent.is_symlink())
