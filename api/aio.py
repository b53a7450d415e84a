"""The API from asyncio (or trio): `AsyncClient(url, token)`, with the methods of `Client`, each call on a thread.

async with AsyncClient(url, token) as client:
    job = await client.submit(spec)
    async for event in client.events(job.uid, follow=True):
        ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial, update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from anyio import to_thread

from api.client import Client

P = ParamSpec("P")
T = TypeVar("T")
OVER = object()


def _call(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await to_thread.run_sync(partial(method, self.client, *args, **kwargs), abandon_on_cancel=True)

    update_wrapper(call, method)
    return call


def _each(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    async def each(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        items = method(self.client, *args, **kwargs)
        while True:
            item = await to_thread.run_sync(next, items, OVER, abandon_on_cancel=True)
            if item is OVER:
                return
            yield item  # type: ignore[misc]

    update_wrapper(each, method)
    return each


class AsyncClient:
    """Raises what `Client` raises."""

    def __init__(self, url: str, token: str) -> None:
        self.client = Client(url, token)

    @classmethod
    def find(cls, home: Path, url: str | None = None, token: str | None = None) -> Self:
        """As `Client.find`."""
        known = Client.find(home, url, token)
        known.close()
        return cls(known.url, known.token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()

    submit, dry_run, get = _call(Client.submit), _call(Client.dry_run), _call(Client.get)
    cancel, suspend, resume = _call(Client.cancel), _call(Client.suspend), _call(Client.resume)
    save, restart, rescale = _call(Client.save), _call(Client.restart), _call(Client.rescale)
    change, remove, wait = _call(Client.change), _call(Client.remove), _call(Client.wait)
    list, events, logs, metrics = _each(Client.list), _each(Client.events), _each(Client.logs), _each(Client.metrics)
    events_page, metrics_page = _call(Client.events_page), _call(Client.metrics_page)
    sampled = _call(Client.sampled)
    ranks, incidents, goodput = _call(Client.ranks), _call(Client.incidents), _call(Client.goodput)
    checkpoints, checkpoint = _call(Client.checkpoints), _call(Client.checkpoint)
    verify, restore, export = _call(Client.verify), _call(Client.restore), _call(Client.export)
    fork, answer, plan = _call(Client.fork), _call(Client.answer), _call(Client.plan)
    nodes, forgive, usage, audit = _call(Client.nodes), _call(Client.forgive), _call(Client.usage), _each(Client.audit)
    queues, make_queue, set_priority = _call(Client.queues), _call(Client.make_queue), _call(Client.set_priority)
    projects, make_project, set_quota = _call(Client.projects), _call(Client.make_project), _call(Client.set_quota)
    tokens, make_token, revoke_token = _call(Client.tokens), _call(Client.make_token), _call(Client.revoke_token)
    hooks, make_hook, remove_hook = _call(Client.hooks), _call(Client.make_hook), _call(Client.remove_hook)
