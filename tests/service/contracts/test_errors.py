from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from service.contracts import errors


def family(root: type[errors.PhalanxError]) -> Iterator[type[errors.PhalanxError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from family(kind)


KINDS = tuple(family(errors.PhalanxError))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.deepcopy])
def test_all_of_an_error_crosses_a_process(kind: type[errors.PhalanxError], again: object) -> None:
    made = again(kind("two of three", hint="take two", field="resources.slots"))  # type: ignore[operator]
    assert type(made) is kind
    assert str(made) == made.message == "two of three"
    assert (made.hint, made.field) == ("take two", "resources.slots")


def test_each_class_has_a_code_of_its_own() -> None:
    codes = [kind.__dict__["code"] for kind in KINDS]
    assert len(set(codes)) == len(codes) == 13


@pytest.mark.parametrize(
    ("kind", "whose"),
    [
        (errors.NotFound, errors.UserError),
        (errors.Conflict, errors.UserError),
        (errors.Changed, errors.UserError),
        (errors.Unconditional, errors.UserError),
        (errors.Unauthorized, errors.UserError),
        (errors.Forbidden, errors.UserError),
        (errors.TooMany, errors.UserError),
        (errors.StoreUnavailable, errors.ClusterError),
        (errors.Fenced, errors.ClusterError),
        (errors.PlacementRefused, errors.ClusterError),
    ],
)
def test_whose_fault_it_is(kind: type[errors.PhalanxError], whose: type[errors.PhalanxError]) -> None:
    assert issubclass(kind, whose)
