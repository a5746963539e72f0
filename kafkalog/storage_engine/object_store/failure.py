"""Failures of an object store in our words.

The text of obstore's errors is never repeated: it may hold a signed URL. Only the status, the
store's code for it, and what a few known words say are taken over.
"""

from __future__ import annotations

import re
from typing import Final

from kafkalog.errors import StorageError

_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_PATH: Final = re.compile(r'\bpath: "((?:[^"\\]|\\.){1,1024})"')
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_PASSING: Final = frozenset({"408", "409", "412", "425", "429", "500", "502", "503", "504"})
"""The statuses of requests that may succeed if they are repeated; all others are final."""
_PASSING_CODES: Final = frozenset({"RequestTimeout", "IncompleteBody", "InternalError", "SlowDown"})
"""The codes of a store that say so whatever the status: S3 answers a slow body with 400."""
_OVERLOADED: Final = ("429", "503")
_REGION: Final = (
    "The bucket is in another region, or at another address. Set store.region or AWS_REGION to its "
    "region, and correct store.endpoint if there is one."
)
_ADVICE: Final = {
    "RequestTimeTooSkewed": "Set the clock of this host.",
    "NoSuchBucket": "Create the bucket, or correct the address.",
    "ContainerNotFound": "Create the container, or correct the address.",
    "403": "Allow this identity to list, read, write and delete objects. A store also answers 403 "
    "for a missing object if the identity may not list.",
    "401": "Give this process credentials that the store knows.",
    "429": "Send fewer requests, and try again.",
    "503": "Send fewer requests, and try again.",
    "AuthorizationHeaderMalformed": _REGION,
    "ExpiredToken": "Give this process credentials that have not expired.",
    "301": _REGION,
    "307": _REGION,
    "400": "Correct the address, the region and the credentials: it does not take such a request.",
    "404": "Create the bucket, or correct the address.",
    "405": "Use a store that takes this request, or correct the address.",
    "501": "Use a store that has this request, or correct the address.",
}
_ADVICE_OF_FINAL: Final = "Correct the address, or use another store."
_BEHIND_THE_END: Final = "StartTooLarge"
"""What obstore's store in memory answers where others answer 416."""
_INSTANCE: Final = "169.254.169.254"
"""The server of a cloud's instance, which is asked for credentials if there are none."""
_NO_CREDENTIALS: Final = (
    "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3, "
    "GOOGLE_APPLICATION_CREDENTIALS for gs, or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY for az."
)
_WORDS: Final = {
    "MissingAccessKey": _NO_CREDENTIALS,
    "TimedOut": "the store did not answer in time. Try again.",
    "ConnectionRefused": "nobody answers at its address. Correct the address, or try again.",
    "dns error": "its host has no address. Correct the address.",
    "BadScheme": "its address begins with http://, which is not encrypted and has to be allowed. "
    "Set store.allow_http to true, or AWS_ALLOW_HTTP=true for s3 and AZURE_ALLOW_HTTP=true for "
    "az; or use https://.",
    "BareRedirect": f"the store sent this request elsewhere and did not say where. {_REGION}",
    "MissingEtag": "the answer has no ETag, so a log cannot be kept there. Correct the address, or "
    "use another store.",
}
"""The meaning of words that the text of an error without a status may hold."""
_FINAL: Final = ("MissingAccessKey", "BadScheme", "BareRedirect", "MissingEtag")
"""Those of them with which a repeated request would fail too."""


class ObjectMissingError(StorageError):
    """An object is not in the store."""


class SweptError(StorageError):
    """An object that a commit would add is older than a sweep, which may delete it."""


class UnplannedExtentError(StorageError):
    """A task has to look for a marker beyond the extents that it was given."""


class PermanentError(StorageError):
    """The store refused a request, and would refuse it again."""


class ShortObjectError(PermanentError):
    """An object ends before the range that was asked for."""


class OverloadedError(StorageError):
    """The store asked for fewer requests (503 or 429)."""


class RefusedError(StorageError):
    """A conditional request found its condition false: somebody else was first."""


def described(request: str, place: str, error: Exception) -> StorageError:
    """Return the error to raise for a request on a place; it has no cause and no secret."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    is_missing = isinstance(error, FileNotFoundError)
    if is_missing and request == "PUT" and status and not (code and code[1] == "NoSuchKey"):
        is_missing = False  # there is no bucket to write to, and this store does not say so
    if is_missing and not any(word in text for word in _NO_BUCKET):
        return ObjectMissingError(f"{place}: the object is missing. Restore it, or read again.")
    if request == "LIST" and type(error).__name__ == "InvalidPathError":
        found_path = _PATH.search(text)
        return PermanentError(
            f"{place}: the store has an object whose name cannot be used here (expected no empty "
            "part, no '.', no '..' and no control character between slashes, found "
            f"'{found_path[1] if found_path else '?'}'). Delete it, or rename it."
        )
    if request == "GET" and (_BEHIND_THE_END in text or (status and status[1] == "416")):
        return ShortObjectError(f"{place}: the object is shorter than the range. Restore it.")
    if _INSTANCE in text:
        return PermanentError(f"{place}: {_NO_CREDENTIALS}")
    found = [code[1]] if code else []
    is_final = status is not None and status[1] not in _PASSING
    is_final = is_final and _PASSING_CODES.isdisjoint(found)
    if status:
        if is_final or status[1] in _PASSING:
            found.append(status[1])
        otherwise = _ADVICE_OF_FINAL if is_final else "Try again."
        advice = next((_ADVICE[word] for word in found if word in _ADVICE), otherwise)
        answer = f"{status[1]} {code[1]}" if code else status[1]
        problem = f"the store answered {answer} to {request}. {advice}"
    else:
        cause = next((_WORDS[word] for word in _WORDS if word in text), "")
        problem = f"{request} failed: {cause or 'the connection broke. Try again.'}"
    made: type[StorageError] = StorageError
    if not status and any(word in text for word in _FINAL):
        made = PermanentError
    if type(error).__name__ in {"AlreadyExistsError", "PreconditionError"}:
        made = RefusedError
    elif status and status[1] in _OVERLOADED:
        made = OverloadedError
    elif is_final:
        made = PermanentError
    return made(f"{place}: {problem}")
