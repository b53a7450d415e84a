"""S3 under faults: a server in front of the test server does what that leaves out, and what goes wrong on the way."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import errno
import hashlib
import http.client
import http.server
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests import s3 as server
from workers.checkpoint import s3
from workers.checkpoint.retry import Retry, may_pass
from workers.checkpoint.s3 import S3Storage, part_bytes
from workers.checkpoint.storage import Storage

pytestmark = pytest.mark.server

PART = 100_000
UPLOADS = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)


@dataclasses.dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """Of the object in its bucket."""
        return unquote(urlsplit(self.target).path).strip("/").partition("/")[2]

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query, True).items()}

    @property
    def kind(self) -> str:
        match self.method, self.query:
            case "PUT", {"partNumber": _}:
                return "part"
            case "POST", {"uploadId": _}:
                return "finish"
            case "POST", {"uploads": _}:
                return "begin"
            case "POST", {"delete": _}:
                return "delete"
            case "GET", {"uploads": _}:
                return "uploads"
        return self.method.lower()

    @property
    def key_id(self) -> str:
        found = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        return found[1] if found else ""


Answer = tuple[int, dict[str, str], bytes]
Fault = Callable[[Request, Callable[[], Answer]], Answer | None]  # None: no answer at all


def refusal(status: int, code: str) -> Answer:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


class Front:
    """Forwards to the server behind it. As real stores do, and that one does not, it refuses a body that is not of its
    Content-MD5, knows when an upload began, and lists uploads in pages. `faults` come between, by kind of request.
    """

    def __init__(self, behind: str, page: int = 1000) -> None:
        self.behind, self.page = behind, page
        self.faults: dict[str, list[Fault]] = {}  # each is used once, but for the last
        self.seen: list[Request] = []
        self.began: dict[str, datetime.datetime] = {}  # path of an object -> its upload's time
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        front = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = front.answer(Request(self.command, self.path, headers, body))
                self.close_connection = True
                if answer is None:
                    return
                status, told, content = answer
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(content)), **told, "Connection": "close"}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Front:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def kinds(self) -> list[str]:
        return [request.kind for request in self.seen]

    def fault(self, kind: str, *faults: Fault) -> None:
        self.faults[kind] = list(faults)

    def answer(self, request: Request) -> Answer | None:
        with self.lock:
            self.seen.append(request)
            waiting = self.faults.get(request.kind, [])
            fault = (waiting.pop(0) if len(waiting) > 1 else waiting[0]) if waiting else None
            self.in_flight += request.kind == "part"
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if fault is not None:
                return fault(request, lambda: self.checked(request))
            return self.checked(request)
        finally:
            with self.lock:
                self.in_flight -= request.kind == "part"

    def checked(self, request: Request) -> Answer:
        told = request.headers.get("content-md5")
        if told and told != base64.b64encode(hashlib.md5(request.body).digest()).decode():
            return refusal(400, "BadDigest")
        return self.uploads(request) if request.kind == "uploads" else self.forwarded(request)

    def forwarded(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.behind).netloc, timeout=30)
        try:
            headers = {name: value for name, value in request.headers.items() if name != "expect"}
            connection.request(request.method, request.target, request.body, headers)
            got = connection.getresponse()
            told = {name: value for name, value in got.getheaders() if name.lower() not in ("connection", "date")}
            return got.status, told, got.read()
        finally:
            connection.close()

    def uploads(self, request: Request) -> Answer:
        status, _, body = self.forwarded(request)
        found = {}
        for upload in UPLOADS.findall(body.decode()):
            key, identity = (re.search(rf"<{name}>(.*?)</{name}>", upload)[1] for name in ("Key", "UploadId"))
            began = self.began.get(key.rpartition("/")[2], datetime.datetime.now(datetime.UTC))
            found[key, identity] = re.sub(r"(?<=<Initiated>).*?(?=<)", began.strftime("%Y-%m-%dT%H:%M:%S.000Z"), upload)
        after = (request.query.get("key-marker", ""), request.query.get("upload-id-marker", ""))
        left = sorted(place for place in found if place > after)
        shown, more = left[: self.page], len(left) > self.page
        parts = ["<ListMultipartUploadsResult>", *(found[place] for place in shown)]
        parts.append(f"<IsTruncated>{str(more).lower()}</IsTruncated>")
        if more:
            key, identity = shown[-1]
            parts.append(f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{identity}</NextUploadIdMarker>")
        return status, {}, "".join([*parts, "</ListMultipartUploadsResult>"]).encode()


# Faults.


def well(request: Request, go: Callable[[], Answer]) -> Answer:
    return go()


def unanswered(request: Request, go: Callable[[], Answer]) -> None:
    """Done, and the answer is lost."""
    go()


def flipped(request: Request, go: Callable[[], Answer]) -> Answer:
    request.body = bytes([request.body[0] ^ 1]) + request.body[1:]
    return go()


def refused(status: int, code: str) -> Fault:
    return lambda request, go: refusal(status, code)


def unless(key_id: str, status: int, code: str) -> Fault:
    """Refused to all who come with other credentials."""
    return lambda request, go: go() if request.key_id == key_id else refusal(status, code)


KINDS = ("get", "put", "head", "delete", "begin", "part", "finish", "uploads")


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, str]]:
    with server.served() as (uri, environment):
        yield uri, environment["AWS_ENDPOINT_URL"]


@pytest.fixture
def front(bucket: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", PART)
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(s3, "RENEW_S", 0.0)
    with Front(bucket[1]) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        server.forget()
        yield made
    server.forget()


@pytest.fixture
def storage(front: Front, bucket: tuple[str, str]) -> S3Storage:
    opened = Storage.open(f"{bucket[0]}/{uuid.uuid4().hex}")
    assert isinstance(opened, S3Storage)
    return opened


def data(nbytes: int) -> bytes:
    return b"".join(n.to_bytes(4, "big") for n in range(-(-nbytes // 4)))[:nbytes]


def write(storage: Storage, path: str, content: bytes, at_once: int = 70_000) -> None:
    with storage.write_stream(path) as out:
        for start in range(0, len(content), at_once):
            out.write(memoryview(content)[start : start + at_once])


def unfinished(storage: S3Storage) -> list[str]:
    return storage.abandoned("", -3600)


# Parts.


def test_ten_thousand_parts_hold_five_tebibytes():
    sizes = [part_bytes(number) for number in range(1, s3.MOST_PARTS + 1)]
    assert sizes == sorted(sizes)
    assert len(set(sizes[: s3.EQUAL_PARTS])) == 1
    assert sizes[0] >= 16 << 20
    assert sizes[-1] <= 5 << 30
    assert sum(sizes) >= 5 << 40


@pytest.mark.parametrize(
    ("nbytes", "parts"),
    [(0, 0), (1, 0), (PART - 1, 0), (PART, 1), (PART + 1, 2), (5 * PART, 5), (7 * PART + 3, 8)],
)
def test_a_stream_goes_up_in_parts(front, storage, nbytes, parts):
    write(storage, "a/stream", data(nbytes))
    assert storage.read("a/stream") == data(nbytes)
    assert storage.sizes() == {"a/stream": nbytes}
    assert front.kinds().count("part") == parts
    assert front.kinds().count("put") == (parts == 0)
    assert unfinished(storage) == []
    assert all(
        request.headers["content-md5"] and not any(name.startswith("x-amz-checksum") for name in request.headers)
        for request in front.seen
        if request.kind in ("part", "put")
    )


def test_parts_grow_where_there_are_many(front, storage, monkeypatch):
    monkeypatch.setattr(s3, "EQUAL_PARTS", 2)
    monkeypatch.setattr(s3, "GROWTH", 1)
    write(storage, "a", data(8 * PART))
    sent = {request.query["partNumber"]: len(request.body) for request in front.seen if request.kind == "part"}
    assert sent == {"1": PART, "2": PART, "3": 2 * PART, "4": 3 * PART, "5": PART}
    assert storage.read("a") == data(8 * PART)


def test_no_object_has_more_parts_than_a_store_takes(storage, monkeypatch):
    monkeypatch.setattr(s3, "MOST_PARTS", 3)
    write(storage, "three", data(3 * PART))
    with pytest.raises(OSError, match="more than 3 parts") as caught:
        write(storage, "four", data(4 * PART))
    assert caught.value.errno == errno.EFBIG
    assert storage.names() == ["three"]
    assert unfinished(storage) == []


def test_some_parts_are_in_flight_at_once_and_no_more(front, storage):
    meeting = threading.Barrier(s3.IN_FLIGHT)

    def meet(request, go):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(20)
        return go()

    front.fault("part", *[meet] * s3.IN_FLIGHT, well)
    with storage.write_stream("a") as out:
        out.write(data(9 * PART))
        assert out.tell() == 9 * PART
    assert not meeting.broken
    assert front.most_in_flight == s3.IN_FLIGHT
    assert storage.read("a") == data(9 * PART)


def test_who_writes_faster_than_the_store_takes_has_to_wait(front, storage):
    """Memory holds four parts at most: three that are sent, and one that is filled."""
    go_on, written = threading.Event(), []

    def slow(request, go):
        go_on.wait(20)
        return go()

    def run():
        with storage.write_stream("a") as out:
            for _ in range(8):
                written.append(out.write(data(PART)))

    front.fault("part", slow)
    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: front.in_flight == s3.IN_FLIGHT)
    assert not wait_until(lambda: len(written) > s3.IN_FLIGHT, 0.5)
    go_on.set()
    thread.join(20)
    assert len(written) == 8
    assert storage.size("a") == 8 * PART


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it is true before so long."""
    end, tick = time.monotonic() + seconds, threading.Event()
    while not true():
        if time.monotonic() > end:
            return False
        tick.wait(0.01)
    return True


