"""The unique indexes of an SQLite table, its key aside, and whose values the staged rows get."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.sqlite.staging_file import NUMBER
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted
from kafkalog.sink.upsert.unique_moves import Claim, Rival

_EXPRESSION = -2
"""The number that `PRAGMA index_xinfo` gives for a column that is an expression."""
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^]]*\]|--[^\n]*|/\*.*?\*/|\w+|.""",
    re.DOTALL,
)
_WORDS_BEHIND = re.compile(r"\s+(?:ASC|DESC)\s*\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SQLiteUniqueIndex:
    """A unique index that the key does not make unique already."""

    parts: tuple[str, ...]
    """Its columns or expressions, in SQL."""
    collations: tuple[str, ...]
    columns: tuple[str, ...]
    """Those of its parts that are columns."""
    predicate: str
    """Which rows it has, in SQL."""

    def values(self, of: str, more: str) -> str:
        """Return the query for the values that rows `of` have in it, with the columns `more`."""
        values = ", ".join(f"{part} AS kl_v{n}" for n, part in enumerate(self.parts))
        return f"SELECT {more}, {values} FROM {of} WHERE {self.predicate}"

    def same(self, one: str, other: str) -> str:
        """Return the condition that two queries of `values` give the same values."""
        return " AND ".join(
            f"{one}.kl_v{n} = {other}.kl_v{n} COLLATE {collation}"
            for n, collation in enumerate(self.collations)
        )


def unique_indexes(table: SQLiteTable) -> list[SQLiteUniqueIndex]:
    """Return the unique indexes of a table that two rows of different keys may violate.

    Those with generated columns are left out: SQLite does not say how it computes them.
    """
    found = []
    generated = {name.lower() for name in table.generated()}
    keys = {name.lower() for name in table.keys}
    for _, name, is_unique, _, is_partial in table.connection.execute(
        f"PRAGMA index_list({quoted(table.name)})"
    ).fetchall():
        rows = table.connection.execute(f"PRAGMA index_xinfo({quoted(name)})").fetchall()
        own = [row for row in rows if row[5]]
        columns = [row[2] for row in own if row[1] != _EXPRESSION]
        lowered = {(column or "").lower() for column in columns}
        if not is_unique or lowered >= keys or lowered & generated:
            continue
        sql = table.connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'index' AND name = ?", (name,)
        ).fetchone()[0]
        written, predicate = _written(sql) if sql else ([], "")
        parts = [
            written[place] if row[1] == _EXPRESSION else quoted(row[2])
            for place, row in enumerate(own)
        ]
        found.append(
            SQLiteUniqueIndex(
                tuple(parts),
                tuple(row[4] for row in own),
                tuple(columns),
                predicate if is_partial else "TRUE",
            )
        )
    return found


def check_conflict_clauses(table: SQLiteTable) -> None:
    """Refuse a table that would delete or skip a row whose unique value another row has.

    Raises InvalidInputError. The upsert's own clause stands above that of the key.
    """
    (sql,) = table.connection.execute(
        "SELECT sql FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table.name,)
    ).fetchone()
    words = " ".join(token.upper() for token in _TOKEN.findall(sql) if token.isalnum())
    clause = re.search(r"ON CONFLICT (REPLACE|IGNORE)", words)
    if clause is not None and (others := unique_indexes(table)):
        raise InvalidInputError(
            f"{table.where}: it is declared {clause[0]}, so a row would go without an error where "
            f"two have the same {', '.join(others[0].parts)} (expected ON CONFLICT ABORT, the "
            "default). Make the table without the clause."
        )


def _written(sql: str) -> tuple[list[str], str]:
    """Return the parts of an index, and its predicate, as CREATE INDEX has them."""
    parts, depth, text, rest = [""], 0, "", ""
    for token in _TOKEN.findall(sql):
        if depth == -1:
            rest += token
            continue
        depth += (token == "(") - (token == ")")
        if depth == 0 and token == ")":
            depth = -1
        elif depth == 1 and token == "(" and parts == [""] and not text:
            text = "begun"
        elif depth == 1 and token == ",":
            parts.append("")
        elif depth >= 1:
            parts[-1] += token
    where = re.sub(r"\A\s*WHERE\b", "", rest, flags=re.IGNORECASE)
    return [_WORDS_BEHIND.sub("", part) for part in parts], where


