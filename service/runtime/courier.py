"""Files from the memory of one node to that of another, over plain TCP: Ray's calls would copy all bytes several times.

A sender opens a connection, says who it is and what comes, and sends the bytes; the answer comes once they are
kept. Knows files and a note that goes with them; not what they are for.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SILENT_S = 60.0  # that either side waits for the other
POLL_S = 0.1  # until a porter that is closed is
CHUNK = 1 << 20
HEADER_MAX = 16 << 20  # bytes of a header, which somebody else's first bytes may exceed
LENGTH = struct.Struct("!Q")

Note = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """Where files are taken in, and the word that opens it."""

    host: str
    port: int
    word: str


class Porter:
    """Takes files in under `folder`, in threads of its own; `kept(note)` is told once all that came with it are there.

    What `kept` raises is the sender's answer.
    """

    def __init__(self, host: str, folder: Path, kept: Callable[[Note], None]) -> None:
        self.folder, self.kept, self.word = folder, kept, secrets.token_hex(16)
        self.server = _Server((host, 0), self._take)
        threading.Thread(target=self.server.serve_forever, args=(POLL_S,), name="porter", daemon=True).start()

    @property
    def door(self) -> Door:
        host, port = self.server.socket.getsockname()[:2]
        return Door(host, port, self.word)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _take(self, link: socket.socket) -> None:
        link.settimeout(SILENT_S)
        header = _heard(link)
        if not secrets.compare_digest(str(header.get("word")), self.word):
            return
        try:
            for name, nbytes in header["files"].items():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as out:
                    _received(link, nbytes, out.write)
            self.kept(header["note"])
        except Exception as error:
            _say(link, {"error": f"{type(error).__name__}: {error}"})
        else:
            _say(link, {})


def send(door: Door, files: Mapping[str, Path], note: Note) -> None:
    """Returns once they are kept there. OSError: they are not."""
    with socket.create_connection((door.host, door.port), SILENT_S) as link:
        sizes = {name: path.stat().st_size for name, path in files.items()}
        _say(link, {"word": door.word, "files": sizes, "note": note})
        for name, path in files.items():
            with path.open("rb") as data:
                if sizes[name] and link.sendfile(data, 0, sizes[name]) < sizes[name]:
                    raise OSError(f"{path} became shorter while it was sent")
        answer = _heard(link)
    if "error" in answer:
        raise OSError(answer["error"])


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], take: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.take = take
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.take(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that went away: it knows that it did not finish."""


def _say(link: socket.socket, what: Mapping[str, Any]) -> None:
    data = json.dumps(what).encode()
    link.sendall(LENGTH.pack(len(data)) + data)


def _heard(link: socket.socket) -> dict[str, Any]:
    """OSError: nothing that makes sense."""
    parts: list[bytes] = []
    _received(link, LENGTH.size, parts.append)
    (nbytes,) = LENGTH.unpack(b"".join(parts))
    if nbytes > HEADER_MAX:
        raise OSError(f"a header of {nbytes} bytes is no header")
    parts.clear()
    _received(link, nbytes, parts.append)
    try:
        return dict(json.loads(b"".join(parts)))
    except ValueError as error:
        raise OSError(f"no header: {error}") from error


def _received(link: socket.socket, nbytes: int, use: Callable[[bytes], Any]) -> None:
    while nbytes:
        data = link.recv(min(CHUNK, nbytes))
        if not data:
            raise ConnectionResetError(f"the connection ended {nbytes} bytes early")
        use(data)
        nbytes -= len(data)
