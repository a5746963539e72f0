"""The commit log of a log in an object store: who creates object number n has made commit n.

Rules
-----
- A commit is one create, sent once, then a read of the boundary. Unless the create is "done", the
  writer reads the object: its token says whose it is.
- A commit counts if the boundary, read later, is below its number. Otherwise the collector may have
  deleted the true commit of that number, and the process opens the log again.
- A writer that comes second reads what came first, and tries again. Its read of the boundary, after
  its own commit, decides on all of them.
- After a failure between create and boundary the commit is in doubt. A retry finds the writer's
  batch id in the state. An abort, by any process, fills the number at which it could land.
- The writer of the commit after which a snapshot is due writes it. One may be missing.
- The token of each object begins with the log's id, so a process notices that another log has taken
  the place of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kafkalog.errors import (
    CommitInDoubtError,
    CorruptLogError,
    InvalidInputError,
    KafkaLogError,
    StorageError,
)
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome, StoredObject
from kafkalog.storage_engine.object_store.nearby_logs import check_is_free, nearby
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from kafkalog.storage_engine.object_store.store_state import StoreState

_logger = logging.getLogger(__name__)
PATIENCE_S: Final = 60.0
HITS_BEFORE_LIST: Final = 4
"""After so many new commits in a row a reader lists the rest, and fetches it side by side."""
CHECK_AFTER_S: Final = 60.0
"""A process that met no commit for so long asks whether the collector has passed it, and whether
the log is still there."""
_CONTENDED_S: Final = 10.0
"""So long after a miss a process takes care that others can commit too."""
_FETCHERS: Final = 8
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 2.0
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_NO_CHANGE: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
)
"""The errors of a commit with a right checksum and a content that no writer makes."""

Prepare = Callable[[StoreState], Mapping[str, Any] | None]
"""Returns what a commit changes in a state, or None if nothing is left to change."""


class CommitLog:
    """One process's view of the commit log; threads may share it.

    Opening it raises InvalidInputError if the place has no log, and StorageError.
    """

    def __init__(
        self,
        client: ObjectClient,
        *,
        patience_s: float = PATIENCE_S,
        elapsed: Callable[[], float] = lambda: time.clock_gettime(_CLOCK),
    ) -> None:
        self._client = client
        self._patience_s = patience_s
        self._elapsed = elapsed
        self._lock = threading.RLock()
        self._missed_s = self._committed_s = -math.inf
        self._took_s = 0.0
        self.is_replaced = False
        """Whether another log was found at the address."""
        self.log_id = self.id_of(client)
        self._state = self._loaded(StoreState())

    @staticmethod
    def id_of(client: ObjectClient) -> bytes:
        """Return the id of the log; one GET. Raises InvalidInputError if the place has no log.

        Raises StorageError if it has lost its mark.
        """
        mark = client.get(layout.STORED_LOG)
        if mark is None:
            remedy = ". Create one, or correct the address."
            if _has_remains(client):
                remedy = ", but commits of one. Open it to write, which makes the object again."
            elif client.address.is_in_memory:
                remedy = ". A store in memory belongs to the process that opened it: read it there."
            advice = nearby(client.address) or remedy
            raise InvalidInputError(
                f"{client.address}: there is no log (expected an object {layout.STORED_LOG})"
                f"{advice}"
            )
        place = f"{client.address}/{layout.STORED_LOG}"
        return NumberedObject.decode(place, layout.STORED_LOG_MAGIC, mark.data).token

    @classmethod
    def create(cls, client: ObjectClient, *, patience_s: float = PATIENCE_S) -> bool:
        """Create a log, after a probe of the store; return False if another process has begun it.

        The boundary is created first, so each log has one. It has the log's id. Raises
        InvalidInputError for a place inside or around another log, and StorageError.
        """
        if client.get(layout.STORED_LOG) is not None:
            return False
        check_is_free(client.address)
        _has_remains(client)
        token = os.urandom(16)
        client.probe(f"{layout.STORED_PROBE}/{token.hex()}")
        boundary = NumberedObject(layout.STORED_BOUNDARY_MAGIC, 0, token).encode()
        found = _created(client, layout.STORED_BOUNDARY, boundary, patience_s).data
        place = f"{client.address}/{layout.STORED_BOUNDARY}"
        log_id = NumberedObject.decode(place, layout.STORED_BOUNDARY_MAGIC, found).token
        mark = NumberedObject(layout.STORED_LOG_MAGIC, 0, log_id).encode()
        _created(client, layout.STORED_LOG, mark, patience_s)
        return log_id == token

    @property
    def state(self) -> StoreState:
        """The last known state; no request."""
        return self._state

    def poll(self) -> StoreState:
        """Return the newest state; one request if there is nothing new. Raises StorageError."""
        with self._lock:
            base = state = self._state
            boundary: int | None = None
            found = self._client.get(layout.stored_commit(base.number + 1))
            while found is not None:
                state, _ = self._after(state, found)
                if state.number - base.number == HITS_BEFORE_LIST:
                    self._state = self._loaded(base)
                    return self._state
                found, boundary = self._next(state.number + 1)
            return self._take(base, state, boundary)

    def _next(self, number: int) -> tuple[StoredObject | None, int | None]:
        """Return a commit, if it is there, and the boundary, if the store answered.

        Both are asked for at once. The boundary counts for the commits before: it is asked for
        after these were read.
        """
        checked_s = self._elapsed()
        found, boundary = self._fetched([layout.stored_commit(number), layout.STORED_BOUNDARY])
        return found, None if boundary is None else self._checked(boundary, checked_s)

    def _take(self, base: StoreState, state: StoreState, boundary: int | None = None) -> StoreState:
        """Take over commits that were read after `base`, if the collector has not passed it.

        A `boundary` that is given was fetched after these commits; without it, one is fetched if
        the state is another one, or too old.
        """
        is_late = self._elapsed() - self._checked_s > CHECK_AFTER_S
        if state is not base or is_late:
            passed = self.boundary() if boundary is None else boundary
            self._state = state if passed <= base.number else self._loaded(StoreState())
        return self._state

    def _after(self, state: StoreState, found: StoredObject) -> tuple[StoreState, bytes]:
        """Return the state after a commit that was read, and the token of the commit."""
        number = state.number + 1
        name = layout.stored_commit(number)
        commit = self._decoded(name, layout.STORED_COMMIT_MAGIC, found)
        try:
            if commit.number != number:
                raise ValueError(f"number {commit.number}")
            return state.apply(number, commit.content, len(found.data)), commit.token
        except _NO_CHANGE as fault:
            raise _unbelievable(self._place(name), f"commit {number}", fault) from fault

    def _decoded(self, name: str, magic: bytes, found: StoredObject) -> NumberedObject:
        """Return an object of the log; raises InvalidInputError for one of another log."""
        decoded = NumberedObject.decode(self._place(name), magic, found.data)
        if not decoded.token.startswith(self._mark):
            self.is_replaced = True
            raise InvalidInputError(
                f"{self._place(name)}: the log was deleted, and created again at its address, "
                f"while it was open (expected an object of log {self._mark.hex()}, found one of "
                f"{decoded.token[: len(self._mark)].hex()}). Open the log again; a stream needs a "
                "new checkpoint. Delete the object if a log that is opened finds it too."
            )
        return decoded

    @property
    def _mark(self) -> bytes:
        """The beginning of the token of each object of this log."""
        return self.log_id[: layout.STORED_TOKEN_ID]

    def boundary(self) -> int:
        """Return up to which number the collector may have deleted commits; one GET."""
        checked_s = self._elapsed()
        for _ in self._tries():
            found = self._client.get(layout.STORED_BOUNDARY)
            if found is not None:
                return self._checked(found, checked_s)
        raise StorageError(
            f"{self._place(layout.STORED_BOUNDARY)}: the object is missing. Restore the log."
        )

    def _checked(self, found: StoredObject, checked_s: float) -> int:
        """Return the number of a boundary that was asked for at a time."""
        boundary = self._decoded(layout.STORED_BOUNDARY, layout.STORED_BOUNDARY_MAGIC, found)
        self._checked_s = checked_s
        return boundary.number

    def _loaded(self, base: StoreState) -> StoreState:
        """Return the newest state: from `base`, or from the newest snapshot if that is later."""
        gap = ""
        for _ in self._tries():
            newest, snapshot, gap = self._listed(base.number)
            start: StoreState | None = base
            if snapshot > base.number:
                start = self._snapshot(snapshot)
            state = None if start is None or gap else self._through(start, newest)
            if start is not None and state is not None:
                if self.boundary() <= start.number:
                    return state
                base = StoreState()  # the collector has passed it
        raise StorageError(
            f"{self._place(layout.STORED_COMMITS)}: commits that were listed, or that follow the "
            f"last snapshot, are missing{gap}. Restore the log."
        )

    def _listed(self, known: int) -> tuple[int, int, str]:
        """Return the newest commit, the newest snapshot after `known`, or 0, and a gap in words.

        A commit is made after the one before it, so a gap is damage, or commits were deleted while
        they were listed. It can be of any length: nobody fetches the commits that it should have.
        """
        newest = following = 0
        for entry in self._client.list(layout.STORED_COMMITS):
            parsed = layout.parse_stored_name(entry.name)
            if parsed is None:
                continue
            number, is_snapshot = parsed
            newest = max(newest, number)
            least = max(number, known)
            if following > least + 1:
                return newest, 0, _gap(least + 1, following)
            if is_snapshot or number <= known:
                return newest, number if is_snapshot else 0, ""
            following = number
        return newest, 0, _gap(known + 1, following) if following > known + 1 else ""

    def _snapshot(self, number: int) -> StoreState | None:
        name = layout.stored_snapshot(number)
        found = self._client.get(name)
        if found is None:
            return None
        snapshot = self._decoded(name, layout.STORED_SNAPSHOT_MAGIC, found)
        try:
            if snapshot.number != number:
                raise ValueError(f"number {snapshot.number}")
            return StoreState.of_snapshot(number, snapshot.content)
        except _NO_CHANGE as fault:
            place = self._place(name)
            raise _unbelievable(place, f"the state after {number}", fault) from fault

    def _through(self, state: StoreState, newest: int) -> StoreState | None:
        """Return the state after the commit `newest`; None if a commit before it is missing."""
        names = [layout.stored_commit(number) for number in range(state.number + 1, newest + 1)]
        for found in self._fetched(names):
            if found is None:
                return None
            state, _ = self._after(state, found)
        return state

    def _fetched(self, names: Sequence[str]) -> Iterator[StoredObject | None]:
        if len(names) < 2:
            yield from map(self._client.get, names)
            return
        with ThreadPoolExecutor(min(_FETCHERS, len(names))) as pool:
            yield from pool.map(self._client.get, names)

    def commit(self, prepare: Prepare) -> StoreState:
        """Commit what `prepare` returns for the newest state; return the state after it.

        `prepare` is called again after each commit of another writer that comes first. It checks,
        and computes offsets, and changes nothing. Its KafkaLogErrors pass through if no commit has
        come since the last known state, which costs a poll; other errors pass through at once.

        Returns:
            The state after the commit, or the state in which `prepare` had nothing to change.

        Raises:
            CommitInDoubtError: The commit may be made, or may be made later.
            StorageError: It is not made.
        """
        with self._lock:
            state = self._state
            self._let_others_commit()
            while True:
                try:
                    change = prepare(state)
                    if change is not None:
                        state.check_unswept(change)
                except KafkaLogError:
                    if self._take(self._state, state) is state and self.poll() is state:
                        raise
                    state = self._state
                    continue
                if change is None:
                    if self._take(self._state, state) is state:
                        return state
                    state = self._state
                    continue
                base = state
                is_committed, state = self._tried(base, change)
                if is_committed:
                    self._write_snapshot()
                    return state
                if state.number == base.number + HITS_BEFORE_LIST:
                    self._take(self._state, state)
                    state = self.poll()

    def _tried(self, base: StoreState, change: Mapping[str, Any]) -> tuple[bool, StoreState]:
        """Try to make the commit after `base`; return whether it is made, and the state after it.

        Commits of others that came first are read side by side. They are not checked against the
        boundary yet: so the next try takes as long as the next commit of the one who came first.
        """
        token = self._mark + os.urandom(16 - len(self._mark))
        number = base.number + 1
        name = layout.stored_commit(number)
        data = NumberedObject(layout.STORED_COMMIT_MAGIC, number, token, change).encode()
        state = base.apply(number, change, len(data))  # a change that cannot be read is not written
        began_s = self._elapsed()
        outcome = self._client.create(name, data)
        is_mine = outcome is Outcome.DONE
        try:
            if outcome is not Outcome.DONE:
                found, *later = self._fetched(
                    [layout.stored_commit(number + place) for place in range(HITS_BEFORE_LIST)]
                )
                found = found or _created(self._client, name, data, self._patience_s)
                state, found_token = self._after(base, found)
                is_mine = found_token == token
            if not is_mine:
                self._missed_s = self._elapsed()
                for each in later:
                    if each is None:
                        break
                    state, _ = self._after(state, each)
                return False, state
            is_counted = self._take(self._state, state) is state
        except StorageError as fault:
            raise self._in_doubt(number, str(fault)) from None
        except InvalidInputError:
            if is_mine:  # it is in the way of the log that is there now
                with contextlib.suppress(StorageError):
                    self._client.delete([name])
            raise
        if not is_counted:
            raise self._in_doubt(number, "this process was stopped while the collector passed it.")
        self._committed_s = self._elapsed()
        self._took_s = self._committed_s - began_s
        return True, state

    def _let_others_commit(self) -> None:
        """Pause for up to the time of a commit if this process has just made one among rivals.

        A writer that commits without a pause always creates the next object before others do: they
        read its last one meanwhile.
        """
        now_s = self._elapsed()
        is_contended = now_s - self._missed_s < _CONTENDED_S
        if is_contended and now_s - self._committed_s < self._took_s:
            time.sleep(random.uniform(0, self._took_s))

    def _in_doubt(self, number: int, cause: str) -> CommitInDoubtError:
        return CommitInDoubtError(
            f"{self._client.address}: commit {number} is in doubt: {cause} Run the batch again: "
            "the rows of a batch that has a writer are written once."
        )

    def abort(self, is_committed: Callable[[StoreState], bool]) -> bool:
        """Make sure that a commit which may be under way, in any process, does not land later.

        An empty commit takes the only number at which it could land.

        Args:
            is_committed: Returns whether a state has what is aborted.

        Returns:
            Whether nothing has landed, so that the objects may be deleted.

        Raises:
            CommitInDoubtError: The store does not say.
            StorageError: The store fails.
        """
        has_landed = False

        def prepare(state: StoreState) -> Mapping[str, Any] | None:
            nonlocal has_landed
            has_landed = is_committed(state)
            return None if has_landed else {"time_ms": state.log.time_ms}

        self.commit(prepare)
        return not has_landed

    def move_boundary(self, number: int) -> None:
        """Let the boundary be at `number` or above, so that commits up to it may be deleted.

        Two collectors may do so at once: it never moves down. Raises StorageError.
        """
        name, magic = layout.STORED_BOUNDARY, layout.STORED_BOUNDARY_MAGIC
        data = NumberedObject(magic, number, self.log_id).encode()
        for _ in self._tries():
            found = self._client.get(name)
            if found is None:
                continue
            if self._decoded(name, magic, found).number >= number:
                return
            if self._client.replace(name, data, found.etag) is Outcome.DONE:
                return
        raise StorageError(f"{self._place(name)}: the store neither moves it nor has it.")

    def _write_snapshot(self) -> None:
        """Write the snapshot that is due; the commit is made, so a failure is only logged."""
        if not self._state.is_snapshot_due:
            return
        number = self._state.number
        data = NumberedObject(
            layout.STORED_SNAPSHOT_MAGIC, number, self.log_id, self._state.snapshot()
        ).encode()
        try:
            self._client.check_whole(layout.stored_snapshot(number), len(data))
            self._client.create(layout.stored_snapshot(number), data)
        except (StorageError, CorruptLogError) as fault:
            _logger.warning("no snapshot after commit %d: %s", number, fault)

    def _tries(self) -> Iterator[None]:
        return _tries(self._patience_s)

    def _place(self, name: str) -> str:
        return f"{self._client.address}/{name}"


def _has_remains(client: ObjectClient) -> bool:
    """Return whether there are commits of a log that has lost its mark.

    Raises StorageError if it has lost its boundary too, from which the mark could be made again.
    The boundary is created before any commit, so it is asked for after them.
    """
    newest = client.newest(layout.STORED_COMMITS, 1)
    commits = [each for each in newest if layout.parse_stored_name(each.name)]
    if commits and client.get(layout.STORED_BOUNDARY) is None:
        raise StorageError(
            f"{client.address}: a log has lost its objects {layout.STORED_LOG} and "
            f"{layout.STORED_BOUNDARY} (found {commits[0].name} without them). Restore them, or "
            "delete what is left of the log."
        )
    return bool(commits)


def _gap(first: int, following: int) -> str:
    """Return in words which commits a listing lacks."""
    return f" (expected commit {first}, found {layout.stored_commit(following)} after it)"


def _created(client: ObjectClient, name: str, data: bytes, patience_s: float) -> StoredObject:
    """Create an object unless there is one, and return the one that is there.

    Raises StorageError if the store does not say which one that is.
    """
    for _ in _tries(patience_s):
        found = client.get(name)
        if found is not None:
            return found
        if client.create(name, data) is Outcome.DONE:
            return StoredObject(data, "")
    raise StorageError(f"{client.address}/{name}: the store neither has it nor takes it.")


def _tries(patience_s: float) -> Iterator[None]:
    """Yield for each try, with growing random pauses between them, while patience lasts."""
    end = time.monotonic() + patience_s
    pause = _FIRST_PAUSE_S
    while True:
        yield
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _unbelievable(place: str, expected: str, fault: Exception) -> CorruptLogError:
    found = f"{type(fault).__name__}: {str(fault)[:80]}"
    return CorruptLogError(place, layout.STORED_HEADER.size, expected, found)
