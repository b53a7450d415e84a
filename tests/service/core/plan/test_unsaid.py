import pytest

from service.core.plan import unsaid
from service.core.plan.cluster import Cluster
from service.core.plan.layout import Layout
from service.core.plan.shape import Shape
from service.core.plan.stack import STACKS


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (22, 8, (2, 3, 3, 3, 3, 3, 3, 2)),  # embedding and head count as a layer each
        (126, 64, (1, *(2,) * 62, 1)),
        (10, 4, (2, 3, 3, 2)),
        (9, 4, (2, 3, 2, 2)),
        (5, 1, (5,)),
    ],
)
def test_layers_of_stages(layers, stages, expected):
    found = unsaid.stage_layers(layers, stages)
    assert found == expected
    assert sum(found) == layers


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(96, 8, 6), (84, 2, 7), (92, 4, 23), (112, 16, 7), (126, 16, 4), (80, 10, 4), (7, 7, 1)],
)
def test_interleaving_that_nobody_says(layers, pp, expected):
    assert unsaid.interleaving(layers, pp) == expected


@pytest.mark.parametrize(
    ("row", "year"),
    [
        ({"source": "X (arXiv 2104.04473)"}, 2021),
        ({"source": "README (Jul 2024, r0.8)"}, 2024),
        ({"source": "dgxc-benchmarking v25.05.05"}, 2025),
        ({"source": "container 24.07"}, 2024),
        ({"source": "X", "gpu": "A100-80GB"}, 2022),
        ({"source": "X", "gpu": "GB200"}, 2025),
    ],
)
def test_year_of_the_software(row, year):
    assert unsaid.year(row) == year


@pytest.mark.parametrize(
    ("row", "layout", "stack"),
    [
        ({"source": "X (arXiv 2104.04473)"}, Layout(tp=8), "megatron-2021"),
        ({"source": "X (arXiv 2205.05198)"}, Layout(tp=8), "megatron-2022"),
        ({"source": "Zero Bubble PP (arXiv 2401.10241)"}, Layout(pp=8), "megatron-2023"),
        ({"source": "X (arXiv 2407.1)"}, Layout(tp=8), "megatron-core-2024"),
        ({"source": "bigscience"}, Layout(tp=8), "megatron-deepspeed-2022"),
        ({"source": "X 2026", "notes": "TP/P2P overlap off"}, Layout(tp=8), "megatron-core-plain"),
        ({"source": "pytorch/torchtitan", "notes": "async TP; compile"}, Layout(tp=8), "torchtitan-async"),
        ({"source": "pytorch/torchtitan", "notes": "FSDP + torch.compile"}, Layout(zero=3), "torchtitan-2024"),
        ({"source": "pytorch/torchtitan", "notes": "FSDP"}, Layout(zero=3), "torchtitan-eager"),
        ({"source": "X 2025"}, Layout(zero=3), "fsdp"),
        ({"source": "NVIDIA/dgxc-benchmarking v25.05.05"}, Layout(tp=8), "nemo-2025"),
    ],
)
def test_software_of_a_source(row, layout, stack):
    assert unsaid.software(row, layout).name == stack


GPT = Shape(96, 12288, 96, 96, 128, 49152, 51200, 2048, gated=False)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(dp=8, pp=8, tp=8), "none"),
        (Layout(dp=64, pp=8, tp=1), "none"),  # states alone don't fit: nothing would help
        (Layout(dp=8, pp=8, tp=8, micro_batch=16), "full"),
    ],
)
def test_the_least_recomputation_that_may_fit(layout, recompute):
    found = unsaid.least_recompute(GPT, layout, 1024, Cluster.of("H100-80GB", 512), STACKS["megatron-core-2024"])
    assert found.recompute == recompute


@pytest.mark.parametrize(
    ("row", "zero", "sequence_parallel"),
    [
        ({"source": "X (arXiv 2104.1)", "gpu": "A100"}, 0, False),
        ({"source": "X (arXiv 2104.1)", "gpu": "A100", "zero_stage": "1", "seq_parallel": "y"}, 1, True),
        ({"source": "X (arXiv 2404.1)", "gpu": "H100"}, 1, True),
        ({"source": "X (arXiv 2404.1)", "gpu": "H100", "zero_note": "FSDP", "seq_parallel": "n"}, 3, False),
    ],
)
def test_sharding_and_sequence_parallel_by_year(row, zero, sequence_parallel):
    assert unsaid.zero(row) == zero
    assert unsaid.sequence_parallel(row) is sequence_parallel


def test_layers_from_a_size_that_counts_layers_alone():
    row = {"n_params_b": "194", "pp": "6"}
    assert unsaid.layers(row, 14400, 57600) == 78
