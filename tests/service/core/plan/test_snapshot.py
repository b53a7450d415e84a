import pytest

from service.core.plan import shape, snapshot
from service.core.plan.cluster import Cluster
from service.core.plan.layout import Layout
from workers.models.spec import ModelSpec

LLAMA_70B = shape.of(ModelSpec.model_validate({"preset": "llama3-70b"}))


def test_all_ranks_have_the_state_between_them():
    found = snapshot.of(LLAMA_70B, Layout(dp=8, tp=8), Cluster.of("H100-80GB", 64))
    assert 64 * found.gpu_bytes == pytest.approx(12 * 70.55e9, rel=0.01)
    assert found.node_bytes == pytest.approx(8 * found.gpu_bytes)
    assert found.copy_s == pytest.approx(found.gpu_bytes / 50e9)


def test_copies_of_shards_cost_more():
    cluster = Cluster.of("H100-80GB", 64)
    once, twice = (snapshot.of(LLAMA_70B, Layout(dp=8, tp=8, replicate=copies), cluster) for copies in (1, 2))
    assert twice.gpu_bytes == pytest.approx(2 * once.gpu_bytes)


def test_the_share_falls_with_the_interval():
    found = snapshot.of(LLAMA_70B, Layout(dp=8, tp=8), Cluster.of("H100-80GB", 64))
    assert found.share(10.0, 1) == pytest.approx(10 * found.share(10.0, 10)) == pytest.approx(found.copy_s / 10)
