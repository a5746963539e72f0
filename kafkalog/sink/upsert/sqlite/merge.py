"""From staged rows to the SQLite table, in the caller's transaction: one statement for all rows.

Rows are inserted in the order of their keys, as the index of a large table is then written once. If
a statement fails, ever smaller pieces of the rows are tried, until one row is left to blame. It
fails the merge, or it is left out. A row whose value another one keeps is left out only if that one
is not. An earlier record of its key then counts as the latest, so the
staging file must have all records, and the merge chooses among them. It tries the earlier records
of all refused keys at once, and then starts again with those that the table takes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.kept_values import KEPT, NO_ROW_BEFORE, is_kept
from kafkalog.sink.upsert.latest import Version, newest_first
from kafkalog.sink.upsert.rows import DELETED
from kafkalog.sink.upsert.sqlite.staging_file import NUMBER, ORIGIN, ROWS, TIME, misfit
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted
from kafkalog.sink.upsert.sqlite.unique_indexes import StagedValues
from kafkalog.sink.upsert.unique_moves import Arrangement, Claim, Rival, arrange


class _Step(NamedTuple):
    """A statement for some rows; its two parameters are the first and the last number."""

    statement: str
    unkept: str
    """The query that finds rows of which the table is not as the statement says."""
    reason: str
    """Why such a row is refused."""
    stored: str = ""
    """The query for the number of rows that the statement stores."""
    others: str = ""
    """The query that finds rows of which the table has other values. A trigger may skip them."""


class _UnkeptError(sqlite3.IntegrityError):
    """A statement has run, and the table is not as it says; nothing is done."""


_ROW_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError)
"""Faults that a single row causes."""
_OF_OTHERS = {sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY}
"""Faults that another row may cause, which keeps a value because it is refused itself."""
_SOURCE = f"kafkalog_staged.{ROWS}"
_OTHERS = "temp.kafkalog_others"
_MOVES = "temp.kafkalog_moves"
"""The numbers of the rows that are written one by one, or not in this round."""
_LATEST = "temp.kafkalog_latest"
"""The numbers of the rows that count, if others are staged too."""
_SKIPPED = "a trigger skips the row, so that the table keeps an earlier one of its key"


class SQLiteMerge:
    """The merge of the rows of a staging file into a table.

    With `leaves_out` the file has all records, and those that the table refuses are left out.
    Without it, the file has the latest record of each key.
    """

    def __init__(
        self,
        table: SQLiteTable,
        staging_file: Path,
        *,
        leaves_out: bool = False,
        keeps: bool = False,
    ) -> None:
        self._table = table
        self._leaves_out = leaves_out
        self._keeps = keeps
        self._refused: dict[int, Refusal] = {}
        self._contested: dict[int, Refusal] = {}
        """The rows of a round that another row keeps out, which may be refused itself."""
        self._judges_contested = False
        self._connection = table.connection
        self._connection.execute("ATTACH ? AS kafkalog_staged", (str(staging_file),))
        self._names = [quoted(name) for name in table.names]
        self._keys = [quoted(name) for name in table.keys]
        updates = [f"{name} = excluded.{name}" for name in self._names if name not in self._keys]
        self._on_conflict = (
            f"ON CONFLICT ({', '.join(self._keys)}) DO "
            f"{'UPDATE SET ' + ', '.join(updates) if updates else 'NOTHING'}"
        )
        only = f" AND mine.{NUMBER} IN {_LATEST}" if leaves_out else ""
        self._deletions = f"mine.{DELETED}{only}"
        self._rows = f"NOT mine.{DELETED}{only}"
        self._some = f"mine.{NUMBER} BETWEEN ?1 AND ?2"
        self._is_proved = table.may_change_rows()
        """Whether each statement is followed by a look at its rows."""
        self._is_emptied = False
        """Whether the table's old rows have been deleted, since all are replaced."""

    def run(self, *, is_replacing: bool) -> list[Refusal]:
        """Delete and upsert the rows, or make them the table's; return what was left out.

        Raises InvalidInputError that names a record.
        """
        apply = self._replace if is_replacing else self._upsert
        if self._keeps:
            self._keep_values(is_replacing=is_replacing)
        if not self._leaves_out:
            apply()
            return []
        known = -1
        while known < len(self._refused):
            known = len(self._refused)
            self._connection.execute("SAVEPOINT kafkalog_merge")
            self._choose()
            apply()
            self._judges_contested = known == len(self._refused)
            if self._judges_contested:
                self._refused.update(self._contested)
            if known < len(self._refused):
                self._try_earlier(list(self._refused)[known:])
                self._connection.execute("ROLLBACK TO kafkalog_merge")
            self._connection.execute("RELEASE kafkalog_merge")
            self._contested.clear()
            self._judges_contested = False
        return list(self._refused.values())

    def _keep_values(self, *, is_replacing: bool) -> None:
        """Fill in the values that rows lack, from the table's rows; without one a row is refused.

        A row that is replaced doesn't count as the row before.
        """
        has_row = "0" if is_replacing else f"EXISTS ({self._row_of_mine()})"
        for number, topic, partition, offset in self._connection.execute(
            f"SELECT {NUMBER}, {', '.join(ORIGIN)} FROM {_SOURCE} AS mine "
            f"WHERE {KEPT} IS NOT NULL AND NOT {has_row}"
        ).fetchall():
            self._refused[number] = Refusal(topic, partition, offset, NO_ROW_BEFORE)
            if not self._leaves_out:
                raise misfit(self._table.where, self._refused[number])
        for place, name in enumerate(self._names):
            if name not in self._keys:
                kept = self._row_of_mine(what=f"kept.{name}")
                self._connection.execute(
                    f"UPDATE {_SOURCE} AS mine SET {name} = ({kept}) "
                    f"WHERE {is_kept('mine', place)} AND {has_row}"
                )

    def _choose(self) -> None:
        """Choose the latest record of each key, as `latest_rows` does, among those not refused."""
        key = ", ".join(self._keys)
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_refused ({NUMBER} INTEGER PRIMARY KEY)"
        )
        self._connection.executemany(
            "INSERT INTO temp.kafkalog_refused VALUES (?)", [(number,) for number in self._refused]
        )
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_latest ({NUMBER} INTEGER PRIMARY KEY)"
        )
        self._connection.execute(
            f"INSERT INTO {_LATEST} SELECT {NUMBER} FROM ("
            f"SELECT {NUMBER}, row_number() OVER (PARTITION BY {key} "
            f"ORDER BY {TIME} DESC, kl_topic DESC, kl_partition DESC) AS kl_rank FROM ("
            f"SELECT *, row_number() OVER (PARTITION BY {key}, kl_topic, kl_partition "
            f"ORDER BY kl_offset DESC) AS kl_age FROM {_SOURCE} "
            f"WHERE {NUMBER} NOT IN temp.kafkalog_refused) WHERE kl_age = 1) WHERE kl_rank = 1"
        )
        self._connection.execute("DROP TABLE temp.kafkalog_refused")

    def _try_earlier(self, refused: Sequence[int]) -> None:
        """Find the record of each refused key that the table takes; refuse the later ones."""
        key = ", ".join(self._keys)
        self._connection.execute(f"CREATE TEMP TABLE kafkalog_keys ({key})")
        self._connection.executemany(
            f"INSERT INTO temp.kafkalog_keys SELECT {key} FROM {_SOURCE} WHERE {NUMBER} = ?",
            [(number,) for number in refused],
        )
        versions: dict[tuple[Any, ...], list[Version]] = {}
        for *found, topic, partition, offset, time, number in self._connection.execute(
            f"SELECT {key}, {', '.join(ORIGIN)}, {TIME}, {NUMBER} FROM {_SOURCE} "
            f"WHERE ({key}) IN (SELECT {key} FROM temp.kafkalog_keys)"
        ).fetchall():
            if number not in self._refused:
                version = Version(topic, partition, offset, time, number)
                versions.setdefault(tuple(found), []).append(version)
        for of_key in versions.values():
            for version in newest_first(of_key):
                self._connection.execute(f"INSERT INTO {_LATEST} VALUES (?)", (version.number,))
                for statement in (self._deletion(), self._insertion()):
                    self._apply_some(statement, version.number, version.number)
                if version.number not in self._refused:
                    break

    def _upsert(self) -> None:
        self._apply(self._deletion())
        self._insert()

    def _deletion(self) -> _Step:
        keys = ", ".join(self._keys)
        deleted = f"SELECT {keys} FROM {_SOURCE} AS mine WHERE {self._some} AND {self._deletions}"
        # BINARY whatever collation a column declares: "A" is not "a" in a log.
        exactly = ", ".join(f"{key} COLLATE BINARY" for key in self._keys)
        wanted = f"({exactly}) IN ({deleted})"
        if len(self._keys) > 1:  # SQLite finds several columns by their index only as they are
            wanted = f"({keys}) IN ({deleted}) AND {wanted}"
        return _Step(
            f"DELETE FROM {quoted(self._table.name)} WHERE {wanted}",
            f"SELECT 1 FROM {_SOURCE} AS mine WHERE {self._some} AND {self._deletions} "
            f"AND EXISTS ({self._row_of_mine()})",
            "the table still has its row after the deletion, because of a trigger",
        )

    def _row_of_mine(self, more: str = "", *, what: str = "1") -> str:
        same = " AND ".join(f"kept.{key} = mine.{key} COLLATE BINARY" for key in self._keys) + more
        return f"SELECT {what} FROM {quoted(self._table.name)} AS kept WHERE {same}"

    def _replace(self) -> None:
        """Make the rows the table's.

        Columns that the upsert does not write keep their values as long as the key stays. The rows
        are inserted into an empty table, so that no old row blocks a unique value.
        """
        others = self._table.others()
        self._is_emptied = True
        if not others or not self._table.has_rows():
            self._table.clear()
            self._insert()
            return
        self._keep(others)
        self._table.clear()
        # Rows of old keys first, since a column of others may number the rows.
        self._insert(others, f"JOIN {_OTHERS} AS theirs ON theirs.{NUMBER} = mine.{NUMBER}")
        is_old = f"SELECT 1 FROM {_OTHERS} AS theirs WHERE theirs.{NUMBER} = mine.{NUMBER}"
        self._insert(only=f"AND NOT EXISTS ({is_old})")

    def _keep(self, others: Sequence[str]) -> None:
        """Save the values of columns that the upsert does not write, for keys that stay."""
        kept = ", ".join(f"kl_{number}" for number in range(len(others)))
        columns = ", ".join(f"theirs.{quoted(name)}" for name in others)
        same = " AND ".join(f"theirs.{key} = mine.{key} COLLATE BINARY" for key in self._keys)
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_others ({NUMBER} INTEGER PRIMARY KEY, {kept})"
        )
        self._connection.execute(
            f"INSERT INTO {_OTHERS} SELECT mine.{NUMBER}, {columns} "
            # A cross join reads the left table first, and finds each key by the right one's index.
            f"FROM {_SOURCE} AS mine CROSS JOIN {quoted(self._table.name)} AS theirs "
            f"ON {same} WHERE {self._rows}"
        )

    def _insert(self, others: Sequence[str] = (), join: str = "", only: str = "") -> None:
        """Insert or update rows.

        If rows get unique values of each other, they are written one by one: see `unique_moves`.
        """
        statement = self._insertion(others, join, only)
        if self._is_applied(statement):
            return
        moves = self._arrange_moves()
        self._connection.execute(f"CREATE TEMP TABLE kafkalog_moves ({NUMBER} INTEGER PRIMARY KEY)")
        one_by_one = [*moves.order, *moves.refused]
        self._connection.executemany(
            f"INSERT INTO {_MOVES} VALUES (?)",
            [(number,) for number in (*one_by_one, *moves.postponed)],
        )
        is_plain = f"{only} AND mine.{NUMBER} NOT IN {_MOVES}"
        self._apply(self._insertion(others, join, is_plain))
        for number in one_by_one:
            self._apply_some(statement, number, number)
        self._connection.execute("DROP TABLE temp.kafkalog_moves")

    def _arrange_moves(self) -> Arrangement:
        """Arrange the rows that get each other's unique values, and free values in circles."""
        values = StagedValues(self._table, _SOURCE, self._rows, is_emptied=self._is_emptied)
        claims, rivals = list(values.claims()), list(values.rivals())
        # The numbers of the rows are in the order in which they came.
        in_order = [
            number
            for (number,) in self._connection.execute(
                f"SELECT {NUMBER} FROM {_SOURCE} ORDER BY {', '.join(ORIGIN)}"
            )
        ]
        places = {number: place for place, number in enumerate(in_order)}
        several = self._with_earlier()
        moves = arrange(
            [
                Claim(index, places[row], None if holder is None else places[holder])
                for index, row, holder in claims
            ],
            [Rival(index, value, places[row]) for index, value, row in rivals],
            lambda place: in_order[place] in several,
        )
        for place, index in moves.parked:
            values.park(_SOURCE, in_order[place], index)
        return Arrangement(
            [in_order[place] for place in moves.order],
            refused=[in_order[place] for place in moves.refused],
            postponed=[in_order[place] for place in moves.postponed],
        )

    def _with_earlier(self) -> set[int]:
        """Return the numbers of rows whose keys have other records, which may be tried."""
        if not self._leaves_out:
            return set()
        key = ", ".join(self._keys)
        found = self._connection.execute(
            f"SELECT {NUMBER} FROM {_SOURCE} WHERE ({key}) IN "
            f"(SELECT {key} FROM {_SOURCE} GROUP BY {key} HAVING count(*) > 1)"
        )
        return {number for (number,) in found}

    def _insertion(self, others: Sequence[str] = (), join: str = "", only: str = "") -> _Step:
        into = ", ".join([*self._names, *map(quoted, others)])
        kept = [f"theirs.kl_{number}" for number in range(len(others))]
        values = ", ".join([*(f"mine.{name}" for name in self._names), *kept])
        order = ", ".join(f"mine.{key}" for key in self._keys)
        rows = f"FROM {_SOURCE} AS mine {join} WHERE {self._some} AND {self._rows} {only}"
        same = [f" AND kept.{name} IS mine.{name} COLLATE BINARY" for name in self._names]
        return _Step(
            f"INSERT INTO {quoted(self._table.name)} ({into}) SELECT {values} {rows} "
            f"ORDER BY {order} {self._on_conflict}",
            f"SELECT 1 {rows} AND NOT EXISTS ({self._row_of_mine()})",
            "the table has no row of its key afterwards, because of a trigger or a conflict clause",
            f"SELECT count(*) {rows}",
            f"SELECT 1 {rows} AND NOT EXISTS ({self._row_of_mine(''.join(same))})",
        )

    def _apply(self, statement: _Step) -> None:
        """Run a statement on all rows."""
        self._apply_some(statement, 1, self._last())

    def _last(self) -> int:
        (last,) = self._connection.execute(
            f"SELECT coalesce(max({NUMBER}), 0) FROM {_SOURCE}"
        ).fetchone()
        return int(last)

    def _is_applied(self, statement: _Step) -> bool:
        """Run a statement on all rows; return False if SQLite refuses one of them."""
        try:
            self._execute(statement, 1, self._last())
        except _ROW_FAULTS as fault:
            self._check_transaction(fault)
            return False
        return True

    def _execute(self, step: _Step, first: int, last: int) -> None:
        """Run a statement on a piece of the rows; do nothing if SQLite refuses one of them.

        A trigger may change a key, or skip a row, without an error. The row would be lost or stay
        old, and a later tombstone would not find it.
        """
        rows = (first, last)
        if not self._is_proved:
            self._connection.execute(step.statement, rows)
            return
        self._connection.execute("SAVEPOINT kafkalog_step")
        stored = self._connection.execute(step.statement, rows).rowcount
        reason = step.reason if self._finds(step.unkept, rows) else ""
        if not reason and step.stored:
            (wanted,) = self._connection.execute(step.stored, rows).fetchone()
            if stored < wanted and self._finds(step.others, rows):
                reason = _SKIPPED
        if reason:
            self._connection.execute("ROLLBACK TO kafkalog_step")
        self._connection.execute("RELEASE kafkalog_step")
        if reason:
            raise _UnkeptError(reason)

    def _finds(self, query: str, rows: tuple[int, int]) -> bool:
        return self._connection.execute(f"{query} LIMIT 1", rows).fetchone() is not None

    def _check_transaction(self, fault: sqlite3.Error) -> None:
        """Raise InvalidInputError if a trigger has ended the transaction."""
        if not self._connection.in_transaction:
            raise InvalidInputError(f"{self._table.where}: {fault}") from fault

    def _apply_some(self, statement: _Step, first: int, last: int) -> None:
        """Run a statement on a piece of the rows, or on ever smaller ones."""
        try:
            self._execute(statement, first, last)
        except _ROW_FAULTS as fault:
            self._check_transaction(fault)
            if first == last:
                self._refuse(first, fault)
                return
            middle = (first + last) // 2
            self._apply_some(statement, first, middle)
            self._apply_some(statement, middle + 1, last)

    def _refuse(self, number: int, fault: sqlite3.Error) -> None:
        """Leave out the row of this number; raise InvalidInputError unless the merge may."""
        topic, partition, offset = self._connection.execute(
            f"SELECT {', '.join(ORIGIN)} FROM {_SOURCE} WHERE {NUMBER} = ?", (number,)
        ).fetchone()
        refusal = Refusal(topic, partition, offset, str(fault))
        if not self._leaves_out:
            raise misfit(self._table.where, refusal) from fault
        is_contested = getattr(fault, "sqlite_errorcode", None) in _OF_OTHERS
        if is_contested and not self._judges_contested:
            self._contested[number] = refusal
        else:
            self._refused[number] = refusal
