import pytest

from service.core.plan import layout as layouts
from workers.models.spec import ModelSpec
from workers.spec import ParallelLayout

TINY = ModelSpec.model_validate({"preset": "tiny"})


@pytest.mark.parametrize("batch", [7, 8, 12, 64])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelLayout(dp=3),
        ParallelLayout(dp=2, pp=2),
        ParallelLayout(dp=1, pp=4, schedule="gpipe"),
        ParallelLayout(dp=3, pp=2, vpp=2, schedule="interleaved_1f1b"),
        ParallelLayout(dp=2, pp=2, vpp=2, schedule="zbv"),
        ParallelLayout(dp=2, pp=4, vpp=2, schedule="interleaved_zb"),
    ],
    ids=str,
)
def test_counts_the_micro_batches_that_the_engine_runs(parallel, batch):
    assert layouts.of(parallel, TINY, batch).micro_batches(batch) == max(parallel.runs(batch))


def test_weights_of_replicas_count():
    parallel = ParallelLayout(dp=2, replica_weights=(3.0, 1.0))
    assert layouts.of(parallel, TINY, 16).micro_batches(16) == max(parallel.runs(16)) > 8


@pytest.mark.parametrize(
    ("engine", "named"), [("none", "none"), ("selective", "cheap"), ("inner", "inner"), ("full", "full")]
)
def test_names_of_recomputation(engine, named):
    assert layouts.of(ParallelLayout(recompute=engine), TINY, 8).recompute == named


def test_sequence_parallel_is_as_the_engine_decides():
    assert layouts.of(ParallelLayout(tp=2), TINY, 8).sequence_parallel
    assert not layouts.of(ParallelLayout(tp=2, sequence_parallel=False), TINY, 8).sequence_parallel
