"""What an S3 server and its client say, as OSErrors that tell by type and number what may pass. Knows no storage."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

REFUSED = {  # a HEAD has no body to say more than 400
    "400", "401", "403", "AccessDenied", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId",
    "InvalidClientTokenId", "InvalidToken", "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
DAMAGED = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}  # on the way
CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
GONE = "NoSuchUpload"
WITHOUT_CREDENTIALS = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.NoAuthTokenError,
    boto.TokenRetrievalError, boto.SSOError,
)  # fmt: skip
TIMED_OUT = (boto.ReadTimeoutError, boto.ConnectTimeoutError)
CUT_OFF = (
    boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, ResponseParserError, aiohttp.ClientError,
)  # fmt: skip


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """What goes wrong inside is raised as an OSError about the object `where`."""
    try:
        yield
    except Exception as error:
        known = _known(error, where)
        if known is error:
            raise
        raise known from error


def _known(error: Exception, where: str) -> Exception:
    """The trouble as an OSError that says by its type and number whether it may pass."""
    code = code_of(error)
    # Some stores leave out which condition it was.
    if isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412"):
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where)
    if isinstance(error, (PermissionError, *WITHOUT_CREDENTIALS)) or code in REFUSED:
        return PermissionError(errno.EACCES, str(error), where)
    if code in DAMAGED:
        return OSError(errno.EIO, f"damaged on the way: {error}", where)
    if code == GONE:
        return OSError(errno.EIO, "the upload is gone: somebody ended it", where)
    if isinstance(error, TIMED_OUT):
        return TimeoutError(errno.ETIMEDOUT, str(error), where)
    if isinstance(error, CUT_OFF):
        return ConnectionError(errno.EIO, str(error), where)
    return error


def code_of(error: BaseException | None) -> str:
    """The server's word for it; empty where the server said nothing."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
