"""An S3 server on this machine, where its package is installed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from workers.checkpoint.storage import Storage


@contextlib.contextmanager
def served() -> Iterator[tuple[str, dict[str, str]]]:
    """(URI of an empty bucket, the environment that leads to it), which this process has too."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        forget()
        bucket = f"bucket-{uuid.uuid4().hex}"  # one process's servers have their buckets in common
        Storage.open(f"s3://{bucket}").fs.mkdir(bucket)
        yield f"s3://{bucket}", environment
    server.stop()


def forget() -> None:
    """File systems that lead to another server: fsspec keeps one for each set of options, not of environment."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
