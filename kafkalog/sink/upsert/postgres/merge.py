"""From staged rows to the table, in SQL: the latest row of each key, deletions first.

The latest row is the one that `latest_per_key` would choose.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kafkalog.errors import StorageError
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.kept_values import KEPT, NO_ROW_BEFORE, is_kept
from kafkalog.sink.upsert.latest import Version, newest_first
from kafkalog.sink.upsert.postgres.client import is_about_rows, one, run, sql_name
from kafkalog.sink.upsert.postgres.misfit import Misfit
from kafkalog.sink.upsert.postgres.staging_table import ATTEMPT, StagingTable
from kafkalog.sink.upsert.postgres.unique_indexes import NumberedValues
from kafkalog.sink.upsert.rows import DELETED, RECORD
from kafkalog.sink.upsert.unique_moves import Arrangement

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import SQL, Composed, Identifier

    from kafkalog.sink.upsert.postgres.table import Column, PostgresTable
    from kafkalog.sink.upsert.postgres.versions import PostgresVersions

    Connection = psycopg.Connection[tuple[Any, ...]]


_NUMBER = "kl_number"
_NUMBERED = "kafkalog_numbered"
"""A temporary table of the latest row of each key, with numbers in the order of the log."""
_PART = f"SELECT * FROM {_NUMBERED} WHERE {_NUMBER} BETWEEN %s AND %s"
_UNKEPT = (
    "a trigger, or the type of a column of the key, changes or drops a row, so that the table has "
    "none of its key"
)
_SKIPPED = "a trigger skips the row, so that the table keeps an earlier one of its key"
_STILL_THERE = "a trigger keeps its row, so that the table still has one of its key"
_OF_OTHERS = {"23503", "23505", "23P01"}
"""Violations of a foreign key, of a unique index, and of an exclusion constraint."""
_WORK_MEM = "64MB"
"""The least memory for sorting a micro-batch's rows."""


class _Step(NamedTuple):
    """A statement for some rows; its two parameters are the first and the last number."""

    statement: Composed
    unkept: Composed | None = None
    """The query that finds rows of which the table is not as the statement says."""
    reason: str = ""
    """Why such a row is refused."""
    stored: Composed | None = None
    """The query for the number of rows that the statement stores."""
    others: Composed | None = None
    """The query that finds rows of which the table has other values. A trigger may skip them."""


class _Fault(NamedTuple):
    """A row that the table refuses in a step."""

    number: int
    reason: str
    is_of_others: bool
    """Whether another row may be the cause, which is refused itself."""


class UnkeptRowsError(Exception):
    """The table is not as the statements say: a trigger changes or drops rows, or keeps them."""


class SkippedRowsError(UnkeptRowsError):
    """A trigger skips rows, and the table has other values than some rows."""


class UndeletableRowError(Exception):
    """The table refuses to delete a row that no record keeps; the message says why."""


@dataclass(frozen=True, slots=True)
class StagedMerge:
    """Rows that wait to be merged."""

    target: StagingTable
    attempts: Sequence[int]
    """The attempts that Spark has reported; rows of other attempts do not count."""
    rows: int
    deletions: int
    """Deletions among the rows; with 0 the merge looks for none."""
    seems_unique: bool
    """Whether no task saw a key twice."""
    refused: Sequence[Refusal] = ()
    """The records that PostgreSQL refuses, and that were left out."""
    may_be_skipped: bool = False
    """Whether rows have been tried one by one: a trigger skips only what the table has already."""


