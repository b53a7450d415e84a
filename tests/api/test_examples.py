"""The bodies that the OpenAPI document shows do what they say."""

from __future__ import annotations

import httpx
import pytest

from api import examples
from service.contracts.job import Phase
from tests.api.world import World

ASKED = [(verb, path) for verb, path in examples.BODIES if "{" not in path]


@pytest.mark.parametrize(("verb", "path"), ASKED)
def test_an_example_is_accepted_as_it_stands(http: httpx.Client, verb: str, path: str) -> None:
    assert http.request(verb, path, json=examples.BODIES[verb, path]).is_success


def test_examples_about_a_job_are_accepted_as_they_stand(http: httpx.Client, world: World) -> None:
    uid = http.post("/v1/jobs", json=examples.JOB).json()["uid"]
    world.move(uid, Phase.RUNNING)
    changed = http.patch(f"/v1/jobs/{uid}", json=examples.BODIES["patch", "/v1/jobs/{uid}"], headers={"If-Match": "*"})
    assert changed.is_success, changed.text
    assert http.post(f"/v1/jobs/{uid}:rescale", json=examples.BODIES["post", "/v1/jobs/{uid}:rescale"]).is_success
