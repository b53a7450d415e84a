import pytest

from service.core.plan import hardware


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A800", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("H100 500W", "H100-96GB-HBM2e-500W"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("V100-32GB", "V100-SXM-32GB"),
        ("cpu", "cpu"),
    ],
)
def test_a_name_finds_its_gpu(name, found):
    assert hardware.find(name) is hardware.GPUS[found]


def test_what_is_not_known_is_not_guessed():
    assert hardware.find("TPUv4") is None


@pytest.mark.parametrize("gpu", hardware.GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_number_has_a_source_and_the_right_order(gpu):
    assert gpu.source
    assert gpu.peak >= gpu.vector > gpu.bandwidth
    assert gpu.bandwidth >= gpu.nvlink >= gpu.nic > 0
    assert gpu.domain % gpu.node == 0