def test_a_block_that_fails_leaves_no_upload(storage):
    def fail():
        with storage.write_stream("a") as out:
            out.write(data(4 * PART))
            assert storage.names() == []
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert storage.names() == []
    assert unfinished(storage) == []


# What the store has is what was written.


@pytest.mark.parametrize(("kind", "nbytes"), [("put", 1000), ("part", 3 * PART)])
def test_what_is_damaged_on_the_way_is_sent_again(front, storage, kind, nbytes):
    front.fault(kind, flipped, well)
    write(storage, "a", data(nbytes))
    assert storage.read("a") == data(nbytes)


@pytest.mark.parametrize(("kind", "nbytes"), [("put", 1000), ("part", 3 * PART)])
def test_what_is_damaged_again_and_again_is_refused(front, storage, kind, nbytes):
    front.fault(kind, flipped)
    with pytest.raises(OSError, match="damaged on the way") as caught:
        write(storage, "a", data(nbytes))
    assert may_pass(caught.value)
    assert storage.names() == []
    assert unfinished(storage) == []


def unchecked(change: Callable[[bytes], bytes]) -> Fault:
    """A store that takes what it did not check, and keeps something else; of an upload, its last part."""

    def fault(request, go):
        if len(request.body) == PART:  # parts arrive in any order, and only the last may be a small one
            return go()
        request.body = change(request.body)
        request.headers.pop("content-md5")
        request.headers["content-length"] = str(len(request.body))
        return go()

    return fault


