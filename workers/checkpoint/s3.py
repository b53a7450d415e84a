"""A prefix of an S3 bucket as a storage. Knows requests, parts and credentials; nothing of checkpoints.

- **Whole or not there.** An object is published by one conditional request: a PUT, or the end of an upload in parts.
  An upload that fails is aborted; one whose process was killed is never seen, and `sweep` aborts it.
- **Checked.** Every body goes with its Content-MD5, which AWS, MinIO and Ceph all compare before they take it. Newer
  checksums are left out: older stores refuse them. Afterwards the object's size is compared with what was written, and
  its ETag too where that is made of MD5s (not under KMS or a customer's key).
- **Ours.** Every write leaves its own token in the object's metadata. A request whose answer was lost is sent again and
  finds the object there: by the token it is known as this write's own and not another's.
- **Credentials by reference**: environment, profile, web identity, instance role, as botocore finds them. A refused
  request has them looked up again, and is tried again where they are new.

All troubles are OSErrors; `s3_errors.py` says which. MinIO lists an unfinished upload only to who knows its whole name;
it removes old ones by itself (after 24 hours by default).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

from aiobotocore.session import AioSession
from botocore import exceptions as boto
from fsspec.asyn import sync
from fsspec.config import conf

from workers.checkpoint import s3_errors
from workers.checkpoint.storage import Object, Storage

MIB = 1 << 20
PART = 16 * MIB  # the first parts
EQUAL_PARTS, GROWTH, MOST_PARTS = 1000, 125, 10_000  # some stores want equal parts: all are, up to 15.6 GiB
IN_FLIGHT = 3  # parts of one object; with the one being filled, four are in memory
CONFLICT_TRIES = 5
DELETE_AT_ONCE = 1000
RENEW_S = 10.0  # between two looks for new credentials
TOKEN = "phalanx-write"  # in an object's metadata

T = TypeVar("T")


def part_bytes(number: int) -> int:
    """Size of a part, by its number from 1: 10,000 of them hold 5 TiB."""
    return PART * (1 + max(0, number - EQUAL_PARTS) // GROWTH)


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What the store should have after a write."""

    token: str
    nbytes: int
    etag: str


