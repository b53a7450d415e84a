"""Projects, queues, tokens and the audit log, on both databases."""

from __future__ import annotations

import pytest

from service.contracts.errors import Conflict, NotFound
from service.store.jobs import Store
from service.store.records import Audit, HookRow, TokenRow


def test_projects_and_their_quotas(store: Store) -> None:
    access = store.access
    access.add_project("vision", 4, 1.0)
    with pytest.raises(Conflict):
        access.add_project("vision", 8, 2.0)
    assert [(one.name, one.slots) for one in access.projects()] == [("default", None), ("vision", 4)]
    access.set_slots("vision", None)
    assert access.project("vision").slots is None
    for call in (lambda: access.project("nowhere"), lambda: access.set_slots("nowhere", 1)):
        with pytest.raises(NotFound):
            call()


def test_queues_and_shares(store: Store) -> None:
    access = store.access
    access.add_queue("night", -5, 1.0)
    with pytest.raises(Conflict):
        access.add_queue("night", 0, 2.0)
    access.add_project("vision", 4, 1.0)
    access.set_priority("night", 7)
    assert [one.name for one in access.queues()] == ["night", "default"]
    assert access.shares() == ({"night": 7, "default": 0}, {"vision": 4})
    with pytest.raises(NotFound):
        access.set_priority("nowhere", 1)


def test_tokens(store: Store) -> None:
    access = store.access
    row = TokenRow("id1", "mine", None, "submit", 1.0)
    access.add_token(row, "digest")
    assert access.token("id1") == (row, "digest")
    assert access.token("nothing") is None
    access.revoke("id1", 5.0)
    access.revoke("id1", 9.0)
    (known,) = access.tokens()
    assert known.revoked_at == 5.0
    with pytest.raises(NotFound):
        access.revoke("nothing", 1.0)
    with pytest.raises(NotFound):
        access.add_token(TokenRow("id2", "x", "nowhere", "read", 1.0), "d")


def test_the_audit_log_is_in_order_and_by_project(store: Store) -> None:
    told = [Audit(0, float(n), "me", project, "POST", f"/{n}", 201) for n, project in enumerate([None, "a", "b", "a"])]
    store.access.note(told[:1])
    store.access.note(told[1:])
    assert [one.target for one in store.access.audit(None)] == ["/0", "/1", "/2", "/3"]
    first, second = store.access.audit("a")
    assert (first.target, second.target) == ("/1", "/3")
    assert store.access.audit("a", after=first.id) == [second]


def test_hooks(store: Store, submit: object) -> None:
    hook = store.hooks.add(HookRow("h1", "https://x", "env:K", None, ("JobSubmitted",), 1.0))
    submit("a")  # type: ignore[operator]
    ((event),) = store.hooks.due(hook, 10)
    assert (event.job, event.type) == ("a", "JobSubmitted")
    store.hooks.failed(hook, "no", 3.0)
    (known,) = store.hooks.all()
    assert (known.failures, known.failing_since, known.types) == (1, 3.0, ("JobSubmitted",))
    store.hooks.told("h1", event.id)
    (known,) = store.hooks.all()
    assert (known.failures, known.after, store.hooks.due(known, 10)) == (0, event.id, [])
    store.hooks.remove("h1")
    assert store.hooks.all() == []
