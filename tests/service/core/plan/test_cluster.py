import pytest

from service.core.plan.cluster import Cluster


@pytest.mark.parametrize(
    ("name", "how", "size", "stride", "inside"),
    [
        ("H100-80GB", {}, 8, 1, True),
        ("H100-80GB", {}, 8, 2, False),
        ("H100-80GB", {}, 2, 4, True),
        ("H100-80GB", {}, 16, 1, False),
        ("GB200", {}, 72, 1, True),
        ("GB200", {"domain": 4}, 8, 1, False),
        ("H100-80GB", {"gpus_per_node": 4}, 8, 1, False),
        ("GB200", {"gpus_per_node": 4}, 8, 1, True),
        ("H100-80GB", {}, 1, 512, True),
    ],
)
def test_a_group_is_in_a_domain_where_its_span_is(name, how, size, stride, inside):
    assert Cluster.of(name, 512, **how).in_domain(size, stride) is inside


def test_an_unknown_gpu_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no figures are known of 'TPUv4'; there are .*H100-80GB"):
        Cluster.of("TPUv4", 8)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_of_bandwidth_is_a_share(share):
    with pytest.raises(ValueError, match="cross_rack"):
        Cluster.of("H100-80GB", 8, cross_rack=share)