class S3Storage(Storage):
    options: ClassVar[Mapping[str, Any]] = {
        "config_kwargs": {"request_checksum_calculation": "when_required"} | conf.get("s3", {}).get("config_kwargs", {})
    }

    def __init__(self, fs: Any, root: str, uri: str) -> None:
        super().__init__(fs, root, uri)
        self._renewal = threading.Lock()
        self._renewed_at = -RENEW_S
        self._credentials: tuple[str, str, str | None] | None = None  # those last tried

    def create(self, path: str, data: bytes) -> None:
        token, md5 = uuid.uuid4().hex, _md5(data)

        def put() -> None:
            self.call("put_object", path, Body=data, ContentMD5=_base64(md5), IfNoneMatch="*", Metadata={TOKEN: token})

        self.publish(path, put, Written(token, len(data), md5.hex()))

    @contextlib.contextmanager
    def write_stream(self, path: str) -> Iterator[BinaryIO]:
        self._refuse_existing(path)
        upload = Upload(self, path)
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.abort()
            raise

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if end is not None and end <= (start or 0):
            return b""
        try:
            return self._ask(path, lambda: bytes(self.fs.cat_file(self._full(path), start=start, end=end)))
        except OSError as error:
            if s3_errors.code_of(error) not in ("InvalidRange", "416"):
                raise
            return b""

    def size(self, path: str) -> int:
        return int(self.call("head_object", path)["ContentLength"])

    def exists(self, path: str) -> bool:
        try:
            self.call("head_object", path)
        except FileNotFoundError:
            return False
        return True

    def objects(self, prefix: str = "") -> dict[str, Object]:
        found = {path: made for path, made in self._listed(prefix) if not path.endswith("/")}
        if not found and prefix:
            with contextlib.suppress(FileNotFoundError):
                head = self.call("head_object", prefix)
                found[prefix] = Object(head["ContentLength"], head["LastModified"].timestamp())
        return found

    def delete(self, prefix: str) -> None:
        paths = [path for path, _ in self._listed(prefix)]
        for first in range(0, len(paths), DELETE_AT_ONCE):
            keys = [{"Key": self._key(path)} for path in paths[first : first + DELETE_AT_ONCE]]
            answer = self.call("delete_objects", Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", []):
                number = errno.EACCES if error.get("Code") in s3_errors.REFUSED else errno.EIO
                raise OSError(number, f"not removed: {error.get('Message') or error.get('Code')}", error.get("Key"))
        if prefix:
            self.call("delete_object", prefix)

    def abandoned(self, prefix: str, older_than_s: float) -> list[str]:
        return sorted(path for path, _ in self._uploads(prefix, older_than_s))

    def sweep(self, prefix: str, older_than_s: float) -> list[str]:
        found = sorted(self._uploads(prefix, older_than_s))
        for path, upload in found:
            self.abort(path, upload)
        return [path for path, _ in found]

    def abort(self, path: str, upload: str) -> None:
        try:
            self.call("abort_multipart_upload", path, UploadId=upload)
        except OSError as error:
            if s3_errors.code_of(error) != s3_errors.GONE:
                raise

    def call(self, method: str, path: str | None = None, **arguments: Any) -> Any:
        """One request about the object at `path`, or about the bucket. OSError."""
        where = {"Bucket": self._bucket} if path is None else {"Bucket": self._bucket, "Key": self._key(path)}
        return self._ask(path, lambda: self.fs.call_s3(method, **where, **arguments))

    def publish(self, path: str, send: Callable[[], None], made: Written) -> None:
        """Send the request that makes the object, and check that the store has what was made."""
        for attempt in range(CONFLICT_TRIES):
            try:
                send()
                break
            except OSError as error:
                if self._made(path, made.token, error):
                    break
                # Another conditional request for this name is under way: its end decides ours.
                if s3_errors.code_of(error) not in s3_errors.CONFLICT or attempt == CONFLICT_TRIES - 1:
                    raise
            time.sleep(0.1 * 2**attempt)
        self._verify(path, made)

    def _made(self, path: str, token: str, error: OSError) -> bool:
        """Whether the request that ended so was done all the same: its answer was lost, and it was sent again."""
        if s3_errors.code_of(error) in s3_errors.REFUSED | s3_errors.DAMAGED | s3_errors.CONFLICT:
            return False
        with contextlib.suppress(OSError):
            return bool(self.call("head_object", path).get("Metadata", {}).get(TOKEN) == token)
        return False

    def _verify(self, path: str, made: Written) -> None:
        try:
            head = self.call("head_object", path)
        except FileNotFoundError as error:
            raise OSError(errno.EIO, "written, and not there afterwards", f"{self.uri}/{path}") from error
        if head.get("Metadata", {}).get(TOKEN, made.token) != made.token:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.uri}/{path}")
        nbytes, etag = int(head["ContentLength"]), head.get("ETag", "").strip('"')
        if nbytes != made.nbytes or (_of_md5s(head, like=made.etag) and etag != made.etag):
            have, want = f"{nbytes} bytes with ETag {etag}", f"{made.nbytes} bytes with ETag {made.etag}"
            raise OSError(errno.EIO, f"the store has {have}; written were {want}", f"{self.uri}/{path}")

    def _listed(self, prefix: str) -> Iterator[tuple[str, Object]]:
        """All that lies below this folder, markers of folders too."""
        for page in self._pages("list_objects_v2", prefix, {"ContinuationToken": "NextContinuationToken"}):
            for found in page.get("Contents", []):
                yield self._path(found["Key"]), Object(found["Size"], found["LastModified"].timestamp())

    def _uploads(self, prefix: str, older_than_s: float) -> Iterator[tuple[str, str]]:
        """(path, id) of the unfinished uploads that began so long ago."""
        before = time.time() - older_than_s
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", prefix, markers):
            for found in page.get("Uploads", []):
                if found["Initiated"].timestamp() < before:
                    yield self._path(found["Key"]), found["UploadId"]

    def _pages(self, method: str, prefix: str, markers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        key = self._key(prefix)
        marks: dict[str, str] = {}
        while True:
            page = self.call(method, Prefix=f"{key}/" if key else "", **marks)
            yield page
            marks = {ours: page[theirs] for ours, theirs in markers.items() if page.get(theirs)}
            if not page.get("IsTruncated") or not marks:
                return

    @property
    def _bucket(self) -> str:
        return str(self.fs.split_path(self.root)[0])

    def _key(self, path: str) -> str:
        return str(self.fs.split_path(self._full(path))[1])

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}"[len(self.root) + 1 :]

    def _ask(self, path: str | None, work: Callable[[], T]) -> T:
        """What `work` gives; its troubles as OSErrors. Once more with new credentials where the old are refused."""
        where, asked = self.uri if path is None else f"{self.uri}/{path}", time.monotonic()
        try:
            with s3_errors.translated(where):
                return work()
        except PermissionError:
            if not self._renewed(asked):
                raise
        with s3_errors.translated(where):
            return work()

    def _renewed(self, asked: float) -> bool:
        """Whether requests now go out with other credentials than one that was asked at this moment."""
        with self._renewal:
            if self._renewed_at > asked:
                return True
            if time.monotonic() < self._renewed_at + RENEW_S:
                return False
            found = self._look_up()
            if found is None or found == self._credentials:
                return False
            self.fs.connect(refresh=True)
            self._credentials, self._renewed_at = found, time.monotonic()
            return True

    def _look_up(self) -> tuple[str, str, str | None] | None:
        """The credentials that a new session finds, if any. Each session keeps those that it found first."""
        if self.fs.key or self.fs.anon:
            return None

        async def look() -> tuple[str, str, str | None] | None:
            credentials = await AioSession(**self.fs.kwargs).get_credentials()
            frozen = credentials and await credentials.get_frozen_credentials()
            return frozen and (frozen.access_key, frozen.secret_key, frozen.token)

        with contextlib.suppress(boto.BotoCoreError, boto.ClientError):
            return cast("tuple[str, str, str | None] | None", sync(self.fs.loop, look))
        return None