@pytest.mark.parametrize(("kind", "nbytes"), [("put", 1000), ("part", PART + 1000)])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: body[:-1], r"the store has \d+ bytes with ETag .*; written were \d+ bytes with ETag"),
        (lambda body: bytes(len(body)), r"the store has \d+ bytes with ETag .*; written were \d+ bytes with ETag"),
    ],
    ids=["cut", "zeros"],
)
def test_a_store_that_has_something_else_is_found_out(front, storage, kind, nbytes, change, why):
    front.fault(kind, unchecked(change))
    with pytest.raises(OSError, match=why) as caught:
        write(storage, "a", data(nbytes))
    assert caught.value.errno == errno.EIO
    assert storage.names() == ["a"]


@pytest.mark.parametrize(
    ("head", "like", "compared"),
    [
        ({"ETag": f'"{"0" * 32}"'}, "0" * 32, True),
        ({"ETag": f'"{"0" * 32}-3"'}, f"{'0' * 32}-2", True),
        ({"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "AES256"}, "0" * 32, True),
        ({"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "aws:kms"}, "0" * 32, False),
        ({"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "aws:kms:dsse"}, "0" * 32, False),
        ({"ETag": f'"{"0" * 32}"', "SSECustomerAlgorithm": "AES256"}, "0" * 32, False),
        ({"ETag": f'"{"0" * 32}"'}, f"{'0' * 32}-2", False),
        ({"ETag": '"CKih16GjycICEAE="'}, f"{'0' * 32}-2", False),
        ({}, "0" * 32, False),
    ],
)
def test_which_etags_are_made_of_md5s(head, like, compared):
    assert s3._of_md5s(head, like) == compared


# Answers that are lost; others that write.


def only_once() -> Fault:
    """An upload that was finished is gone, as the standard has it."""
    done = threading.Event()

    def fault(request, go):
        if done.is_set():
            return refusal(404, "NoSuchUpload")
        done.set()
        go()
        return None

    return fault


@pytest.mark.parametrize(
    ("kind", "nbytes", "faults"),
    [
        ("put", 1000, [unanswered, well]),
        ("finish", 3 * PART, [unanswered, refused(412, "PreconditionFailed")]),
        ("finish", 3 * PART, [only_once()]),
        ("finish", 3 * PART, [unanswered, refused(503, "SlowDown")]),
        ("part", 3 * PART, [unanswered, well]),
        ("begin", 3 * PART, [unanswered, well]),
    ],
)
def test_a_request_whose_answer_is_lost_finds_itself(front, storage, kind, nbytes, faults):
    front.fault(kind, *faults)
    write(storage, "a", data(nbytes))
    assert storage.read("a") == data(nbytes)


@pytest.mark.parametrize(("kind", "nbytes"), [("put", 1000), ("finish", 3 * PART)])
def test_an_object_of_another_is_not_taken_for_ones_own(front, storage, kind, nbytes):
    """The same bytes, by another writer, a moment before."""
    other, faults = Storage.open(storage.uri), front.faults

    def overtaken(request, go):
        faults.clear()
        other.create("a", data(nbytes))
        return go()

    front.fault(kind, overtaken)
    with pytest.raises(FileExistsError):
        write(storage, "a", data(nbytes))
    assert storage.read("a") == data(nbytes)
    assert unfinished(storage) == []


def test_a_store_that_knows_no_conditions_tells_afterwards_who_was_overtaken(front, storage):
    other = Storage.open(storage.uri)

    def overwritten(request, go):
        front.faults.clear()
        answer = go()
        storage.delete("a")
        other.create("a", b"other")
        return answer

    front.fault("put", overwritten)
    with pytest.raises(FileExistsError):
        storage.create("a", b"mine")
    assert storage.read("a") == b"other"


@pytest.mark.parametrize(("kind", "nbytes"), [("put", 1000), ("finish", 3 * PART)])
def test_a_conflict_is_waited_for(front, storage, kind, nbytes):
    front.fault(kind, *[refused(409, "ConditionalRequestConflict")] * 2, well)
    write(storage, "a", data(nbytes))
    assert storage.read("a") == data(nbytes)


# Storage that is away.


@pytest.mark.parametrize(
    ("kind", "fault", "error"),
    [
        ("get", refused(503, "SlowDown"), OSError),
        ("get", refused(500, "InternalError"), OSError),
        ("get", refused(400, "RequestTimeout"), TimeoutError),
        ("get", lambda request, go: None, OSError),
        ("get", lambda request, go: (200, {}, b"<not XML"), OSError),
        ("get", refused(403, "AccessDenied"), PermissionError),
        ("get", refused(403, "SignatureDoesNotMatch"), PermissionError),
        ("get", refused(400, "InvalidToken"), PermissionError),
    ],
)
def test_trouble_may_pass(front, storage, monkeypatch, kind, fault, error):
    monkeypatch.setattr(storage.fs, "retries", 1)
    front.fault(kind, fault)
    with pytest.raises(error) as caught:
        storage.names()
    assert may_pass(caught.value)


def test_a_server_that_is_gone(storage, front):
    front.server.server_close()
    for call in (
        storage.names,
        lambda: storage.create("a", b"x"),
        lambda: storage.read("a"),
        lambda: storage.exists("a"),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert may_pass(caught.value)


def test_a_bucket_that_is_not_there(storage, bucket):
    with pytest.raises(FileNotFoundError):
        Storage.open(f"{bucket[0]}-not/there").names()


@pytest.mark.parametrize("code", ["AccessDenied", "InternalError"])
def test_a_removal_that_fails_in_part_is_an_error(front, storage, code):
    storage.create("a/1", b"x")
    body = f"<DeleteResult><Error><Key>a/1</Key><Code>{code}</Code><Message>no</Message></Error></DeleteResult>"
    front.fault("delete", lambda request, go: (200, {}, body.encode()))
    with pytest.raises(OSError, match="not removed: no") as caught:
        storage.delete("a")
    assert isinstance(caught.value, PermissionError) == (code == "AccessDenied")


# Credentials.


REFUSALS = [(400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (403, "AccessDenied"), (403, "SignatureDoesNotMatch")]


def all_but(front: Front, key_id: str, status: int, code: str) -> None:
    for kind in KINDS:
        front.fault(kind, unless(key_id, status, code))


@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_new_credentials_in_the_environment_are_found(front, storage, monkeypatch, status, code):
    storage.create("a", b"x")
    all_but(front, "new", status, code)
    with pytest.raises(PermissionError):
        storage.read("a")
    with pytest.raises(PermissionError):
        storage.exists("a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    for _ in range(2):
        assert storage.exists("a")
        assert storage.read("a") == b"x"
        assert storage.names() == ["a"]


def test_new_credentials_in_a_file_are_found(front, storage, monkeypatch, tmp_path, bucket):
    def rotate(key_id):
        (tmp_path / "credentials").write_text(
            f"[training]\naws_access_key_id = {key_id}\naws_secret_access_key = secret\n"
        )

    rotate("first")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "training")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server.forget()
    storage = Storage.open(storage.uri)
    for key_id in ("first", "second", "third"):
        rotate(key_id)
        all_but(front, key_id, 400, "ExpiredToken")
        storage.create(key_id, b"x")
    assert storage.names() == ["first", "second", "third"]


def test_credentials_renewed_in_the_middle_of_a_stream(front, storage, monkeypatch):
    with storage.write_stream("a") as out:
        out.write(data(3 * PART))
        all_but(front, "new", 400, "ExpiredToken")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        out.write(data(3 * PART))
    assert storage.read("a") == data(3 * PART) * 2


def test_f12_refused_until_somebody_renews(front, storage, monkeypatch):
    all_but(front, "new", 403, "AccessDenied")
    pauses = []

    def wait(stop, seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        return False

    Retry(3600.0, wait=wait).run(lambda: write(storage, "a", data(3 * PART)))
    assert len(pauses) == 3
    assert storage.read("a") == data(3 * PART)


def test_the_same_credentials_are_not_taken_again_and_again(front, storage):
    all_but(front, "new", 403, "AccessDenied")
    clients = set()
    for _ in range(4):
        with pytest.raises(PermissionError):
            storage.read("a")
        clients.add(id(storage.fs.s3))
    assert len(clients) == 1


def test_without_credentials(storage, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    server.forget()
    with pytest.raises(PermissionError, match="credentials") as caught:
        Storage.open(storage.uri).names()
    assert may_pass(caught.value)


# Other processes.


WRITER = """
import sys
import botocore.session

bucket, folder, part = sys.argv[1], sys.argv[2], int(sys.argv[3])
s3 = botocore.session.get_session().create_client("s3")
upload = s3.create_multipart_upload(Bucket=bucket, Key=f"{folder}/a/torn")["UploadId"]
s3.upload_part(Bucket=bucket, Key=f"{folder}/a/torn", UploadId=upload, PartNumber=1, Body=bytes(part))
print("torn", flush=True)
for number in sys.stdin:
    s3.put_object(Bucket=bucket, Key=f"{folder}/a/{number.strip()}", Body=b"whole")
    print(number.strip(), flush=True)
"""


def test_f17_what_another_process_writes_is_seen_at_once_and_what_it_tore_is_cleaned(front, storage):
    bucket, _, folder = storage.root.partition("/")
    arguments = [sys.executable, "-c", WRITER, bucket, folder, str(PART)]
    assert storage.names() == []
    assert not storage.exists("a/1")
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "torn\n"
            for number in ("1", "2"):
                assert storage.sizes("a") == {f"a/{n}": 5 for n in range(1, int(number))}
                other.stdin.write(f"{number}\n")
                other.stdin.flush()
                assert other.stdout.readline() == f"{number}\n"
                assert storage.exists(f"a/{number}")
                assert f"a/{number}" in storage.names("a")
                assert storage.size(f"a/{number}") == 5
        finally:
            other.send_signal(signal.SIGKILL)
    assert storage.names() == ["a/1", "a/2"]
    assert not storage.exists("a/torn")
    with pytest.raises(FileNotFoundError):
        storage.read("a/torn")
    hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    front.began["torn"] = hour_ago
    assert storage.abandoned("a", 7200) == []
    assert storage.sweep("a", 7200) == []
    assert storage.abandoned("a", 1800) == ["a/torn"]
    assert storage.sweep("a", 1800) == ["a/torn"]
    assert unfinished(storage) == []
    assert storage.names() == ["a/1", "a/2"]
    write(storage, "a/torn", b"whole again")
    assert storage.read("a/torn") == b"whole again"


def test_only_old_uploads_of_the_folder_are_swept(front, storage):
    """Several a page, several of one name, and one of a neighbour whose name begins alike."""
    front.page = 2
    now = datetime.datetime.now(datetime.UTC)
    for name, hours in {"old1": 30, "old2": 25, "young": 23, "old3": 100, "now": 0, "twice": 50}.items():
        front.began[name] = now - datetime.timedelta(hours=hours)
    for path in ("a/old1", "a/young", "a/old2", "a/b/old3", "a/now", "a/twice", "a/twice", "ab/old1", "old1"):
        storage.call("create_multipart_upload", path)
    swept = ["a/b/old3", "a/old1", "a/old2", "a/twice", "a/twice"]
    assert storage.abandoned("a", 24 * 3600) == swept
    assert storage.sweep("a", 24 * 3600) == swept
    assert storage.sweep("a", 24 * 3600) == []
    assert unfinished(storage) == ["a/now", "a/young", "ab/old1", "old1"]
    assert storage.sweep("", 24 * 3600) == ["ab/old1", "old1"]


def test_an_upload_that_was_swept_under_its_writer_may_be_written_again(front, storage):
    """A sweep that is too early costs the write, not the bytes."""

    def swept(request, go):
        front.faults.clear()
        assert storage.sweep("", -3600) == ["a"]
        return refusal(404, "NoSuchUpload")

    front.fault("finish", swept)
    with pytest.raises(OSError, match="the upload is gone") as caught:
        write(storage, "a", data(3 * PART))
    assert may_pass(caught.value)
    assert storage.names() == []
    write(storage, "a", data(3 * PART))
    assert storage.read("a") == data(3 * PART)


def test_a_listing_of_many_pages(front, storage, monkeypatch):
    call = type(storage.fs).call_s3

    def small(fs, method, **arguments):
        return call(fs, method, **arguments | ({"MaxKeys": 2} if method == "list_objects_v2" else {}))

    monkeypatch.setattr(type(storage.fs), "call_s3", small)
    for number in range(5):
        storage.create(f"a/{number}", bytes(number))
    assert storage.sizes("a") == {f"a/{number}": number for number in range(5)}
    storage.delete("a")
    assert storage.names() == []


def test_the_module_is_loaded_for_s3_only(tmp_path: Path):
    code = (
        "import sys; from workers.checkpoint.storage import Storage; "
        f"Storage.open({str(tmp_path)!r}).create('a', b'x'); assert 'aiobotocore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