class StagedValues:
    """The values that staged rows get, and the rows of the table that have them.

    `source` and `only` say which staged rows, named `mine`, are stored. If `is_emptied`, the table
    has no rows any more, and columns that the upsert does not write are not known.
    """

    def __init__(self, table: SQLiteTable, source: str, only: str, *, is_emptied: bool) -> None:
        self._table = table
        self._connection = table.connection
        given = {name.lower() for name in table.names}
        found = unique_indexes(table)
        self.indexes = [
            index
            for index in found
            if not is_emptied
            or (
                index.predicate == "TRUE"
                and len(index.columns) == len(index.parts)
                and {name.lower() for name in index.columns} <= given
            )
        ]
        name = quoted(table.name)
        keys = [quoted(key) for key in table.keys]
        same = " AND ".join(f"theirs.{key} = mine.{key} COLLATE BINARY" for key in keys)
        columns = [f"mine.{quoted(each)}" for each in table.names]
        for other, default in table.defaults().items():
            is_new = f"theirs.{keys[0]} IS NULL"
            columns.append(
                f"CASE WHEN {is_new} THEN {default} ELSE theirs.{quoted(other)} END "
                f"AS {quoted(other)}"
            )
        self._after = (
            f"(SELECT mine.{NUMBER}, {', '.join(columns)} FROM {source} AS mine "
            # An index may write the table's name before a column.
            f"LEFT JOIN {name} AS theirs ON {same} WHERE {only}) AS {name}"
        )
        own = ", ".join(f"mine.{key}" for key in keys)
        self._numbers = f"(SELECT mine.{NUMBER}, {own} FROM {source} AS mine WHERE {only})"
        self._keys = keys

    def claims(self) -> Iterator[Claim]:
        """Yield the rows that get a value which another row of the table has."""
        keys = ", ".join(self._keys)
        is_other = " OR ".join(f"mine.{key} <> theirs.{key} COLLATE BINARY" for key in self._keys)
        is_its = " AND ".join(f"its.{key} = theirs.{key} COLLATE BINARY" for key in self._keys)
        for number, index in enumerate(self.indexes):
            mine = index.values(self._after, f"{NUMBER}, {keys}")
            theirs = index.values(quoted(self._table.name), keys)
            for row, holder in self._connection.execute(
                f"SELECT mine.{NUMBER}, its.{NUMBER} FROM ({mine}) AS mine "
                f"JOIN ({theirs}) AS theirs ON {index.same('mine', 'theirs')} "
                f"LEFT JOIN {self._numbers} AS its ON {is_its} WHERE {is_other}"
            ):
                yield Claim(number, row, holder)

    def rivals(self) -> Iterator[Rival]:
        """Yield the rows that get a value which another staged row gets too."""
        for number, index in enumerate(self.indexes):
            values = index.values(self._after, NUMBER)
            compared = ", ".join(f"kl_v{n} COLLATE {c}" for n, c in enumerate(index.collations))
            known = " AND ".join(f"kl_v{n} IS NOT NULL" for n in range(len(index.parts)))
            for row, value in self._connection.execute(
                f"SELECT {NUMBER}, kl_value FROM (SELECT {NUMBER}, "
                f"dense_rank() OVER (ORDER BY {compared}) AS kl_value, "
                f"count(*) OVER (PARTITION BY {compared}) AS kl_count "
                f"FROM ({values}) WHERE {known}) WHERE kl_count > 1"
            ):
                yield Rival(number, value, row)

    def park(self, source: str, row: int, number: int) -> None:
        """Free the value that the table's row of a staged row has, if a column allows it.

        Only a column that the row brings is changed, since its new value comes afterwards.
        """
        name, index = quoted(self._table.name), self.indexes[number]
        same = " AND ".join(
            f"{key} = (SELECT {key} FROM {source} WHERE {NUMBER} = ?1) COLLATE BINARY"
            for key in self._keys
        )
        kept = f"SELECT * FROM ({index.values(name, ', '.join(self._keys))}) WHERE {same}"
        before = self._connection.execute(kept, (row,)).fetchall()
        fixed = {key.lower() for key in self._table.keys}
        parts = {column.lower() for column in index.columns}
        columns = [column for column in self._table.names if column.lower() not in fixed]
        # No CHECK need hold now: it is looked at when the row gets its new values.
        self._connection.execute("PRAGMA ignore_check_constraints = ON")
        try:
            for column in sorted(columns, key=lambda each: each.lower() not in parts):
                c = quoted(column)
                for value in _free_values(c, name):
                    try:
                        self._connection.execute(
                            f"UPDATE {name} SET {c} = {value} WHERE {same}", (row,)
                        )
                    except (sqlite3.IntegrityError, sqlite3.OperationalError) as fault:
                        if not _is_of_value(fault):
                            raise
                        continue
                    if self._connection.execute(kept, (row,)).fetchall() != before:
                        return
        finally:
            self._connection.execute("PRAGMA ignore_check_constraints = OFF")


def _is_of_value(fault: sqlite3.Error) -> bool:
    """Return whether SQLite refuses a value: by a constraint, or in an index's expression."""
    is_error = fault.sqlite_errorcode == sqlite3.SQLITE_ERROR
    return isinstance(fault, sqlite3.IntegrityError) or is_error


def _free_values(column: str, table: str) -> Sequence[str]:
    """Return values for a column that no other row has, in SQL, the plainest first."""
    text = f"{column} || '.' || hex(randomblob(8))"
    return (
        "NULL",
        f"CASE typeof({column}) WHEN 'text' THEN {text} WHEN 'blob' THEN randomblob(16) "
        f"ELSE (SELECT max({column}) FROM {table} WHERE typeof({column}) IN ('integer', 'real')) "
        "+ 1 + abs(random() % 1000000000) END",
        f"(SELECT min({column}) FROM {table}) - 1",
        "hex(randomblob(16))",
    )