class Upload(io.RawIOBase):
    """An object that goes up in parts while it is written; a small one goes in one request, at the end."""

    def __init__(self, storage: S3Storage, path: str) -> None:
        self.storage, self.path, self.token = storage, path, uuid.uuid4().hex
        self.nbytes = 0
        self._id: str | None = None
        self._part = io.BytesIO()
        self._parts: list[Future[tuple[str, bytes]]] = []  # (ETag, MD5)
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="s3-part")  # its threads start with its work

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.nbytes

    def write(self, data: Any) -> int:
        view = memoryview(data)
        nbytes = view.nbytes
        view = view.cast("B") if nbytes else view[:0]  # an empty view may not be cast
        while view:
            room = part_bytes(len(self._parts) + 1) - self._part.tell()
            taken, view = view[:room], view[room:]
            self._part.write(taken)
            if len(taken) == room:
                self._send()
        self.nbytes += nbytes
        return nbytes

    def finish(self) -> None:
        if self._id is None:
            self._pool.shutdown()
            self.storage.create(self.path, self._part.getvalue())
            return
        if self._part.tell():
            self._send()
        etags, md5s = zip(*[part.result() for part in self._parts], strict=True)
        self._pool.shutdown()
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        made = Written(self.token, self.nbytes, f"{_md5(b''.join(md5s)).hex()}-{len(parts)}")
        arguments = {"UploadId": self._id, "MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"}
        self.storage.publish(
            self.path, lambda: self.storage.call("complete_multipart_upload", self.path, **arguments), made
        )

    def abort(self) -> None:
        """Give up what was sent; where the store can't be told, `sweep` does it later."""
        self._pool.shutdown(cancel_futures=True)
        if self._id is not None:
            with contextlib.suppress(OSError):
                self.storage.abort(self.path, self._id)

    def _send(self) -> None:
        self._raise_first(self._parts)
        if len(self._parts) == MOST_PARTS:
            raise OSError(errno.EFBIG, f"more than {MOST_PARTS} parts of an object", f"{self.storage.uri}/{self.path}")
        if self._id is None:
            answer = self.storage.call("create_multipart_upload", self.path, Metadata={TOKEN: self.token})
            self._id = answer["UploadId"]
        self._room.acquire()
        data, self._part = self._part.getvalue(), io.BytesIO()
        self._parts.append(self._pool.submit(self._put, len(self._parts) + 1, data))

    def _put(self, number: int, data: bytes) -> tuple[str, bytes]:
        try:
            md5 = _md5(data)
            answer = self.storage.call(
                "upload_part", self.path, UploadId=self._id, PartNumber=number, Body=data, ContentMD5=_base64(md5)
            )
            return answer["ETag"], md5
        finally:
            self._room.release()

    @staticmethod
    def _raise_first(parts: Iterable[Future[tuple[str, bytes]]]) -> None:
        for part in parts:
            if part.done():
                part.result()


def _of_md5s(head: Mapping[str, Any], like: str) -> bool:
    """Whether the object's ETag is made of MD5s as this one is: of the object, or of its parts' and their number."""
    if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
        return False
    pattern = r"[0-9a-f]{32}-\d+" if "-" in like else r"[0-9a-f]{32}"
    return re.fullmatch(pattern, head.get("ETag", "").strip('"')) is not None


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
