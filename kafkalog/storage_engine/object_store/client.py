"""The client of an object store: all requests, and the one module that calls obstore.

Rules
-----
- A conditional write is sent once: a repeated request would find its own object and report
  another's. Reads, and writes of a name that nobody else has, are repeated with growing pauses.
- A read repeats itself after each answer that proves nothing, so also after a 412 or 409. A 503
  halves the reads that are under way at once.
- A store may be silent for 30 s, but a line may be slow. An answer takes as long as its bytes keep
  coming, and a body that is sent as long as SLOWEST_LINE needs for it.
- A range is as long as it was asked for, or the read fails; obstore would shorten it.
- An object of another size than expected, or one too large to be read at once, is damage. Nothing
  of it is read beyond that size.
- A client is never pickled, as its store holds the secret. Each process makes one from the address.
- Errors are StorageErrors without a cause, since a cause could hold a signed URL.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self, TypeVar

from kafkalog.errors import CorruptLogError, InvalidInputError, StorageError
from kafkalog.storage_engine.fs.files import WHOLE_SIZE_MAX, is_users, users
from kafkalog.storage_engine.object_store.address import CREDENTIALS, StoreAddress
from kafkalog.storage_engine.object_store.failure import (
    ObjectMissingError,
    OverloadedError,
    PermanentError,
    RefusedError,
    ShortObjectError,
    described,
)
from kafkalog.storage_engine.object_store.fork_guard import check_and_note_use
from kafkalog.storage_engine.object_store.read_throttle import ReadThrottle

if TYPE_CHECKING:
    from kafkalog.storage_engine.fs.files import Buffer

PATIENCE_S: Final = 60.0
"""How long a request that may be repeated is repeated."""
TIMEOUT_S: Final = 30.0
"""How long a store may be silent, before its answer and within it."""
SLOWEST_LINE: Final = 128 << 10
"""The bytes a second at which a body is sent in time."""
_LONGEST_ANSWER_S: Final = 3600
"""How long an answer may take whose bytes keep coming."""
PUT, GET, HEAD, LIST, DELETE = "PUT", "GET", "HEAD", "LIST", "DELETE"
_PIECE_SIZE: Final = 64 << 10
"""The least bytes of a piece; a thread keeps the memory of its largest one."""
_PAGE: Final = 1000
"""The most names that a store lists, and deletes, in one request."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_T = TypeVar("_T")


class Outcome(Enum):
    """The outcome of a conditional write."""

    DONE = "done"
    EXISTS = "exists"
    """Another's object is there, or will be at once (412 or 409): look."""
    UNKNOWN = "unknown"
    """No answer, or one that proves nothing (5xx): look."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's content and its tag, which changes with it."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object in a listing."""

    name: str
    size: int
    modified_ms: int


class ObjectReader(Protocol):
    """A reader of parts of objects: a client, or files that replace some."""

    @property
    def address(self) -> StoreAddress:
        """The address of the log, for errors."""

    def first_bytes(self, name: str, size: int) -> bytes:
        """Return an object's first `size` bytes, or fewer. Raises StorageError."""

    def fetch(self, name: str, position: int, size: int) -> memoryview:
        """Return `size` bytes at `position`; raises CorruptLogError if there are fewer."""


