"""The checkpoints of a materialized view: one numbered checkpoint per generation.

A new query with a new checkpoint rebuilds a view from the beginning of the log. The highest number
is the current generation. Its topic and the topic's id are in `<number>.json`; the id differs if
the topic was deleted and created again. It also lists the ids of all earlier queries, so the view
recognizes its table.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from kafkalog.errors import InvalidInputError
from kafkalog.sink.query import checkpoint_query_id
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.locks import FileLock


class Generations:
    """The generations under the directory `root`, which `add` creates."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def current(self) -> int | None:
        """Return the number of the current generation; None before the first."""
        return max(self._numbers(), default=None)

    def path(self, number: int) -> Path:
        """Return where Spark keeps a generation's checkpoint."""
        return self.root / str(number)

    def add(self, topic: str, topic_id: str, *, was_emptied: bool = False) -> int:
        """Create the next generation and return its number; `was_emptied` says why it is needed."""
        number = (self.current() or 0) + 1
        files.make_directories(self.root)
        earlier = sorted(self.query_ids())
        about = json.dumps(
            {"topic": topic, "topic_id": topic_id, "query_ids": earlier, "was_emptied": was_emptied}
        )
        files.write_atomically(self.root / f"{number}.json", about.encode())
        files.make_directory(self.path(number))
        files.sync_directory(self.root)
        return number

    def topic(self, number: int) -> tuple[str, str]:
        """Return the name and id of a generation's topic; raises InvalidInputError."""
        topic, topic_id, *_ = self._about(number)
        return topic, topic_id

    def was_emptied(self, number: int) -> bool:
        """Return whether a generation was made because its table had lost its rows."""
        return self._about(number)[3]

    def query_ids(self) -> set[str]:
        """Return the ids of the queries of all generations; raises InvalidInputError."""
        found: set[str] = set()
        for number in self._numbers():
            found.update(self._about(number)[2])
            query_id = self.query_id(number)
            if query_id is not None:
                found.add(query_id)
        return found

    def _about(self, number: int) -> tuple[str, str, list[str], bool]:
        path = self.root / f"{number}.json"
        try:
            about = json.loads(files.read_file(path))
            earlier = [str(query_id) for query_id in about.get("query_ids", [])]
            was_emptied = about.get("was_emptied") is True
            return str(about["topic"]), str(about["topic_id"]), earlier, was_emptied
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
            raise InvalidInputError(
                f"{path}: it should say which topic the view's checkpoint {number} reads, but "
                f"cannot be read ({fault!r}); is this the checkpoint of a view?"
            ) from fault

    def query_id(self, number: int) -> str | None:
        """Return the id of a generation's query; None before its first start."""
        return checkpoint_query_id(str(self.path(number)))

    def last_committed(self, number: int) -> int | None:
        """Return the last micro-batch that Spark has recorded as done; None before the first."""
        with contextlib.suppress(FileNotFoundError):
            names = files.list_names(self.path(number) / "commits")
            return max((int(name) for name in names if name.isdecimal()), default=None)
        return None

    def remove_cut_short_plan(self, number: int) -> None:
        """Remove what a query left that died while it wrote its first plan.

        Spark 4.3 refuses a checkpoint whose directory `offsets` holds such a file and no plan.
        """
        plans = self.path(number) / "offsets"
        with contextlib.suppress(FileNotFoundError):
            names = files.list_names(plans)
            if not any(name.isdecimal() for name in names):
                for name in names:
                    files.remove(plans / name)

    def remove_before(self, number: int) -> None:
        """Remove the generations below a number; repeat the call if the process died midway."""
        for old in self._numbers():
            if old < number:
                _remove_tree(self.path(old))
                files.remove(self.root / f"{old}.json")

    def lock(self) -> FileLock:
        """Return the lock that a running view holds; the directory must exist."""
        return FileLock(self.root / "lock")

    def _numbers(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [
                int(name)
                for name in files.list_names(self.root)
                if name.isdecimal() and (self.root / name).is_dir()
            ]
        return []


def _remove_tree(directory: Path) -> None:
    for name in sorted(files.list_names(directory)):
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
    files.remove_directory(directory)
