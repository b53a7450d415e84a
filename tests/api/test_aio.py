"""The client for asyncio: the same calls, the same answers, streams that end and are cancelled."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from api.aio import AsyncClient
from api.client import Client
from service.contracts import errors
from service.contracts.job import Phase
from tests.api.world import TOKEN, World, job


def test_every_call_is_there_and_takes_the_same() -> None:
    own = {"close", "find"}
    names = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")} - own
    assert names <= set(dir(AsyncClient))
    for name in names:
        assert inspect.signature(getattr(AsyncClient, name)) == inspect.signature(getattr(Client, name)), name


def test_jobs_streams_and_errors(world: World) -> None:
    async def use() -> list[str]:
        async with AsyncClient.find(world.home) as client:
            made = await client.submit(job())
            assert (await client.get(made.uid)).uid == made.uid
            assert made.uid in [one.uid async for one in client.list()]
            with pytest.raises(errors.NotFound):
                await client.get("nobody-0")
            world.say(made.uid, "one")
            world.move(made.uid, Phase.SUCCEEDED)
            return [event.reason async for event in client.events(made.uid, follow=True)]

    assert asyncio.run(use())[1:] == ["one", "now succeeded"]


def test_many_at_once(world: World) -> None:
    async def use() -> set[str]:
        async with AsyncClient(world.url, TOKEN) as client:
            made = await asyncio.gather(*(client.submit(job()) for _ in range(20)))
            return {one.uid for one in made}

    assert len(asyncio.run(use())) == 20


def test_who_stops_listening_is_free_at_once(world: World) -> None:
    uid = world.submit().uid

    async def use() -> None:
        async with AsyncClient(world.url, TOKEN) as client:

            async def listen() -> None:
                async for _ in client.events(uid, follow=True):
                    pass

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(listen(), 0.3)

    asyncio.run(asyncio.wait_for(use(), 5))
    world.move(uid, Phase.CANCELLED)
