"""The unique indexes of a PostgreSQL table other than its key, and whose values the rows get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kafkalog.sink.upsert.postgres.client import run
from kafkalog.sink.upsert.unique_moves import Arrangement, Claim, Rival, arrange

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]


_INDEXES = """
SELECT i.indexrelid,
    ARRAY(SELECT pg_get_indexdef(i.indexrelid, k, true) FROM generate_series(1, i.indnkeyatts) k
        ORDER BY k),
    ARRAY(SELECT CASE WHEN c.oid IS NULL THEN ''
            ELSE ' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname) END
        FROM unnest(i.indcollation::oid[]) WITH ORDINALITY AS u(oid, k)
        LEFT JOIN pg_collation c ON c.oid = u.oid
        LEFT JOIN pg_namespace n ON n.oid = c.collnamespace
        WHERE u.k <= i.indnkeyatts ORDER BY u.k),
    ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid
        AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])),
    coalesce(pg_get_expr(i.indpred, i.indrelid), 'true'),
    coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false)
FROM pg_index i WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid
"""
_COLUMNS = """
SELECT a.attname::text, a.attgenerated <> '', pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_PARKABLE = """
WITH used AS (
    SELECT i.indrelid, k.attnum FROM pg_index i, unnest(i.indkey::int2[]) AS k(attnum)
    WHERE i.indexrelid = %(index)s
    UNION SELECT i.indrelid, d.refobjsubid FROM pg_index i JOIN pg_depend d
        ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid AND d.refobjid = i.indrelid
    WHERE i.indexrelid = %(index)s)
SELECT quote_ident(a.attname), a.attname::text, format_type(a.atttypid, -1), t.typcategory::text,
    EXISTS (SELECT FROM pg_constraint f WHERE f.contype = 'f' AND f.confrelid = a.attrelid
        AND a.attnum = ANY(f.confkey))
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attnum > 0 AND a.attgenerated = '' AND a.attname <> ALL(%(keys)s::text[])
    AND (a.attrelid, a.attnum) IN (
        SELECT indrelid, attnum FROM used
        UNION SELECT d.refobjid, d.refobjsubid FROM used
            JOIN pg_attrdef g ON g.adrelid = used.indrelid AND g.adnum = used.attnum
            JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = g.oid
                AND d.refobjid = used.indrelid)
"""
"""The columns from which an index takes its values, generated ones through others, and whether
foreign keys refer to them."""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique index that the key does not make unique already."""

    oid: int
    parts: Sequence[str]
    """Its columns or expressions, in SQL."""
    collations: Sequence[str]
    columns: Sequence[str]
    """Those of its parts that are columns."""
    predicate: str
    """Which rows it has, in SQL."""
    compares_nulls: bool

    def values(self, of: str, more: str) -> str:
        """Return the query for the values that rows `of` have in it, with the columns `more`."""
        values = ", ".join(f"({part}) AS kl_v{n}" for n, part in enumerate(self.parts))
        return f"SELECT {more}, {values} FROM {of} WHERE {self.predicate}"

    def same(self, one: str, other: str) -> str:
        """Return the condition that two queries of `values` give the same values."""
        equal = "IS NOT DISTINCT FROM" if self.compares_nulls else "="
        return " AND ".join(
            f"{one}.kl_v{n}{collation} {equal} {other}.kl_v{n}"
            for n, collation in enumerate(self.collations)
        )


class NumberedValues:
    """The values that the numbered rows of a micro-batch get, and the rows that have them.

    `numbered` is a temporary table: `kl_number` in the order of the log, `kl_deleted` and the
    columns `names`. `oid` is that of the table, `name` its name in SQL.
    """

    def __init__(
        self,
        connection: Connection,
        oid: int,
        name: str,
        numbered: str,
        *,
        names: Sequence[str],
        keys: Sequence[str],
    ) -> None:
        self._connection = connection
        self._oid = oid
        self._name = name
        self._numbered = numbered
        self._names = set(names)
        self._keys = list(keys)

    def _run(self, text: str) -> psycopg.Cursor[tuple[Any, ...]]:
        return run(self._connection, text.replace("%", "%%"))

    @cached_property
    def indexes(self) -> list[UniqueIndex]:
        """The unique indexes that two rows of different keys may violate."""
        rows = run(self._connection, _INDEXES, (self._oid,)).fetchall()
        found = [UniqueIndex(*row) for row in rows]
        return [index for index in found if not set(index.columns) >= set(self._keys)]

    def arrange(self, has_earlier: Callable[[int], bool]) -> Arrangement:
        """Arrange the rows that get each other's values, and free values in circles."""
        claims = [claim for n in range(len(self.indexes)) for claim in self._claims(n)]
        rivals = [rival for n in range(len(self.indexes)) for rival in self._rivals(n)]
        moves = arrange(claims, rivals, has_earlier)
        for row, index in moves.parked:
            self._park(row, self.indexes[index])
        return moves

    def _pairs(self, form: str) -> str:
        return " AND ".join(form.replace("{}", _quoted(key)) for key in self._keys)

    @cached_property
    def _after(self) -> str:
        """The query for the numbered rows with all columns of the table, as they are to be."""
        plain, generated = [], []
        for name, is_generated, expression in run(
            self._connection, _COLUMNS, (self._oid,)
        ).fetchall():
            column = _quoted(name)
            if is_generated:
                generated.append(f"({expression}) AS {column}")
            elif name in self._names:
                plain.append(f"mine.{column}")
            else:
                # A number of a sequence is no other row's.
                is_known = expression is not None and "nextval(" not in expression
                default = f"({expression})" if is_known else "NULL"
                is_new = f"theirs.{_quoted(self._keys[0])} IS NULL"
                plain.append(
                    f"CASE WHEN {is_new} THEN {default} ELSE theirs.{column} END AS {column}"
                )
        alias = _quoted("kl_after")
        inner = (
            f"(SELECT mine.kl_number, {', '.join(plain)} FROM {self._numbered} AS mine "
            f"LEFT JOIN {self._name} AS theirs ON {self._pairs('theirs.{} = mine.{}')} "
            f"WHERE NOT mine.kl_deleted) AS {alias}"
        )
        if not generated:
            return inner
        return f"(SELECT *, {', '.join(generated)} FROM {inner}) AS {alias}"

    def _claims(self, number: int) -> Iterator[Claim]:
        index = self.indexes[number]
        keys = ", ".join(map(_quoted, self._keys))
        mine = index.values(self._after, f"kl_number, {keys}")
        theirs = index.values(self._name, keys)
        for row, holder in self._run(
            f"SELECT mine.kl_number, its.kl_number FROM ({mine}) AS mine "
            f"JOIN ({theirs}) AS theirs ON {index.same('mine', 'theirs')} "
            f"LEFT JOIN {self._numbered} AS its ON {self._pairs('its.{} = theirs.{}')} "
            f"WHERE NOT ({self._pairs('mine.{} = theirs.{}')}) AND its.kl_deleted IS NOT TRUE"
        ).fetchall():
            yield Claim(number, row, holder)

    def _rivals(self, number: int) -> Iterator[Rival]:
        index = self.indexes[number]
        compared = ", ".join(f"kl_v{n}{c}" for n, c in enumerate(index.collations))
        known = " AND ".join(f"kl_v{n} IS NOT NULL" for n in range(len(index.parts)))
        for row, value in self._run(
            f"SELECT kl_number, kl_value FROM (SELECT kl_number, "
            f"dense_rank() OVER (ORDER BY {compared}) AS kl_value, "
            f"count(*) OVER (PARTITION BY {compared}) AS kl_count "
            f"FROM ({index.values(self._after, 'kl_number')}) AS given "
            f"WHERE {'true' if index.compares_nulls else known}) AS ranked WHERE kl_count > 1"
        ).fetchall():
            yield Rival(number, value, row)

    def _park(self, row: int, index: UniqueIndex) -> None:
        """Free the value that the table's row of a numbered row has, if a column allows it.

        Only a column that the row brings is changed, since its new value comes afterwards.
        """
        import psycopg

        found = run(self._connection, _PARKABLE, {"index": index.oid, "keys": self._keys})
        parkable = [each for each in found.fetchall() if each[1] in self._names]
        before = self._values_of(row, index)
        for column, name, kind, category, is_referred_to in sorted(
            parkable, key=lambda each: each[1] not in index.columns
        ):
            may_be_null = not (index.compares_nulls or is_referred_to)
            values = self._free_values(column, name, kind, category)
            for value in [*(["NULL"] if may_be_null else []), *values]:
                try:
                    with self._connection.transaction():
                        self._run(
                            f"UPDATE {self._name} AS kept SET {column} = {value} "
                            f"FROM {self._numbered} AS mine WHERE mine.kl_number = {row} "
                            f"AND {self._pairs('kept.{} = mine.{}')}"
                        )
                except (psycopg.errors.IntegrityError, psycopg.errors.DataError):
                    continue
                if self._values_of(row, index) != before:
                    return

    def _values_of(self, row: int, index: UniqueIndex) -> object:
        """Return, as text, the values in an index of the table's row of a numbered row."""
        keys = ", ".join(map(_quoted, self._keys))
        return self._run(
            f"SELECT ROW(theirs.*)::text FROM ({index.values(self._name, keys)}) AS theirs "
            f"JOIN {self._numbered} AS mine ON {self._pairs('theirs.{} = mine.{}')} "
            f"WHERE mine.kl_number = {row}"
        ).fetchall()

    def _free_values(self, column: str, name: str, kind: str, category: str) -> Iterator[str]:
        """Yield values of a column that no row has, in SQL, the plainest first."""
        drawn = "md5(random()::text || clock_timestamp()::text)"
        known = f"SELECT {column} AS kl_v FROM {self._name}"
        if name in self._names:
            known += f" UNION ALL SELECT {column} FROM {self._numbered}"
        if category == "S":
            yield f"coalesce(kept.{column}, '') || '.' || {drawn}"
            # As long as it was, and with the first letter, for a CHECK.
            size = f"greatest(coalesce(length(kept.{column}), 1), 1)"
            for start in (1, 0):
                text = f"coalesce(left(kept.{column}, {start}), '') "
                text += f"|| left({drawn}, {size} - {start})"
                yield (
                    f"(SELECT kl_t FROM (SELECT {text} AS kl_t FROM generate_series(1, 99)) AS t "
                    f"WHERE kl_t NOT IN (SELECT kl_v FROM ({known}) AS known "
                    "WHERE kl_v IS NOT NULL) LIMIT 1)"
                )
        elif category == "N":
            yield f"(SELECT max(kl_v) + 1 FROM ({known}) AS known)"
            yield f"(SELECT min(kl_v) - 1 FROM ({known}) AS known)"
        elif category == "D":
            yield f"(SELECT max(kl_v) + interval '1 day' FROM ({known}) AS known)"
            yield f"(SELECT min(kl_v) - interval '1 day' FROM ({known}) AS known)"
        elif category == "E":
            others = f"unnest(enum_range(NULL::{kind})) AS other(kl_o)"
            free = f"kl_o NOT IN (SELECT kl_v FROM ({known}) AS known WHERE kl_v IS NOT NULL)"
            yield f"(SELECT kl_o FROM {others} WHERE {free} LIMIT 1)"
        elif kind == "uuid":
            yield f"{drawn}::uuid"
        elif kind == "bytea":
            yield f"decode({drawn}, 'hex')"
