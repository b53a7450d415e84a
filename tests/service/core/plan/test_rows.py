import pytest

from service.core.plan import rows
from service.core.plan.columns import Skipped

ROW = {
    "source": "Someone (arXiv 2406.00001)",
    "model": "Llama-70B",
    "layers": "80", "hidden": "8192", "ffn_hidden": "28672", "heads": "64", "kv_heads": "8", "vocab": "128256",
    "seq_len": "8192", "gated_mlp": "y", "gpu": "H100-80GB", "gpus_per_node": "8", "n_gpus": "64",
    "tp": "8", "pp": "4", "vpp": "5", "gbs": "128", "mbs": "1", "recompute": "none", "precision": "bf16",
    "iter_time_s": "14.5",
}  # fmt: skip


def read(**changed: str) -> rows.Case:
    return rows.read(7, {**ROW, **changed})


def test_a_row_is_a_case():
    case = read()
    assert case.number == 7
    assert case.measured_s == 14.5
    assert (case.layout.dp, case.layout.tp, case.layout.pp, case.layout.vpp) == (2, 8, 4, 5)
    assert case.layout.schedule == "interleaved_1f1b"
    assert case.layout.stage_layers == (4,) * 20
    assert case.cluster.gpus == 64
    assert case.stack.name == "megatron-core-2024"
    assert case.out_of_scope == ""


TOKENS = 128 * 8192
MODEL_FLOPS = read().shape.flops() * TOKENS


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({"iter_time_s": "", "tokens_per_s_per_gpu": "1000"}, TOKENS / 1000 / 64),
        ({"iter_time_s": "", "tflops_per_gpu": "400"}, MODEL_FLOPS / 64 / 400e12),
        ({"iter_time_s": "", "mfu": "40"}, MODEL_FLOPS / 64 / (0.4 * 989e12)),
        ({"tokens_per_s_per_gpu": "1000", "mfu": "40"}, 14.5),  # what was timed leads
    ],
)
def test_seconds_of_a_step(changed, seconds):
    assert read(**changed).measured_s == pytest.approx(seconds)


def test_hardware_flops_count_the_layers_once_more():
    """A row of arXiv 2104.04473, table 1: 145.6 billion parameters, 148 TFLOP/s by its own formula."""
    case = rows.read(
        0,
        {
            "source": "Narayanan et al. SC21 (arXiv 2104.04473)", "layers": "80", "hidden": "12288", "heads": "96",
            "vocab": "51200", "seq_len": "2048", "gated_mlp": "n", "gpu": "A100-80GB", "n_gpus": "1536", "tp": "8",
            "pp": "8", "vpp": "2", "gbs": "2304", "mbs": "2", "recompute": "full", "precision": "fp16",
            "tflops_per_gpu": "148", "notes": "TFLOP/s = F/(n*t) with F=96BslH^2(1+s/6h+V/16lh)",
        },
    )  # fmt: skip
    formula = 96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    assert case.measured_s == pytest.approx(formula / 1536 / 148e12, rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gpu": "TPUv4"}, "no figures are known of a TPUv4"),
        ({"gpu": ""}, "GPU without a name"),
        ({"hidden": ""}, "hidden is not given"),
        ({"seq_len": ""}, "seq_len is not given"),
        ({"gbs": ""}, "gbs is not given"),
        ({"n_gpus": ""}, "n_gpus is not given"),
        ({"n_gpus": "60"}, "does not divide 60 GPUs"),
        ({"tp": "", "zero_stage": ""}, "the layout is not given"),
        ({"iter_time_s": ""}, "neither a step's time nor memory"),
        ({"outcome": "OOM"}, "ran out of memory"),
        ({"layers": ""}, "layers is not given"),
        ({"precision": "nvfp4"}, "precision nvfp4 is not modelled"),
        ({"vocab": ""}, "vocab is not given"),
    ],
)
def test_why_a_row_is_skipped(changed, reason):
    with pytest.raises(Skipped, match=reason):
        read(**changed)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"precision": "fp8"}, "precision fp8"),
        ({"precision": ""}, ""),  # 16 bits
        ({"experts": "8", "experts_active": "2", "expert_ffn_hidden": "28672"}, "experts"),
        ({"tp": "1", "pp": "1", "vpp": ""}, "neither tensor nor pipeline parallel"),
    ],
)
def test_what_the_bars_leave_out(changed, reason):
    assert read(**changed).out_of_scope == reason


@pytest.mark.parametrize(("unit", "scale"), [("published GiB, not GB", 1024**3), ("by nvidia-smi", 1e9)])
def test_memory_in_the_unit_of_the_notes(unit, scale):
    assert read(mem_gb_per_gpu="50", notes=unit).measured_bytes == 50 * scale


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("NVIDIA/dgxc-benchmarking v25.04.02", "dgxc-benchmarking"),
        ("NVIDIA/dgxc-benchmarking v25.05.05", "dgxc-benchmarking"),
        ("pytorch/torchtitan docs/performance.md", "torchtitan"),
        ("Korthikanti et al. (arXiv 2205.05198)", "arXiv 2205.05198"),
        ("Korthikanti et al. 2022", "arXiv 2205.05198"),
        ("a paper of tomorrow", "a paper of tomorrow"),
    ],
)
def test_sources_of_one_software_are_one_family(source, family):
    assert rows.family(source) == family
