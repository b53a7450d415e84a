"""Webhooks as an operator makes them."""

from __future__ import annotations

import httpx
import pytest

from service.contracts import errors
from tests.api.commands import Run
from tests.api.world import World


def test_a_webhook_is_made_listed_and_removed(world: World) -> None:
    with world.client() as client:
        made = client.make_hook("https://example.com/hook", "env:KEY")
        assert "JobFailed" in made.types
        assert [one.id for one in client.hooks()] == [made.id]
        client.remove_hook(made.id)
        assert client.hooks() == ()
        with pytest.raises(errors.NotFound):
            client.remove_hook(made.id)
        with pytest.raises(errors.NotFound):
            client.make_hook("https://example.com/hook", "env:KEY", project="nowhere")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": "ftp://example.com"}, "url"),
        ({"url": "https://user:password@example.com/"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"secret": "s3cret"}, "secret"),
        ({"secret": "file:relative"}, "secret"),
        ({"types": []}, "types"),
    ],
)
def test_what_is_refused(http: httpx.Client, body: dict[str, object], field: str) -> None:
    answer = http.post("/v1/hooks", json={"url": "https://example.com", "secret": "env:KEY", **body})
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_commands(run: Run) -> None:
    made = run("hook", "create", "https://example.com/x", "--secret", "env:KEY", "--type", "JobFailed")
    assert made.exit_code == 0, made.output
    id_ = made.stdout.split()[-1]
    assert id_ in run("hook", "list").stdout
    assert run("hook", "delete", id_).exit_code == 0
