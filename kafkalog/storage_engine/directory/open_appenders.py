"""The appenders of one commit, with as many of them open as the process may have files.

A commit of many partitions closes some appenders to open others, and thus keeps the process's limit
of open files. It raises the limit only if not even one partition can be opened.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from kafkalog.storage_engine.directory.appender import Appender
from kafkalog.storage_engine.directory.kept_appenders import Key
from kafkalog.storage_engine.fs import files

_logger = logging.getLogger(__name__)
_FILES_EACH: Final = 3
"""Open files of a partition that is appended to: the log and two indexes."""


class OpenAppenders:
    """The appenders of a commit by topic and partition; those that were closed open again."""

    def __init__(self, begin: Callable[[Key, int], Appender]) -> None:
        """`begin` makes the appender of a partition, at a time in ms."""
        self._begin = begin
        self._known: dict[Key, Appender] = {}
        self._open: set[Key] = set()
        """Partitions whose appenders have open files."""

    def known(self) -> Mapping[Key, Appender]:
        """Return the appenders that the commit has begun, open or not."""
        return self._known

    def opened(self, key: Key, now_ms: int) -> Appender:
        """Return a partition's appender, open; the first call begins its work."""
        if key not in self._open:
            if _FILES_EACH * len(self._open) >= files.descriptor_limit() // 2:
                self._close_opened()  # leave half of the descriptors to the rest of the process
            try:
                self._known[key] = self._reopened(key, now_ms)
            except OSError as fault:
                files.pass_on(fault)
                if fault.errno != errno.EMFILE:
                    raise
                if not self._close_opened() and not files.raise_descriptor_limit():
                    raise
                self._known[key] = self._reopened(key, now_ms)
            self._open.add(key)
        return self._known[key]

    def side_by_side(self, keys: Collection[Key], now_ms: int) -> Iterator[dict[Key, Appender]]:
        """Yield the appenders of partitions: all at once, if the process may have them open.

        Else one after the other.
        """
        if len(keys) == 1:
            yield {key: self.opened(key, now_ms) for key in keys}
            return
        for _ in range(2):  # again, as one may have been closed to open another
            opened = {key: self.opened(key, now_ms) for key in keys}
        if self._open.issuperset(opened):
            yield opened
            return
        for key in opened:
            yield {key: self.opened(key, now_ms)}

    def _reopened(self, key: Key, now_ms: int) -> Appender:
        appender = self._known.get(key)
        if appender is None:
            return self._begin(key, now_ms)
        try:
            appender.active.reopen()
        except OSError as raised:
            files.pass_on(raised)
            appender.active.close()
            raise
        return appender

    def _close_opened(self) -> bool:
        """Sync and close the appended files; return False if none is open."""
        opened = [self._known[key] for key in self._open]
        files.all_at_once([appender.sync for appender in opened])
        for appender in opened:
            appender.close()
        self._open.clear()
        return bool(opened)

    def sync(self) -> None:
        """Make durable all that was appended."""
        files.all_at_once([appender.sync for appender in self._known.values()])

    def forget(self, key: Key) -> bool:
        """Close a partition's appender; return False if it isn't open."""
        appender = self._known.pop(key, None)
        self._open.discard(key)
        if appender is not None:
            appender.close()
        return appender is not None

    def close(self) -> None:
        """Close the files; the next holder truncates what was not published."""
        for appender in self._taken().values():
            appender.close()

    def let_go(self) -> dict[Key, Appender]:
        """Close the published files, and return their appenders; from here on nothing undoes them.

        A failure is only logged.
        """
        published = self._taken()
        _end(published, Appender.close, "a file could not be closed")
        return published

    def abandon(self, *, truncate: bool) -> None:
        """Close the files, or `truncate` what was appended too; a failure is only logged."""
        end = Appender.abandon if truncate else Appender.close
        _end(self._taken(), end, "could not be truncated; the next commit does it")

    def _taken(self) -> dict[Key, Appender]:
        taken, self._known = self._known, {}
        self._open.clear()
        return taken


def _end(
    appenders: Mapping[Key, Appender], end: Callable[[Appender], None], otherwise: str
) -> None:
    for appender in appenders.values():
        try:
            end(appender)
        except OSError as raised:
            files.pass_on(raised)
            _logger.exception("%s: %s", appender.directory, otherwise)
