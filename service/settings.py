"""The settings of the service: the only reader of the environment on this side. No I/O."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.contracts.errors import UserError
from service.core import liveness
from service.core.liveness import Limits
from service.store import database


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    home: Path  # absolute
    store: str  # URL of the database
    storage: str  # absolute path or fsspec URI: the root under which jobs keep checkpoints and logs
    api_host: str
    api_port: int
    ray_address: str  # empty: the Ray of this machine
    lease_ttl_s: float
    allowed_roots: tuple[str, ...]  # where a job may keep its checkpoints: `storage` first
    scratch: str = ""  # folder on each node for the output of its ranks, until it is shipped
    snapshots: str = ""  # folder in each node's memory for snapshots; no two nodes see the same one
    snapshot_bytes: int = 0  # that they may take there, of each job; 0: half of what is free when the job begins
    kernel_log: str = "/dev/kmsg"  # of each node; `{node}` stands for its name
    limits: Limits = liveness.DEFAULT
    api_drain_s: float = 0.0  # that the API still answers, though it says that it is not ready, once it is to end
    keep_days: float = 0.0  # that events, metrics and logs are kept after the end of a job; 0: for ever
    api_per_s: float = 0.0  # requests of each token; 0: no bound
    oidc_issuer: str = ""  # URL whose tokens open the API too
    oidc_audience: str = "phalanx"
    oidc_groups: str = ""  # what their groups may
    models: tuple[str, ...] = ()  # packages and modules whose classes a job may name as its model.family
    own_code: tuple[str, ...] = ()  # projects whose fleet is their own, so that their jobs may bring code; *: all
    secrets: tuple[str, ...] = ()  # references that jobs may name; {project} is theirs, * or / at an end goes on

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """From `environ`, else the process's; empty counts as not set. UserError names the variable."""
        source = os.environ if environ is None else environ
        given = {name: text.strip() for name, text in source.items() if text.strip()}
        home = _path("PHALANX_HOME", given.get("PHALANX_HOME", "~/.phalanx"))
        storage = _root("PHALANX_STORAGE", given.get("PHALANX_STORAGE", str(home / "runs")))
        scratch = f"{tempfile.gettempdir()}/phalanx-{os.getuid()}"
        others = given.get("PHALANX_ALLOWED_ROOTS", "").split(",")
        roots = (storage, *(_root("PHALANX_ALLOWED_ROOTS", root) for root in others if root.strip()))
        return cls(
            home=home,
            store=_store(given.get("PHALANX_STORE", f"sqlite:///{home / 'store.sqlite3'}")),
            storage=storage,
            api_host=_host(given.get("PHALANX_API_HOST", "127.0.0.1")),
            api_port=_port(given.get("PHALANX_API_PORT", "7070")),
            ray_address=given.get("PHALANX_RAY_ADDRESS", ""),
            lease_ttl_s=_seconds("PHALANX_LEASE_TTL_S", given.get("PHALANX_LEASE_TTL_S", "10")),
            allowed_roots=tuple(dict.fromkeys(roots)),
            scratch=str(_path("PHALANX_SCRATCH", given.get("PHALANX_SCRATCH", scratch))),
            snapshots=str(_path("PHALANX_SNAPSHOTS", given.get("PHALANX_SNAPSHOTS", _memory(scratch)))),
            snapshot_bytes=_bytes("PHALANX_SNAPSHOT_BYTES", given.get("PHALANX_SNAPSHOT_BYTES", "0")),
            kernel_log=str(_path("PHALANX_KERNEL_LOG", given.get("PHALANX_KERNEL_LOG", "/dev/kmsg"))),
            limits=_limits("PHALANX_LIMITS", given.get("PHALANX_LIMITS", "")),
            api_drain_s=_seconds("PHALANX_API_DRAIN_S", given.get("PHALANX_API_DRAIN_S", "0"), least=0.0),
            keep_days=_seconds("PHALANX_KEEP_DAYS", given.get("PHALANX_KEEP_DAYS", "0"), least=0.0),
            api_per_s=_seconds("PHALANX_API_PER_S", given.get("PHALANX_API_PER_S", "0"), least=0.0),
            oidc_issuer=given.get("PHALANX_OIDC_ISSUER", ""),
            oidc_audience=given.get("PHALANX_OIDC_AUDIENCE", "phalanx"),
            oidc_groups=given.get("PHALANX_OIDC_GROUPS", ""),
            models=_modules("PHALANX_MODELS", given.get("PHALANX_MODELS", "")),
            own_code=_list(given.get("PHALANX_OWN_CODE", "")),
            secrets=_references("PHALANX_SECRETS", given.get("PHALANX_SECRETS", "")),
        )

    def allows(self, root: str) -> bool:
        """Whether a job may keep its checkpoints in `root`: an allowed root, or a folder below one."""
        parts = _parts(root)
        allowed = [_parts(known) for known in self.allowed_roots]
        return ".." not in parts and any(parts[: len(known)] == known for known in allowed)


