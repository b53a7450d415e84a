import pytest

from service.core.plan import claims


@pytest.mark.parametrize(
    ("claim", "agreed", "computed"),
    [
        (claims.filled_pipeline, False, (15 / 31, 15 / 79)),
        (claims.adam_bytes, True, (840e9,)),
        (claims.activations_in_flight, False, (1.0, 1 / 8)),
    ],
)
def test_arithmetic(claim, agreed, computed):
    found = claim()
    assert found.agreed is agreed
    assert found.computed == pytest.approx(computed)


def test_every_claim_of_the_literature_has_its_line():
    lines = [claim.line for claim in claims.every()]
    assert len(lines) == len(set(lines)) == 7
    assert all(": agreed; " in line or ": disputed; " in line for line in lines)
    assert all(any(sign.isdigit() for sign in line.split("; ")[1]) for line in lines)


def test_a_wrong_mapping_is_worse_the_more_nodes_it_takes():
    two, eight = claims.wrong_mapping().computed
    assert 0 < two < eight


def test_states_fall_with_every_zero_stage():
    found = claims.zero_under_pipelines().computed
    assert list(found) == sorted(found, reverse=True)
