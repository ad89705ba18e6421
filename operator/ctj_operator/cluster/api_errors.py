"""What an API server may answer, in our words: foreign errors are translated here and nowhere else.

ApiError
|- NotFound          404
|- Gone              410: a watch's or list's version is too old; list again
|- AlreadyExists     409 on create
|- Stale             409: the stored object is newer than ours, or another uid
|- Refused           400, 403, 413, 422, ...: the same request will be refused again
|- Unavailable       429, 5xx, or no answer at all: worth trying again
LeadershipLost       not an answer: a write was not sent, since another process may be leading
"""

import json


class ApiError(Exception):
    """A request that did not succeed; `str()` is the server's own sentence."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float = 0.0):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NotFound(ApiError):
    """No such object."""


class Gone(ApiError):
    """The version asked for is not kept any more."""


class AlreadyExists(ApiError):
    """The name is taken."""


class Stale(ApiError):
    """The object changed (or was replaced by another) since it was read."""


class Refused(ApiError):
    """The server will not do this, now or later, without a change of the request or of its rules."""


class Unavailable(ApiError):
    """Overloaded, starting, or not reachable; `retry_after` says how long to wait at least."""


class LeadershipLost(Exception):
    """This process may not write any more."""


def translate(status: int, body: bytes, *, retry_after: str | None = None) -> ApiError:
    """Turn an unsuccessful answer (a `Status` document) into the matching error."""
    reason, message = _read_status(body)
    text = message or f"HTTP {status}"
    if status == 409:
        return (AlreadyExists if reason == "AlreadyExists" else Stale)(text, status=status)
    if status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
        return Unavailable(text, status=status, retry_after=seconds)
    kind = {404: NotFound, 410: Gone}.get(status, Refused)
    return kind(text, status=status)


def _read_status(body: bytes) -> tuple[str, str]:
    try:
        document = json.loads(body)
    except ValueError:
        return "", body[:512].decode(errors="replace").strip()
    if not isinstance(document, dict):
        return "", ""
    return str(document.get("reason", "")), str(document.get("message", ""))