@dataclass(frozen=True, slots=True)
class Merge:
    """The merge of staged rows into a table."""

    table: PostgresTable
    staged: StagedMerge
    versions: PostgresVersions | None = None
    """The versions of the rows, if they have any: older rows do not count."""

    def run(self, connection: Connection, *, is_replacing: bool) -> None:
        """Apply the rows in the caller's transaction.

        Raises StorageError if rows are missing, and UnkeptRowsError.
        """
        import psycopg

        self._check_count(connection)
        run(
            connection,
            "SELECT set_config('work_mem', %(size)s, true) "
            "WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes(%(size)s)",
            {"size": _WORK_MEM},
        )
        if self.staged.target.keeps:
            self._keep_values(connection, is_replacing=is_replacing)
        is_empty = not self.table.has_rows(connection)
        are_latest = self.staged.seems_unique and not self.staged.deletions
        if is_empty and are_latest and not self.table.existed and self._fill(connection):
            return
        # The end state counts, not what comes between.
        run(connection, "SET CONSTRAINTS ALL DEFERRED")
        try:
            with connection.transaction():
                stored = self._apply(connection, is_replacing=is_replacing, is_empty=is_empty)
        except psycopg.errors.UniqueViolation:
            with connection.transaction():
                in_order = self._apply_in_order(connection, is_replacing=is_replacing)
                if in_order is None:
                    raise
                stored = in_order
        self._check_kept(connection, stored)

    def remember(
        self, connection: Connection, versions: PostgresVersions, times: tuple[int, int]
    ) -> None:
        """Remember the versions of deleted rows, after the merge; see `PostgresVersions`."""
        versions.remember(connection, self._rows(), self._values(), times)

    def _keep_values(self, connection: Connection, *, is_replacing: bool) -> None:
        """Fill in the values that staged rows lack, from the table's rows.

        Raises UnkeptRowsError if there is a row without one.
        """
        from psycopg.sql import SQL

        unknown = self._without_row_before(is_replacing=is_replacing)
        if run(connection, unknown, self._values()).fetchone() is not None:
            raise UnkeptRowsError(NO_ROW_BEFORE)
        updates = [
            SQL("{0} = CASE WHEN {1} THEN {2} ELSE mine.{0} END").format(
                sql_name(column.name), SQL(is_kept("mine", place)), column.as_staged("kept")
            )
            for place, column in enumerate(self.staged.target.columns)
            if column.name not in self.table.keys
        ]
        run(
            connection,
            SQL(
                "UPDATE {} AS mine SET {} FROM ({}) AS latest, {} AS kept "
                "WHERE mine.ctid = latest.kl_place AND ({}) = ({})"
            ).format(
                self._source,
                SQL(", ").join(updates),
                self._keepers(),
                self.table.identifier,
                *self._keys_of_both(),
            ),
            self._values(),
        )

    def _keepers(self) -> Composed:
        """Return the query for the staged rows that lack values, with their keys."""
        from psycopg.sql import SQL

        keys = [
            SQL("{} AS {}").format(column.value(), sql_name(column.name))
            for column in self.staged.target.columns
            if column.name in self.table.keys
        ]
        return SQL(
            f"SELECT ctid AS kl_place, kl_topic, kl_partition, kl_offset, {{}} FROM {{}} "
            f"WHERE {ATTEMPT} = ANY(%(attempts)s) AND {KEPT} IS NOT NULL"
        ).format(SQL(", ").join(keys), self._source)

    def _without_row_before(self, *, is_replacing: bool) -> Composed:
        """Return the query for rows that lack values and replace none; the last column is a key."""
        from psycopg.sql import SQL

        has_row = SQL("false") if is_replacing else self._has_row()
        key = "left({}::text, 200)" if len(self.table.keys) == 1 else "left(ROW({})::text, 200)"
        return SQL(
            f"SELECT kl_topic, kl_partition, kl_offset, {key} FROM ({{}}) AS latest WHERE NOT {{}}"
        ).format(self.table.key(), self._keepers(), has_row)

    def _apply(self, connection: Connection, *, is_replacing: bool, is_empty: bool) -> int:
        """Apply the rows; return how many PostgreSQL has stored."""
        deletes = self.staged.deletions > 0 and not is_empty
        stores = self.staged.rows > self.staged.deletions
        if is_replacing and not is_empty:
            self._delete_others(connection)
            deletes = False
        elif deletes and not (stores and self.table.refers_to_itself(connection)):
            run(connection, self._delete(self._latest(is_narrow=True)), self._values())
            deletes = False
        if not stores:
            return 0
        # An insert into an empty table takes half the time without ON CONFLICT.
        return self._store(connection, self._latest(), deletes=deletes, can_conflict=not is_empty)

    def _store(
        self,
        connection: Connection,
        latest: Composed,
        *,
        deletes: bool,
        can_conflict: bool = True,
        more: str = "",
    ) -> int:
        """Store rows; with `deletes` the same statement deletes those of tombstones first.

        Rows may refer to other rows of the table: PostgreSQL then looks at what they refer to only
        when all is done. Returns how many rows PostgreSQL has stored.
        """
        from psycopg.sql import SQL

        if not deletes:
            statement = self._upsert(latest, can_conflict=can_conflict, more=more)
            return run(connection, statement, self._values()).rowcount
        gone = self._delete(self._latest(is_narrow=True))
        stored = self._upsert(latest, more=f"AND (SELECT count(*) FROM kl_gone) >= 0 {more}")
        both = SQL("WITH kl_gone AS ({} RETURNING 1) {}").format(gone, stored)
        return run(connection, both, self._values()).rowcount

    def _apply_in_order(self, connection: Connection, *, is_replacing: bool) -> int | None:
        """Apply the rows in an order in which each unique value is free when a row gets it.

        Return how many PostgreSQL has stored; None if rows wait for the value of a row that the
        table refuses.
        """
        from psycopg.sql import SQL

        if is_replacing:
            self._delete_others(connection)
        deletes = self.staged.deletions > 0 and not is_replacing
        if deletes and not self.table.refers_to_itself(connection):
            run(connection, self._delete(self._latest(is_narrow=True)), self._values())
            deletes = False
        self._number(connection)
        moves = self._arrange(connection)
        if moves.postponed:
            return None
        rows = SQL(f"SELECT * FROM {_NUMBERED}").format()
        stored = self._store(connection, rows, deletes=deletes, more=f"ORDER BY {_NUMBER}")
        run(connection, f"DROP TABLE {_NUMBERED}")
        return stored

    def _number(self, connection: Connection) -> int:
        """Make the temporary table of numbered rows; return their count."""
        from psycopg.sql import SQL

        run(
            connection,
            SQL(
                "CREATE TEMPORARY TABLE {} ON COMMIT DROP AS "
                "SELECT row_number() OVER (ORDER BY kl_topic, kl_partition, kl_offset) "
                "AS {number}, * FROM ({latest}) AS latest"
            ).format(SQL(_NUMBERED), number=SQL(_NUMBER), latest=self._latest()),
            self._values(),
        )
        return int(one(connection, f"SELECT count(*) FROM {_NUMBERED}"))

    def _arrange(self, connection: Connection) -> Arrangement:
        """Give the rows that get each other's unique values numbers in the order of `arrange`.

        They come behind all others. Rows that cannot be judged in this round are taken away.
        """
        oid = self.table.oid(connection)
        assert oid is not None
        values = NumberedValues(
            connection,
            oid,
            self.table.identifier.as_string(connection).replace("%%", "%"),
            _NUMBERED,
            names=[column.name for column in self.staged.target.columns],
            keys=self.table.keys,
        )
        several: set[int] = set()
        is_known = False

        def has_earlier(number: int) -> bool:
            nonlocal is_known
            if not is_known:
                several.update(self._with_earlier(connection))
                is_known = True
            return number in several

        moves = values.arrange(has_earlier)
        run(connection, f"DELETE FROM {_NUMBERED} WHERE {_NUMBER} = ANY(%s)", (moves.postponed,))
        run(
            connection,
            f"UPDATE {_NUMBERED} SET {_NUMBER} = "
            f"(SELECT max({_NUMBER}) FROM {_NUMBERED}) + arranged.place "
            "FROM unnest(%s::bigint[]) WITH ORDINALITY AS arranged(number, place) "
            f"WHERE {_NUMBER} = arranged.number",
            ([*moves.order, *moves.refused],),
        )
        return moves

    def _with_earlier(self, connection: Connection) -> list[int]:
        """Return the numbers of rows whose keys have earlier records."""
        from psycopg.sql import SQL

        found = run(
            connection,
            SQL(
                "SELECT {number} FROM {numbered} WHERE ({key}) IN (SELECT {key} FROM ({rows}) "
                "AS staged GROUP BY {key} HAVING count(*) > 1)"
            ).format(
                number=SQL(_NUMBER),
                numbered=SQL(_NUMBERED),
                key=self.table.key(),
                rows=self._rows(has_keys_alone=True),
            ),
            self._values(),
        ).fetchall()
        return [number for (number,) in found]

    def _check_kept(self, connection: Connection, stored: int) -> None:
        """Raise UnkeptRowsError if the table is not as the rows say; so many were stored."""
        from psycopg.sql import SQL

        if not self.table.may_change_rows(connection):
            return
        latest = self._latest(has_keys_alone=True)
        unkept = SQL("SELECT 1 FROM ({}) AS latest WHERE kl_deleted = {} LIMIT 1").format(
            latest, self._has_row()
        )
        if one(connection, unkept, self._values()) is not None:
            raise UnkeptRowsError(_UNKEPT)
        if self.staged.may_be_skipped:
            return
        count, others = self._count(latest), self._others(self._latest())
        is_short = stored < one(connection, count, self._values())
        if is_short and one(connection, others, self._values()) is not None:
            raise SkippedRowsError(_SKIPPED)

    def _count(self, latest: Composed) -> Composed:
        """Return the query for the number of rows to store."""
        from psycopg.sql import SQL

        return SQL("SELECT count(*) FROM ({}) AS latest WHERE NOT kl_deleted").format(latest)

    def _others(self, latest: Composed) -> Composed:
        """Return the query that finds rows whose values differ from the table's, as texts."""
        from psycopg.sql import SQL

        same = SQL(" AND ").join(
            SQL("CAST(kept.{0} AS text) IS NOT DISTINCT FROM CAST(latest.{0} AS text)").format(name)
            for name in self._names()
        )
        return SQL("SELECT 1 FROM ({}) AS latest WHERE NOT kl_deleted AND NOT {} LIMIT 1").format(
            latest, self._has_row(SQL("AND {}").format(same))
        )

    def _has_row(self, more: Composed | None = None) -> Composed:
        """Return whether the table has the row of `latest`, in SQL, with a further condition."""
        from psycopg.sql import SQL

        return SQL("EXISTS (SELECT FROM {} AS kept WHERE ({}) = ({}) {})").format(
            self.table.identifier, *self._keys_of_both(), more or SQL("")
        )

    def _fill(self, connection: Connection) -> bool:
        """Fill a table that this micro-batch has created, as if each row were a key's latest.

        Its primary key is built after the rows, in half the time. Return False, with nothing done,
        if a key occurs twice or somebody reads the table already.
        """
        import psycopg
        from psycopg.sql import SQL

        table = self.table.identifier
        constraint, key = run(
            connection,
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE conrelid = %s AND contype = 'p'",
            (self.table.oid(connection),),
        ).fetchall()[0]
        try:
            with connection.transaction():
                run(connection, SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE NOWAIT").format(table))
                primary = sql_name(constraint)
                run(connection, SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(table, primary))
                run(connection, self._upsert(self._rows(), can_conflict=False), self._values())
                run(
                    connection,
                    SQL("ALTER TABLE {} ADD CONSTRAINT {} {}").format(
                        table, primary, SQL(key.replace("%", "%%"))
                    ),
                )
        except (psycopg.errors.UniqueViolation, psycopg.errors.LockNotAvailable):
            return False
        return True

    def _check_count(self, connection: Connection) -> None:
        """Raise StorageError if rows are missing: a server crash empties an unlogged table."""
        from psycopg.sql import SQL

        found = one(
            connection,
            SQL("SELECT count(*) FROM {} WHERE {} = ANY(%(attempts)s)").format(
                self._source, SQL(ATTEMPT)
            ),
            self._values(),
        )
        if found != self.staged.rows:
            raise StorageError(
                f"table {self.table}: {self.staged.target.name} holds {found} of the "
                f"{self.staged.rows} rows that the tasks put there; restart the query"
            )

    def _values(self) -> dict[str, Any]:
        return {"attempts": list(self.staged.attempts)}

    @property
    def _source(self) -> Identifier:
        return self.staged.target.identifier

    def _names(self) -> list[Identifier]:
        return [sql_name(column.name) for column in self.staged.target.columns]

    def _rows(self, *, has_keys_alone: bool = False) -> Composed:
        """Return the query for the staged rows that count, in the types of the table."""
        from psycopg.sql import SQL

        chosen = [
            SQL("{} AS {}").format(column.value(), sql_name(column.name))
            for column in self.staged.target.columns
            if column.name in self.table.keys or not has_keys_alone or self.versions is not None
        ]
        rows = SQL("SELECT {}, {} FROM {} WHERE {} = ANY(%(attempts)s)").format(
            SQL(", ".join([DELETED, *RECORD])), SQL(", ").join(chosen), self._source, SQL(ATTEMPT)
        )
        return rows if self.versions is None else self.versions.but_older(rows)

    def _latest(self, *, is_narrow: bool = False, has_keys_alone: bool = False) -> Composed:
        """Return the query for the latest row of each key; narrow: keys with a deletion only."""
        from psycopg.sql import SQL

        has_keys_alone = has_keys_alone or is_narrow
        key = self.table.key()
        names = key if has_keys_alone else SQL(", ").join(self._names())
        rows = self._rows(has_keys_alone=has_keys_alone)
        only = (
            SQL(
                " WHERE ({key}) IN (SELECT {key} FROM ({rows}) AS deleted WHERE kl_deleted)"
            ).format(key=key, rows=rows)
            if is_narrow
            else SQL("")
        )
        return SQL(
            "SELECT DISTINCT ON ({key}) * FROM ("
            "SELECT DISTINCT ON ({key}, kl_topic, kl_partition) "
            "kl_deleted, kl_topic, kl_partition, kl_offset, kl_timestamp, {names} "
            "FROM ({rows}) AS staged{only} "
            "ORDER BY {key}, kl_topic, kl_partition, kl_offset DESC"
            ") AS of_partition ORDER BY {key}, kl_timestamp DESC NULLS LAST, "
            "kl_topic DESC, kl_partition DESC"
        ).format(key=key, names=names, rows=rows, only=only)

    def _delete(self, latest: Composed) -> Composed:
        from psycopg.sql import SQL

        return SQL(
            "DELETE FROM {} AS kept USING ({}) AS latest WHERE ({}) = ({}) AND latest.kl_deleted"
        ).format(self.table.identifier, latest, *self._keys_of_both())

    def _keys_of_both(self) -> tuple[Composed, Composed]:
        return self.table.key("kept.{}"), self.table.key("latest.{}")

    def _delete_others(self, connection: Connection) -> None:
        """Delete the rows whose keys have no staged row to store.

        Other rows are updated in place: they may have columns that the upsert does not write, and
        rows of other tables may refer to them.
        """
        from psycopg.sql import SQL

        run(
            connection,
            SQL(
                "DELETE FROM {} AS kept WHERE NOT EXISTS (SELECT FROM ({}) AS latest "
                "WHERE ({}) = ({}) AND NOT latest.kl_deleted)"
            ).format(
                self.table.identifier, self._latest(has_keys_alone=True), *self._keys_of_both()
            ),
            self._values(),
        )

    def _upsert(self, latest: Composed, *, can_conflict: bool = True, more: str = "") -> Composed:
        """Return the statement for rows; `more` goes behind the condition of its query."""
        from psycopg.sql import SQL

        names = self._names()
        others = [
            name
            for name, column in zip(names, self.staged.target.columns, strict=True)
            if column.name not in self.table.keys
        ]
        updates: SQL | Composed = SQL("")
        if can_conflict and others:
            updates = SQL("ON CONFLICT ({}) DO UPDATE SET {}").format(
                self.table.key(),
                SQL(", ").join(SQL("{0} = excluded.{0}").format(name) for name in others),
            )
        elif can_conflict:
            updates = SQL("ON CONFLICT ({}) DO NOTHING").format(self.table.key())
        listed = SQL(", ").join(names)
        return SQL(
            "INSERT INTO {table} ({names}) SELECT {names} FROM ({latest}) AS latest "
            "WHERE NOT kl_deleted {more} {updates}"
        ).format(
            table=self.table.identifier,
            names=listed,
            latest=latest,
            more=SQL(more),
            updates=updates,
        )

    def misfits(
        self, connection: Connection, *, is_replacing: bool
    ) -> Generator[Misfit, None, None]:
        """Yield the rows that the table refuses; rows that it cannot read, or else cannot store.

        Raises UndeletableRowError.
        """
        can_read = True
        if self.staged.target.keeps:
            unknown = self._without_row_before(is_replacing=is_replacing)
            rows = run(connection, unknown, self._values()).fetchall()
            for topic, partition, offset, key in rows:
                can_read = False
                yield Misfit(topic, partition, offset, key, NO_ROW_BEFORE)
            if not can_read:
                return
        with connection.transaction(force_rollback=True):
            for misfit in self._unreadable(connection):
                can_read = False
                yield misfit
        if can_read:
            with connection.transaction(force_rollback=True):
                yield from self._unstorable(connection, is_replacing)

    def _unstorable(self, connection: Connection, is_replacing: bool) -> Iterator[Misfit]:

        run(connection, "SET CONSTRAINTS ALL IMMEDIATE")
        if self.staged.target.keeps:
            self._keep_values(connection, is_replacing=is_replacing)
        count = self._number(connection)
        if is_replacing:
            self._check_others(connection)
        steps = self._steps(connection)
        refused = [(steps[0], found) for found in self._search(connection, steps[0], 1, count)]
        self._arrange(connection)
        count = int(one(connection, f"SELECT coalesce(max({_NUMBER}), 0) FROM {_NUMBERED}"))
        refused += [(steps[1], found) for found in self._search(connection, steps[1], 1, count)]
        faults = self._refused_still(connection, refused)
        # Without these, and with earlier records of their keys, others may be fine.
        own = [fault for fault in faults if not fault.is_of_others]
        for fault in own or faults:
            yield self._misfit(connection, fault.number, fault.reason)
        numbers = [fault.number for fault in own or faults]
        for versions in self._earlier(connection, numbers, count):
            for version in newest_first(versions):
                at = version.number
                faults = [f for s in steps for f in self._search(connection, s, at, at)]
                if not faults or (own and faults[0].is_of_others):
                    break
                yield self._misfit(connection, at, faults[0].reason)

    def _steps(self, connection: Connection) -> tuple[_Step, _Step]:
        """Return the deletion and the upsert of numbered rows."""
        from psycopg.sql import SQL

        part = SQL(_PART).format()
        delete, upsert = self._delete(part), self._upsert(part, more=f"ORDER BY {_NUMBER}")
        if not self.table.may_change_rows(connection):
            return _Step(delete), _Step(upsert)
        found = SQL("SELECT 1 FROM ({}) AS latest WHERE ").format(part)
        still = found + SQL("kl_deleted AND ") + self._has_row()
        gone = found + SQL("NOT kl_deleted AND NOT ") + self._has_row()
        stored = _Step(upsert, gone, _UNKEPT, self._count(part), self._others(part))
        return _Step(delete, still, _STILL_THERE), stored

    def _refused_still(
        self, connection: Connection, refused: list[tuple[_Step, _Fault]]
    ) -> list[_Fault]:
        """Try refused rows again, since they may refer to rows that came later."""
        known = -1
        while known != len(refused):
            known = len(refused)
            refused = [
                (step, again)
                for step, fault in refused
                for again in self._search(connection, step, fault.number, fault.number)
            ]
        return [fault for _, fault in refused]

    def _earlier(
        self, connection: Connection, refused: Sequence[int], count: int
    ) -> Iterable[list[Version]]:
        """Add the earlier records of refused keys to those that are tried; return them by key."""
        from psycopg.sql import SQL

        if not refused:
            return ()
        run(
            connection,
            SQL(
                "INSERT INTO kafkalog_numbered SELECT %(count)s + row_number() OVER (), staged.* "
                "FROM ({rows}) AS staged WHERE ({key}) IN "
                "(SELECT {key} FROM kafkalog_numbered WHERE kl_number = ANY(%(refused)s)) "
                "AND (kl_topic, kl_partition, kl_offset) NOT IN "
                "(SELECT kl_topic, kl_partition, kl_offset FROM kafkalog_numbered "
                "WHERE kl_number = ANY(%(refused)s))"
            ).format(rows=self._rows(), key=self.table.key()),
            {**self._values(), "refused": refused, "count": count},
        )
        of_keys: dict[int, list[Version]] = {}
        for rank, *version in run(
            connection,
            SQL(
                "SELECT dense_rank() OVER (ORDER BY {key}), kl_topic, kl_partition, kl_offset, "
                "kl_timestamp, kl_number FROM kafkalog_numbered WHERE kl_number > %s"
            ).format(key=self.table.key()),
            (count,),
        ).fetchall():
            of_keys.setdefault(rank, []).append(Version(*version))
        return of_keys.values()

    def _unreadable(self, connection: Connection) -> Iterator[Misfit]:
        """Yield the staged rows that the types of the columns cannot hold."""
        from psycopg.sql import SQL

        columns = self.staged.target.columns
        run(
            connection,
            SQL("CREATE TEMPORARY TABLE kafkalog_typed ({}) ON COMMIT DROP").format(
                SQL(", ").join(column.declaration() for column in columns)
            ),
        )
        run(
            connection,
            SQL(
                "CREATE TEMPORARY TABLE kafkalog_numbered ON COMMIT DROP AS "
                "SELECT row_number() OVER (ORDER BY kl_topic, kl_partition, kl_offset) "
                "AS {}, * FROM {} WHERE {} = ANY(%(attempts)s)"
            ).format(SQL(_NUMBER), self._source, SQL(ATTEMPT)),
            self._values(),
        )

        def store(chosen: Sequence[Column]) -> Composed:
            return SQL(
                "INSERT INTO kafkalog_typed ({}) SELECT {} FROM kafkalog_numbered "
                "WHERE kl_number BETWEEN %s AND %s"
            ).format(
                SQL(", ").join(sql_name(column.name) for column in chosen),
                SQL(", ").join(column.value() for column in chosen),
            )

        count = one(connection, "SELECT count(*) FROM kafkalog_numbered")
        for number, reason, _ in self._search(connection, _Step(store(columns)), 1, count):
            words = reason
            for column in columns:
                alone = _Step(store([column]))
                for of_column in self._search(connection, alone, number, number):
                    words = f'column "{column.name}": {of_column.reason}'
                if words != reason:
                    break
            yield self._misfit(connection, number, words)

    def _check_others(self, connection: Connection) -> None:
        import psycopg

        try:
            with connection.transaction():
                self._delete_others(connection)
        except psycopg.Error as fault:
            if not is_about_rows(fault):
                raise
            raise UndeletableRowError(
                f"a row that no record of the micro-batch keeps cannot be deleted: {_reason(fault)}"
            ) from fault

    def _search(
        self, connection: Connection, step: _Step, first: int, last: int
    ) -> Iterator[_Fault]:
        """Apply rows; yield those that are refused, and why."""
        import psycopg

        is_of_others = False
        if last < first:
            return
        try:
            with connection.transaction():
                stored = run(connection, step.statement, (first, last)).rowcount
                self._check_step(connection, step, (first, last), stored)
        except UnkeptRowsError as fault:
            reason = str(fault)
        except psycopg.Error as fault:
            if not is_about_rows(fault):
                raise
            reason, is_of_others = _reason(fault), fault.sqlstate in _OF_OTHERS
        else:
            return
        if first == last:
            yield _Fault(first, reason, is_of_others)
        else:
            middle = (first + last) // 2
            yield from self._search(connection, step, first, middle)
            yield from self._search(connection, step, middle + 1, last)

    @staticmethod
    def _check_step(
        connection: Connection, step: _Step, rows: tuple[int, int], stored: int
    ) -> None:
        if step.unkept and one(connection, step.unkept, rows) is not None:
            raise UnkeptRowsError(step.reason)
        if step.stored is None or step.others is None:
            return
        is_short = stored < one(connection, step.stored, rows)
        if is_short and one(connection, step.others, rows) is not None:
            raise SkippedRowsError(_SKIPPED)

    def _misfit(self, connection: Connection, number: int, reason: str) -> Misfit:
        from psycopg.sql import SQL

        form = "left({}::text, 200)" if len(self.table.keys) == 1 else "left(ROW({})::text, 200)"
        found = run(
            connection,
            SQL(
                f"SELECT kl_topic, kl_partition, kl_offset, {form} FROM kafkalog_numbered "
                "WHERE kl_number = %s"
            ).format(self.table.key()),
            (number,),
        ).fetchall()
        topic, partition, offset, key = found[0]
        return Misfit(topic, partition, offset, key, reason)

    def without(self, connection: Connection, refused: Sequence[Refusal]) -> StagedMerge:
        """Delete the rows of these records from the staging table; return those that are left."""
        from psycopg.sql import SQL

        columns = zip(*((each.topic, each.partition, each.offset) for each in refused), strict=True)
        topics, partitions, offsets = map(list, columns)
        deleted = run(
            connection,
            SQL(
                "DELETE FROM {} USING unnest(%(topics)s::text[], %(partitions)s::int[], "
                "%(offsets)s::bigint[]) AS refused(topic, partition, start) WHERE "
                "kl_topic = refused.topic AND kl_partition = refused.partition AND "
                "kl_offset = refused.start AND {} = ANY(%(attempts)s) RETURNING kl_deleted"
            ).format(self._source, SQL(ATTEMPT)),
            {"topics": topics, "partitions": partitions, "offsets": offsets, **self._values()},
        ).fetchall()
        deletions = sum(is_deletion for (is_deletion,) in deleted)
        return replace(
            self.staged,
            rows=self.staged.rows - len(deleted),
            deletions=self.staged.deletions - deletions,
            refused=[*self.staged.refused, *refused],
        )


def _reason(fault: psycopg.Error) -> str:
    column, detail = fault.diag.column_name, fault.diag.message_detail
    named = f'column "{column}": ' if column else ""
    more = f" ({detail})" if detail else ""
    return f"{named}{fault.diag.message_primary or fault}{more}"
