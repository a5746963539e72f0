"""The address of a log in an object store: its URL, and the options `store.*`.

An address holds no secret, so it may be printed and pickled. Each process makes its own client from
it. Secrets come from the environment, from the instance, or from a provider that an option names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self
from urllib.parse import urlsplit

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.metadata.address import PATH, SCHEMES, shown

ENDPOINT: Final = "store.endpoint"
REGION: Final = "store.region"
ALLOW_HTTP: Final = "store.allow_http"
CREDENTIALS: Final = "store.credentials"
OPTIONS: Final = (ENDPOINT, REGION, ALLOW_HTTP, CREDENTIALS)
_PREFIX: Final = "store."
_TRUTH: Final = {"true": True, "false": False}
_HAS_ENDPOINT: Final = ("s3", "az")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART: Final = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]+")


def is_store_url(path: str) -> bool:
    """Return whether a path names an object store, by its scheme.

    Raises InvalidInputError if one of the two slashes is missing.
    """
    scheme, separator, rest = path.partition(":/")
    if not separator or scheme.lower() not in SCHEMES:
        return False
    if not rest.startswith("/"):
        raise InvalidInputError(
            f"{shown(path)}: the address of an object store has two slashes (expected "
            f"{shown(f'{scheme}://{rest}')}). Write both, and give it as text, since a Path keeps "
            "one of them."
        )
    return True


def store_address(options: Mapping[str, str]) -> StoreAddress | None:
    """Return the address that the option `path` and the options `store.*` give.

    Returns None if the path names a directory. Raises InvalidInputError, also for options `store.*`
    given with a directory.
    """
    path = next((value for key, value in options.items() if key.lower() == PATH), "").strip()
    if is_store_url(path):
        return StoreAddress.parse(path, options)
    for name in store_options(options):
        raise InvalidInputError(
            f"option {name!r}: path {shown(path)!r} names no object store. Leave the option out."
        )
    return None


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The place of a log: a bucket, or a container of Azure, and a prefix in it."""

    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    allow_http: bool = False
    credentials: str | None = None
    """The name of a provider, as `module:name`."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @property
    def is_in_memory(self) -> bool:
        """Whether the store ends with the process that opened it."""
        return self.scheme == "memory"

    @property
    def options(self) -> dict[str, str]:
        """The options `store.*` that complete its URL."""
        given = {ENDPOINT: self.endpoint, REGION: self.region, CREDENTIALS: self.credentials}
        found = {name: text for name, text in given.items() if text is not None}
        return {**found, ALLOW_HTTP: "true"} if self.allow_http else found

    def below(self, name: str) -> Self:
        """Return the address one level below."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)

    @classmethod
    def parse(cls, url: str, options: Mapping[str, str] | None = None) -> Self:
        """Return the address that a URL and the options `store.*` give; other options are left out.

        Raises InvalidInputError, which never repeats what may be a secret.
        """
        bucket, prefix = _parts(url)
        given = store_options(options or {})
        scheme = url.partition("://")[0].lower()
        address = cls(
            scheme,
            bucket,
            prefix,
            given.get(ENDPOINT),
            given.get(REGION),
            _truth(given.get(ALLOW_HTTP, "false")),
            given.get(CREDENTIALS),
        )
        address._check()
        return address

    def _check(self) -> None:
        if self.region is not None and self.scheme != "s3":
            raise InvalidInputError(f"{self}: only s3:// has regions. Remove option {REGION!r}.")
        if self.credentials is not None:
            module, _, name = self.credentials.partition(":")
            if not module or not name.isidentifier():
                raise InvalidInputError(
                    f"option {CREDENTIALS!r} does not name a provider (expected module:name). "
                    "Give the name of a function or class, never a secret."
                )
        if self.endpoint is None:
            return
        if self.scheme not in _HAS_ENDPOINT:
            raise InvalidInputError(
                f"{self}: only s3:// and az:// have endpoints. Remove option {ENDPOINT!r}."
            )
        parts = urlsplit(self.endpoint)
        if any(sign in self.endpoint for sign in "@?#"):
            raise InvalidInputError(
                f"option {ENDPOINT!r} holds more than a host and a path. {_NO_SECRETS}"
            )
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidInputError(
                f"option {ENDPOINT!r} is not the address of a server "
                f"(expected https://host, found {self.endpoint!r})."
            )
        if parts.scheme == "http" and not self.allow_http:
            raise InvalidInputError(
                f"option {ENDPOINT!r} is {self.endpoint!r}, which is not encrypted. "
                f"Use https, or set option {ALLOW_HTTP!r} to true."
            )


_NO_SECRETS: Final = (
    "Secrets come from the environment, or from a provider that option "
    f"{CREDENTIALS!r} names. Remove them from the address."
)


def _parts(url: str) -> tuple[str, str]:
    """Return the bucket and the prefix of a URL."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in SCHEMES:
        raise InvalidInputError(
            f"the address names no object store (expected one of {', '.join(SCHEMES)}, "
            f"found {shown(url)[:20]!r})."
        )
    if "@" in rest or "?" in rest or "#" in rest:
        raise InvalidInputError(
            f"an address {scheme}://... holds user information, a query or a fragment "
            f"(expected a bucket and a prefix). {_NO_SECRETS}"
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInputError(
            f"{url}: the address has no bucket (expected {scheme}://bucket/prefix, found "
            f"{bucket!r} as the bucket)."
        )
    if prefix and not all(map(_PART.fullmatch, prefix.split("/"))):
        raise InvalidInputError(
            f"{url}: the prefix {prefix!r} is not one that every store keeps as it is (expected "
            "letters, digits, '-', '_', '.' and '=' between slashes)."
        )
    return bucket, prefix


def store_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options `store.*` by their names; letter case is ignored, as Spark does."""
    names = {name.lower(): name for name in OPTIONS}
    found = {}
    for key, value in options.items():
        if not key.lower().startswith(_PREFIX):
            continue
        name = names.get(key.lower())
        if name is None:
            raise InvalidInputError(
                f"option {key!r} is unknown (expected one of {', '.join(OPTIONS)}). {_NO_SECRETS}"
            )
        found[name] = value.strip()
    return found


def _truth(text: str) -> bool:
    try:
        return _TRUTH[text.lower()]
    except KeyError:
        raise InvalidInputError(
            f"option {ALLOW_HTTP!r}: expected true or false, found {text!r}."
        ) from None
