"""Compiled blocks compute the same, and a second process finds what the first has compiled."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workers.models.decoder import Decoder, initialise
from workers.models.spec import ModelSpec
from workers.parallel import compiled, recompute

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
LEVELS: tuple[recompute.Recompute, ...] = ("none", "full")
SPEC = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, seq_len=16, vocab_size=64)


def losses(level: recompute.Recompute, enabled: bool) -> tuple[float, list[torch.Tensor]]:
    """The loss, and the gradients of all parameters in float32."""
    model = Decoder(SPEC, SPEC.vocab_size)
    initialise(model, SPEC, 0)
    recompute.apply(model.layers.values(), level)
    compiled.apply(model.layers.values(), enabled)
    tokens = torch.arange(32).view(2, 16) * 7 % SPEC.vocab_size
    loss = model.seams.loss(model(tokens), tokens.roll(1)) / tokens.numel()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def child() -> None:
    """For each level: what differs between compiled and not, and what the compiler found in its caches."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    found = []
    for level in LEVELS:
        counters.clear()
        loss, gradients = losses(level, False)
        other, others = losses(level, True)
        caches = {**counters["inductor"], **counters["aot_autograd"]}
        found.append({
            "loss": abs(loss - other),
            "gradient": max((a - b).abs().max().item() for a, b in zip(gradients, others, strict=True)),
            "largest": max(one.abs().max().item() for one in gradients),
            "graphs": counters["stats"]["unique_graphs"],
            "misses": caches.get("fxgraph_cache_miss", 0) + caches.get("autograd_cache_miss", 0),
            "hits": caches.get("autograd_cache_hit", 0),
        })  # fmt: skip
    print(json.dumps(found))  # noqa: T201


def started(folder: Path) -> list[dict[str, Any]]:
    """What a new process says that has the environment of `folder`."""
    found = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import child; child()"],
        env=os.environ | compiled.environment(folder, 60.0) | {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
def test_compiled_blocks_compute_the_same_and_the_next_process_has_them(tmp_path: Path) -> None:
    for first, second in zip(started(tmp_path), started(tmp_path), strict=True):
        for found in (first, second):
            assert found["graphs"] == 1  # all blocks share it
            assert found["loss"] < 1e-6
            assert found["gradient"] < 1e-6
            assert found["largest"] > 1e-3
        assert first["misses"] > 0
        assert first["hits"] == 0
        assert second["misses"] == 0
        assert second["hits"] > 0


def test_blocks_are_left_alone_unless_enabled() -> None:
    block = nn.Linear(2, 2)
    compiled.apply([block], False)
    assert "forward" not in vars(block)


def test_torch_knows_every_name() -> None:
    """In its sources, as far as they come with it, or in its library: a name that it dropped would do nothing."""
    torch_folder = Path(torch.__file__).parent
    sources = ["_inductor/config.py", "_functorch/config.py", "_inductor/runtime/cache_dir_utils.py",
               "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"]  # fmt: skip
    text = "".join((torch_folder / source).read_text() for source in sources)
    library = torch_folder / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        names = [name for name in compiled.environment(Path("/x"), 60.0) if name.startswith("TORCH")]
        assert [name for name in names if f'"{name}"' not in text and binary.find(f"{name}\0".encode()) < 0] == []


@pytest.mark.parametrize(
    ("interface", "expected"),
    [(None, {}), ("eth0", {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"})],
)
def test_an_interface_is_named_only_when_given(interface: str | None, expected: dict[str, str]) -> None:
    named = compiled.environment(Path("/x"), 60.0, interface)
    assert {name: value for name, value in named.items() if "IFNAME" in name} == expected


def test_everything_is_kept_under_the_folder(tmp_path: Path) -> None:
    settings = compiled.environment(tmp_path, 90.0)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_FR_DUMP_TEMP_FILE"):
        assert Path(settings[name]).is_relative_to(tmp_path)
    assert settings["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "90"