def _store(text: str) -> str:
    try:
        database.parse(text)
    except UserError as error:
        raise _refusal("PHALANX_STORE", error.message, error.hint) from None
    return text


def _root(variable: str, text: str) -> str:
    root = text.strip().removeprefix("file://")
    if "://" in root:
        scheme, _, rest = root.partition("://")
        if not scheme or not rest.strip("/"):
            raise _refusal(variable, f"{text!r} names no folder", "write a URI such as s3://bucket/runs")
        return root.rstrip("/")
    return str(_path(variable, root))


def _path(variable: str, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise _refusal(variable, f"{text!r} names no folder: {error}", "write an absolute path") from None
    if not path.is_absolute():
        problem = f"{text!r} is relative, and processes stand in different folders"
        raise _refusal(variable, problem, f"write {path.absolute()}")
    return path


def _parts(root: str) -> list[str]:
    scheme, found, rest = root.removeprefix("file://").partition("://")
    return [scheme, *filter(None, rest.split("/"))] if found else list(Path(scheme).parts)


def _memory(scratch: str) -> str:
    return f"/dev/shm/phalanx-{os.getuid()}" if sys.platform == "linux" else f"{scratch}/snapshots"


def _bytes(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise _refusal(variable, f"{text!r} is no number of bytes", "write a whole number, such as 8589934592")
    return int(text)


def _modules(variable: str, text: str) -> tuple[str, ...]:
    names = _list(text)
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
            hint = "write packages or modules, such as my_package.models,other_package"
            raise _refusal(variable, f"{name!r} is neither a package nor a module", hint)
    return names


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def _references(variable: str, text: str) -> tuple[str, ...]:
    found = _list(text)
    for one in found:
        if not re.match(r"(env|file|kubernetes):.", one):
            hint = "write references such as env:HF_TOKEN, file:/etc/secrets/{project}/ or kubernetes:{project}-*"
            raise _refusal(variable, f"{one!r} names no secret", hint)
    return found


def _limits(variable: str, text: str) -> Limits:
    """`settle_s=5,cooldown_s=2` changes two of them."""
    known = {field.name: type(getattr(liveness.DEFAULT, field.name)) for field in dataclasses.fields(Limits)}
    changes: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in known:
            raise _refusal(variable, f"there is no limit {name!r}", f"limits: {', '.join(known)}")
        changes[name] = known[name](_seconds(variable, value))
    return dataclasses.replace(liveness.DEFAULT, **changes)


def _host(text: str) -> str:
    if "/" in text or " " in text:
        hint = "write an address or a name, such as 127.0.0.1"
        raise _refusal("PHALANX_API_HOST", f"{text!r} is no host", hint)
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise _refusal("PHALANX_API_PORT", f"{text!r} is no port", "write a number from 1 to 65535")
    return int(text)


def _seconds(variable: str, text: str, least: float | None = None) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if seconds == least:
        return seconds
    if not 0 < seconds < math.inf:
        raise _refusal(variable, f"{text!r} is no duration", "write seconds above 0, such as 10")
    return seconds


def _refusal(variable: str, problem: str, hint: str) -> UserError:
    return UserError(f"{variable}: {problem}", hint=hint, field=variable)