class ObjectClient:
    """One process's client of a log's objects; threads may share it. Names are below the prefix."""

    def __init__(
        self, address: StoreAddress, *, patience_s: float = PATIENCE_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.address = address
        check_and_note_use(str(address))
        try:
            import obstore
        except ImportError:
            raise InvalidInputError(
                f"{address}: the package obstore is missing. Run: pip install obstore"
            ) from None
        self._obstore: Any = obstore
        self._errors = (obstore.exceptions.BaseError, OSError, ValueError)
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._credentials = UsersCredentials.of(address)
        self._stores: dict[tuple[float, float | None], Any] = {}
        self._store = self._waiting(0, patience_s)
        self._once = self._waiting(0, None)
        self.throttle = ReadThrottle()
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ObjectClient({self.address})"

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            f"{self.address}: a client of an object store is never copied or pickled, as it holds "
            "secrets. Make one from the address in each process."
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """The requests so far, by kind; a repeated one counts once."""
        with _sent_lock:
            return dict(self._counts)

    def create(self, name: str, data: bytes) -> Outcome:
        """Create an object unless there is one of that name; never repeats the request."""
        return self._conditional(name, data, "create")

    def replace(self, name: str, data: bytes, etag: str) -> Outcome:
        """Overwrite an object if it has that tag still; never repeats the request."""
        return self._conditional(name, data, {"e_tag": etag})

    def _conditional(self, name: str, data: bytes, mode: object) -> Outcome:
        store = self._waiting(len(data), None)
        try:
            self._ask(PUT, name, lambda: self._obstore.put(store, self._key(name), data, mode=mode))
        except RefusedError:
            return Outcome.EXISTS
        except PermanentError:
            raise
        except StorageError:
            return Outcome.UNKNOWN
        return Outcome.DONE

    def put_unique(self, name: str, *data: Buffer) -> None:
        """Write an object of some pieces, not copied, whose name nobody else uses.

        Raises StorageError.
        """
        store = self._waiting(sum(map(len, data)), None)
        self._repeated(
            PUT,
            name,
            lambda: self._obstore.put(store, self._key(name), [*data], use_multipart=False),
        )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is fine. Raises StorageError."""
        keys = [self._key(name) for name in names]
        for start in range(0, len(keys), _PAGE):
            self._delete(keys[start : start + _PAGE])

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects by their whole names, by one request if none is missing.

        A store without bulk deletes, such as Azure's, ends at one that is missing. Halves of the
        list are then tried, until that one is alone.
        """
        try:
            self._repeated(DELETE, "", lambda: self._obstore.delete(self._once, [*keys]))
        except ObjectMissingError:
            half = len(keys) // 2
            for part in (keys[:half], keys[half:]) if half else ():
                self._delete(part)

    def get(self, name: str) -> StoredObject | None:
        """Return a whole object, or None if it is missing.

        Raises StorageError, and CorruptLogError for an object above WHOLE_SIZE_MAX.
        """

        def ask() -> StoredObject:
            found = self._obstore.get(self._once, self._key(name))
            size = found.meta["size"]
            self.check_whole(name, size)
            data = bytes(found.bytes())
            self._check_answer(name, size, len(data))
            return StoredObject(data, found.meta["e_tag"] or "")

        try:
            return self._read(GET, name, ask)
        except ObjectMissingError:
            return None

    def check_whole(self, name: str, size: int) -> None:
        """Raise CorruptLogError for an object of that size if it is too large to be in memory."""
        if size > WHOLE_SIZE_MAX:
            expected = f"at most {WHOLE_SIZE_MAX} bytes"
            raise CorruptLogError(self._place(name), WHOLE_SIZE_MAX, expected, f"{size}")

    def pieces(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield a whole object of `size` bytes, some 400 KiB at a time, by one request.

        A piece is gone once the next one is asked for, so a thread holds one. Raises StorageError,
        and CorruptLogError for an object of another size.
        """
        key = self._key(name)

        def ask() -> Iterator[Buffer]:
            found = self._obstore.get(self._store, key)
            if (there := found.meta["size"]) != size:
                least, expected = min(size, there), f"an object of {size} bytes"
                raise CorruptLogError(self._place(name), least, expected, f"{there}")
            return iter(found.stream(min_chunk_size=_PIECE_SIZE))

        stream = self._read(GET, name, ask)
        found = 0
        while piece := self._ask(GET, name, lambda: next(stream, b""), requests=0):
            found += len(piece)
            with memoryview(piece) as view:
                del piece
                yield view
        self._check_answer(name, size, found)

    def first_bytes(self, name: str, size: int) -> bytes:
        """Return an object's first `size` bytes, or all if it has fewer. Raises StorageError."""
        try:
            return bytes(self._range(name, 0, size))
        except ShortObjectError:
            return b""

    def fetch(self, name: str, position: int, size: int) -> memoryview:
        """Return `size` bytes at `position`, not copied.

        Raises StorageError, and CorruptLogError if there are fewer.
        """
        if not size:
            return memoryview(b"")  # no store answers an empty range
        try:
            data = memoryview(self._range(name, position, size))
        except ShortObjectError:
            data = memoryview(b"")
        if len(data) != size:
            end = position + len(data)
            expected = f"at least {position + size} bytes"
            raise CorruptLogError(self._place(name), end, expected, "the end")
        return data

    def _range(self, name: str, position: int, size: int) -> Buffer:
        """Return bytes of an object, fewer at its end; raises ShortObjectError behind it."""
        key = self._key(name)
        found: Buffer = self._read(
            GET,
            name,
            lambda: self._obstore.get_range(self._once, key, start=position, length=size),
        )
        return found

    def head(self, name: str) -> ObjectEntry | None:
        """Return an object's entry, or None if it is missing. Raises StorageError."""
        try:
            found = self._read(HEAD, name, lambda: self._obstore.head(self._once, self._key(name)))
        except ObjectMissingError:
            return None
        return self._entry(found)

    def list(self, prefix: str, after: str | None = None) -> Iterator[ObjectEntry]:
        """Yield the objects below a prefix, by name; a page of 1000 is fetched when it is reached.

        Raises StorageError, also for a store that lists them out of order.
        """
        for page in self._pages(prefix, after):
            yield from page

    def newest(self, prefix: str, count: int) -> Sequence[ObjectEntry]:
        """Return the first entries below a prefix, at most 1000, by one request.

        Names hold inverted numbers, so the first one is the newest.
        """
        return next(self._pages(prefix, None), [])[: min(count, _PAGE)]

    def prefixes(self) -> Sequence[str]:
        """Return the names one level below that have objects below; one listing."""

        def ask() -> Sequence[str]:
            found = self._obstore.list_with_delimiter(self._once, self._key(""))
            return [each.removeprefix(self._key("")) for each in found["common_prefixes"]]

        return self._read(LIST, "", ask)

    def _pages(self, prefix: str, after: str | None) -> Iterator[Sequence[ObjectEntry]]:
        last = after
        while True:
            entries = self._page(prefix, last)
            names = [*([] if last is None else [last]), *(entry.name for entry in entries)]
            if any(name >= following for name, following in itertools.pairwise(names)):
                raise PermanentError(
                    f"{self._place(prefix)}: the store lists objects out of order (expected by "
                    "name). Use another kind of bucket."
                )
            if entries:
                yield entries
            if len(entries) < _PAGE:
                return
            last = names[-1]

    def _page(self, prefix: str, after: str | None) -> Sequence[ObjectEntry]:
        """Return a page, by one request."""
        offset = None if after is None else self._key(after)

        def ask() -> Sequence[ObjectEntry]:
            pages = self._obstore.list(
                self._once, self._key(prefix), offset=offset, chunk_size=_PAGE
            )
            return [self._entry(each) for each in next(iter(pages), ())]

        return self._read(LIST, prefix, ask)

    def probe(self, name: str, *, creators: int = 8, names: int = 8, rounds: int = 4) -> None:
        """Race creators for objects below `name`, and delete these.

        Raises PermanentError for a store that lets two creators of one name win, that overwrites an
        object whose tag has changed, or that lists out of order.
        """
        used = [f"{name}/{number}" for number in range(names * rounds)]
        made = [*used, f"{name}/tag"]
        try:
            self._check_writes(name, used, creators, names)
        except BaseException:
            with contextlib.suppress(StorageError):  # what the store does wrong says more
                self.delete(made)
            raise
        self.delete(made)

    def _check_writes(self, name: str, used: Sequence[str], creators: int, names: int) -> None:
        written = []
        with ThreadPoolExecutor(creators) as pool:
            for start in range(0, len(used), names):
                barrier = threading.Barrier(creators)
                wanted = used[start : start + names]
                races = [
                    pool.submit(self._race, wanted, barrier, number) for number in range(creators)
                ]
                outcomes = zip(*(race.result() for race in races), strict=True)
                for raced, found in zip(wanted, outcomes, strict=True):
                    if self._check_race(raced, found):
                        written.append(raced)
        self._check_tags(f"{name}/tag")
        listed = [entry.name for entry in self.list(name) if entry.name in used]
        if listed != sorted(written):
            raise PermanentError(
                f"{self.address}: the store does not list what was written to it (expected "
                f"{len(written)} objects, found {len(listed)}). Use another store."
            )

    def _race(
        self, names: Sequence[str], barrier: threading.Barrier, number: int
    ) -> Sequence[Outcome]:
        barrier.wait()
        return [self.create(name, b"%d" % number) for name in names]

    def _check_race(self, name: str, outcomes: Sequence[Outcome]) -> bool:
        """Return whether the object exists: each creator may have had no answer, or a failure."""
        winners = [number for number, each in enumerate(outcomes) if each is Outcome.DONE]
        found = self.get(name)
        if len(winners) > 1 or (winners and found and found.data != b"%d" % winners[0]):
            raise PermanentError(
                f"{self.address}: the store lets {len(winners)} creators of one object win "
                "(expected 1). Use a store with conditional PUT."
            )
        if winners and found is None:
            raise PermanentError(f"{self._place(name)}: the store lost an object. Use another one.")
        return found is not None

    def _check_tags(self, name: str) -> None:
        self.put_unique(name, b"0")
        first = self.get(name)
        tag = first.etag if first else ""
        if {self.replace(name, b"%d" % turn, tag) for turn in (1, 2)} == {Outcome.DONE}:
            raise PermanentError(
                f"{self.address}: the store overwrites an object whose tag has changed. "
                "Use a store with conditional PUT."
            )

    def _waiting(self, size: int, patience_s: float | None) -> Any:
        """Return obstore's store that waits for the answer to a body of `size` bytes.

        obstore takes the sending of a body for silence, and has one timeout for each store. Waits
        are therefore doubled until they suffice, so there are few stores.
        """
        silence_s = self._timeout_s
        while silence_s * SLOWEST_LINE < size:
            silence_s *= 2
        wanted = silence_s, patience_s
        if wanted not in self._stores:
            self._stores[wanted] = _opened(self.address, silence_s, patience_s, self._credentials)
        return self._stores[wanted]

    def _read(self, kind: str, name: str, act: Callable[[], _T]) -> _T:
        """Send a request that changes nothing, as `_repeated` does, when the store has room for it.

        A store that asks for fewer requests gets fewer at once.
        """

        def throttled() -> _T:
            with self.throttle.turn() as turn:
                try:
                    found = act()
                    self.throttle.raise_a_little()
                    return found
                except self._errors as fault:
                    if not is_users(fault) and isinstance(
                        self._described(kind, name, fault), OverloadedError
                    ):
                        self.throttle.halve(turn)
                    raise

        return self._repeated(kind, name, throttled)

    def _repeated(self, kind: str, name: str, act: Callable[[], _T]) -> _T:
        """Send a request again and again while it fails and patience lasts.

        An answer that says for certain that the object is missing, or that the store will never
        answer otherwise, ends it.
        """

        def repeated() -> _T:
            end, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
            while True:
                try:
                    return self._done(kind, name, act)
                except (ObjectMissingError, PermanentError):
                    raise
                except StorageError:
                    if time.monotonic() >= end:
                        raise
                time.sleep(min(pause, max(0.0, end - time.monotonic())) * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

        return self._ask(kind, name, repeated)

    def _ask(self, kind: str, name: str, act: Callable[[], _T], *, requests: int = 1) -> _T:
        """Send a request, or read on in an answer (no `requests`); errors become StorageErrors."""
        check_and_note_use(self._place(name))
        with _sent_lock:
            self._counts[kind] += requests
            _sent.setdefault(self.address, Counter())[kind] += requests
        return self._done(kind, name, act)

    def _done(self, kind: str, name: str, act: Callable[[], _T]) -> _T:
        """Call obstore; its errors become StorageErrors."""
        error: Exception | None = None
        try:
            return act()
        except self._errors as fault:
            # obstore's own OSErrors have no errno.
            if is_users(fault):
                raise
            error = fault
        self._credentials.pass_on()
        raise self._described(kind, name, error)  # outside of the handler: without context

    def _described(self, kind: str, name: str, fault: Exception) -> StorageError:
        return described(kind, self._place(name), fault)

    def _check_answer(self, name: str, expected: int, found: int) -> None:
        if expected != found:
            raise StorageError(
                f"{self._place(name)}: the store's answer ended early (expected {expected} bytes, "
                f"found {found}). Try again."
            )

    def _key(self, name: str) -> str:
        return f"{self.address.prefix}/{name}" if self.address.prefix else name

    def _place(self, name: str) -> str:
        return f"{self.address}/{name}" if name else str(self.address)

    def _entry(self, found: Mapping[str, Any]) -> ObjectEntry:
        name = found["path"].removeprefix(self._key(""))
        modified: datetime.datetime = found["last_modified"]
        return ObjectEntry(name, found["size"], int(modified.timestamp() * 1000))


@functools.lru_cache
def shared_client(address: StoreAddress) -> ObjectClient:
    """Return this process's client of an address, for tasks that follow each other."""
    return ObjectClient(address)


_sent_lock = threading.Lock()
_sent: dict[StoreAddress, Counter[str]] = {}


def requests_sent(address: StoreAddress) -> Counter[str]:
    """Return the requests that all clients of an address in this process have sent, by kind."""
    with _sent_lock:
        return Counter(_sent.get(address))


_memory_lock = threading.Lock()
_memory_stores: dict[str, Any] = {}
"""The stores in memory of this process, by name."""


def _opened(
    address: StoreAddress, silence_s: float, patience_s: float | None, credentials: UsersCredentials
) -> Any:
    """Return obstore's store for an address; without patience it repeats no request.

    `silence_s` is what the store may take until an answer begins, and between two pieces of it.
    """
    from obstore import exceptions
    from obstore import store as stores

    if address.is_in_memory:
        with _memory_lock:
            return _memory_stores.setdefault(address.bucket, stores.MemoryStore())
    retries: dict[str, Any] = {"max_retries": 0}
    if patience_s is not None:
        retries = {"retry_timeout": datetime.timedelta(seconds=patience_s), "max_retries": 1000}
        retries["backoff"] = {"max_backoff": datetime.timedelta(seconds=min(5.0, patience_s))}
    common: dict[str, Any] = {
        "retry_config": retries,
        "client_options": {
            "allow_http": address.allow_http or _environment_allows_http(address.scheme),
            "read_timeout": datetime.timedelta(seconds=silence_s),
            "timeout": datetime.timedelta(seconds=max(silence_s, _LONGEST_ANSWER_S)),
        },
    }
    if address.credentials is not None:
        common["credential_provider"] = credentials
    if address.endpoint is not None:
        common["endpoint"] = address.endpoint
    if address.region is not None:
        common["region"] = address.region
    made = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
    error: Exception | None = None
    try:
        return made(address.bucket, **common)
    except (exceptions.BaseError, ValueError, OSError) as fault:
        error = fault
    raise described("its client", str(address), error)


def _environment_allows_http(scheme: str) -> bool:
    """Return what obstore finds in the environment by itself, unless it gets other options."""
    name = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}.get(scheme, "")
    return os.environ.get(name, "").lower() == "true"


class UsersCredentials:
    """The user's provider of credentials, which obstore calls; its last error is the user's.

    obstore turns that error into text of its own, so it is kept here until the request fails.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._fault: Exception | None = None

    @classmethod
    def of(cls, address: StoreAddress) -> Self:
        """Return the provider that an address names; raises InvalidInputError if it is not here."""
        return cls(None if address.credentials is None else _provider(address.credentials))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)  # obstore's own providers have configs

    def __call__(self) -> Any:
        """Return what the provider returns; raises what it raises."""
        with self._kept():
            found = self._provider()
        return self._awaited(found) if inspect.isawaitable(found) else found

    async def _awaited(self, found: Any) -> Any:
        with self._kept():
            return await found

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            with users():
                yield
        except Exception as fault:
            self._fault = fault
            raise

    def pass_on(self) -> None:
        """Raise the provider's error, if a request has failed because of one."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault


def _provider(named: str) -> Any:
    """Return the provider of credentials that an option names; a class is called once."""
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise InvalidInputError(
            f"option {CREDENTIALS!r}: there is no {named!r} here (expected module:name of a "
            "function or class). Install its module in every process."
        ) from None
    return found() if isinstance(found, type) else found
