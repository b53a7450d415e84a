"""Object stores on this machine: moto's, in the process, and SeaweedFS, a real server that keeps real conditions."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from workers.checkpoint.storage import Storage

KEY, SECRET = "key", "secret-of-the-tests"
READY_S = 60.0
HEADROOM = 10_000  # weed's gRPC ports are so far above its others


@contextlib.contextmanager
def served(kind: str = "moto") -> Iterator[tuple[str, dict[str, str]]]:
    """(URI of an empty bucket, the environment that leads to it), which this process has too."""
    with SERVERS[kind]() as url:
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            forget()
            bucket = f"bucket-{uuid.uuid4().hex}"  # one process's servers have their buckets in common
            Storage.open(f"s3://{bucket}").fs.mkdir(bucket)
            yield f"s3://{bucket}", environment
        forget()


def forget() -> None:
    """File systems that lead to another server: fsspec keeps one for each set of options, not of environment."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextlib.contextmanager
def _moto() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@contextlib.contextmanager
def _seaweed() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="weed-") as folder:
        identity = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        config = Path(folder) / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = dict(zip(("s3.port", "master.port", "volume.port", "filer.port"), _free_ports(4), strict=True))
        options = {
            "dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": str(config),
            "master.volumeSizeLimitMB": 64, "volume.max": 50, "master.telemetry": "false", **ports,
        }  # fmt: skip
        command = [str(Path(sys.executable).parent / "weed"), "server", "-filer", "-s3"]
        command += [f"-{name}={value}" for name, value in options.items()]
        with (Path(folder) / "weed.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
            try:
                _wait_ready(process, ports["s3.port"], Path(folder) / "weed.log")
                yield f"http://127.0.0.1:{ports['s3.port']}"
            finally:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    """Whose neighbours for gRPC can be ports too."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            if (port := taken.getsockname()[1]) + HEADROOM < 65536:
                ports.append(port)
        return ports


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until it answers a request, which it does once its parts have found each other."""
    client = functools.partial(fsspec.filesystem, "s3", skip_instance_cache=True, use_listings_cache=False)
    deadline = time.monotonic() + READY_S
    while True:
        try:
            client(key=KEY, secret=SECRET, endpoint_url=f"http://127.0.0.1:{port}").mkdir(f"ready-{uuid.uuid4().hex}")
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text()[-2000:]) from error
            time.sleep(0.2)


SERVERS = {"moto": _moto, "seaweed": _seaweed}
