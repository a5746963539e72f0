"""The table in PostgreSQL that an upsert keeps, and its table of positions."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.postgres.client import one, run, sql_name
from kafkalog.sink.upsert.postgres.types import changes_values, column_type, staged_type

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier
    from pyspark.sql.types import DataType

    Connection = psycopg.Connection[tuple[Any, ...]]


_log = logging.getLogger("kafkalog.sink")
_POSITIONS = "kafkalog_positions"
_DELETIONS = "kafkalog_deletions_"
_NAME_SIZE_MAX = 63
"""Bytes of a name. PostgreSQL truncates longer names, and would not find the table again."""
_UNAPPLIED = -1
"""The batch id of a position's row before its first micro-batch; the row exists to be locked."""
_COLUMNS = """
SELECT a.attname, format_type(
    CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE a.atttypid END,
    CASE t.typtype WHEN 'd' THEN t.typtypmod ELSE a.atttypmod END),
    CASE WHEN n.nspname = 'pg_catalog' AND c.collname = 'default' AND c.collisdeterministic
    AND t.typname IN ('text', 'varchar') THEN 'pg_catalog."C"'
    ELSE quote_ident(n.nspname) || '.' || quote_ident(c.collname) END,
    format_type(CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE a.atttypid END, -1),
    a.attgenerated <> '' OR a.attidentity = 'a'
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_collation c ON c.oid = a.attcollation
LEFT JOIN pg_namespace n ON n.oid = c.collnamespace
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_NOT_LOGGED = """
SELECT oid::regclass::text FROM pg_class WHERE relpersistence <> 'p'
    AND (oid = %(oid)s OR oid IN (SELECT relid FROM pg_partition_tree(%(oid)s))) LIMIT 1
"""
_IS_KEY_UNIQUE = """
SELECT EXISTS (
    SELECT FROM pg_index i
    WHERE i.indrelid = %(oid)s AND i.indisunique AND i.indimmediate AND i.indpred IS NULL
        AND i.indnkeyatts = cardinality(%(keys)s::text[])
        AND i.indnkeyatts = (
            SELECT count(*) FROM pg_attribute a
            WHERE a.attrelid = i.indrelid AND a.attname = ANY(%(keys)s::text[])
                AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])))
"""


_UNFILLED = """
SELECT a.attname FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
    AND (a.attnotnull OR t.typnotnull) AND NOT a.atthasdef AND a.attidentity = ''
    AND t.typdefault IS NULL AND a.attname <> ALL(%(names)s::text[])
    AND NOT EXISTS (
        SELECT FROM pg_trigger g WHERE g.tgrelid = a.attrelid AND g.tgtype & 7 = 7
            AND NOT g.tgisinternal)
ORDER BY a.attnum LIMIT 1
"""
"""The first column that needs a value and gets none. A trigger before each inserted row (the bits
1, 2 and 4) may give it one."""
_ADDED = {"bad_records": "bigint NOT NULL DEFAULT 0", "other_ends": "text"}
"""The columns of the table of positions that earlier versions did not have."""
_HAS_POSITIONS = """
SELECT count(*) = cardinality(%(added)s::text[])
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE n.nspname = %(schema)s AND c.relname = %(name)s AND a.attname = ANY(%(added)s::text[])
"""
"""Whether the table of positions exists, with these columns."""


_MAY_CHANGE_ROWS = """
SELECT EXISTS (
        SELECT FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D'
            AND tgrelid IN (SELECT %(oid)s UNION SELECT relid FROM pg_partition_tree(%(oid)s)))
    OR EXISTS (
        SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = %(oid)s AND a.attname = ANY(%(keys)s::text[])
            AND greatest(a.atttypmod, t.typtypmod) >= 0)
"""
"""Whether a trigger, or the length or precision of a key, may make another row of a row."""
_REFERS_TO_ITSELF = """
SELECT EXISTS (SELECT FROM pg_constraint WHERE contype = 'f' AND conrelid = %(oid)s
    AND confrelid = %(oid)s)
"""
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
"""What a relation may be in which the upsert cannot find, count or merge rows."""
_RULE = """
SELECT rulename FROM pg_rewrite WHERE ev_class = %s AND ev_enabled IN ('O', 'A') LIMIT 1
"""
_POLICIES = """
SELECT NOT polpermissive, polname, polpermissive AND polcmd = '*'
    AND pg_get_expr(polqual, polrelid) = 'true'
    AND coalesce(pg_get_expr(polwithcheck, polrelid), 'true') = 'true'
FROM pg_policy WHERE polrelid = %(oid)s AND row_security_active(%(oid)s::oid) AND (
    0 = ANY(polroles) OR EXISTS (
        SELECT FROM unnest(polroles) AS r(oid) WHERE pg_has_role(r.oid, 'USAGE')))
ORDER BY polname
"""
"""The policies of row-level security for this role: whether it is restrictive, its name, and
whether it lets the role do everything with all rows."""
_CHILD = """
SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class c ON c.oid = inhparent
WHERE inhparent = %s AND c.relkind = 'r' LIMIT 1
"""


class MissingColumnsError(Exception):
    """The rows have columns that the table lacks."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, and its staged values."""

    name: str
    kind: str
    """The type of the table's column; for a domain its base type."""
    collation: str | None
    """Its name in SQL. "C" replaces the database's default where equal texts have equal bytes, as
    it sorts far faster. A collation that the table names stays, since it compares only with
    itself."""
    base: str = ""
    """The type without its length or precision. A value that does not fit into these is refused
    where it is stored; a cast to `kind` would silently cut it."""
    staged: str = ""
    """The type of the staged column."""

    def declaration(self) -> Composed:
        """Return the column as CREATE TABLE declares it."""
        from psycopg.sql import SQL

        return SQL("{} {}").format(
            sql_name(self.name), SQL((self.kind + self._collate()).replace("%", "%%"))
        )

    def staged_declaration(self) -> Composed:
        """Return the column as the staging tables declare it."""
        from psycopg.sql import SQL

        return SQL("{} {}").format(sql_name(self.name), SQL(self.staged))

    def value(self) -> Composed:
        """Return the staged value in the type of the column, read from its text if they differ."""
        from psycopg.sql import SQL

        form = "{name}" if self.staged == self.base else "CAST({text} AS {base})"
        # The text of an instant depends on the session's time zone, unless it says its own.
        is_instant = self.staged == "timestamp with time zone"
        text = "CAST({0} AT TIME ZONE 'UTC' AS text) || 'Z'" if is_instant else "CAST({0} AS text)"
        name = sql_name(self.name)
        return SQL(form + self._collate().replace("%", "%%")).format(
            name=name, text=SQL(text).format(name), base=SQL(self.base.replace("%", "%%"))
        )

    def as_staged(self, row: str) -> Composed:
        """Return the value of a row of the table in the type of the staged column."""
        from psycopg.sql import SQL

        form = "{}" if self.staged == self.base else f"CAST(CAST({{}} AS text) AS {self.staged})"
        return SQL(form).format(sql_name(row, self.name))

    def _collate(self) -> str:
        return f" COLLATE {self.collation}" if self.collation else ""


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise InvalidInputError for a name that PostgreSQL would truncate."""
    for name in names:
        size = len(name.encode("utf-8", "surrogatepass"))
        if size > _NAME_SIZE_MAX:
            raise InvalidInputError(
                f'{where}: the name "{name}" has {size} bytes, PostgreSQL takes '
                f"{_NAME_SIZE_MAX}: choose a shorter one"
            )


@dataclass(frozen=True, slots=True)
class PostgresTable:
    """A table by its schema and name, whether it exists or not."""

    schema: str
    name: str
    existed: bool = True
    """Whether `find` found it."""
    keys: tuple[str, ...] = ("key",)
    """The columns of its key."""

    @classmethod
    def find(
        cls, connection: Connection, given: str, keys: Sequence[str] = ("key",)
    ) -> PostgresTable:
        """Return the table `name` or `schema.name`; without a schema, the search path decides."""
        schema, _, name = given.rpartition(".")
        schema = schema or one(
            connection,
            "SELECT coalesce((SELECT n.nspname FROM pg_class c JOIN pg_namespace n "
            "ON n.oid = c.relnamespace WHERE c.oid = to_regclass(quote_ident(%s))), "
            "current_schema())",
            (name,),
        )
        if schema is None:
            raise InvalidInputError(
                f"table {given}: the search path has no schema to put it in; give it as schema.name"
            )
        existed = cls(schema, name).oid(connection) is not None
        return cls(schema, name, existed, tuple(keys))

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def beside(self, name: str) -> Identifier:
        """Return the identifier of a table in the same schema."""
        return sql_name(self.schema, name)

    @property
    def deletions(self) -> str:
        """The name of the table with the versions of its deleted rows, in the same schema."""
        whole = _DELETIONS + self.name
        if len(whole.encode()) <= _NAME_SIZE_MAX:
            return whole
        return _DELETIONS + hashlib.sha256(self.name.encode()).hexdigest()[:32]

    @property
    def identifier(self) -> Identifier:
        """The table in SQL."""
        return self.beside(self.name)

    def key(self, form: str = "{}") -> Composed:
        """Return the columns of its key in SQL, each in this form."""
        from psycopg.sql import SQL

        return SQL(", ").join(SQL(form).format(sql_name(name)) for name in self.keys)

    def oid(self, connection: Connection, name: str | None = None) -> int | None:
        """Return the OID of the table, or of `name` in its schema; None if it is missing."""
        found: int | None = one(
            connection,
            "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            (self.schema, name or self.name),
        )
        return found

    def lock(self, connection: Connection) -> None:
        """Wait until no other upsert writes to the table; lock it until the transaction ends."""
        run(
            connection,
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))",
            (f"kafkalog table {self}",),
        )

    def has_rows(self, connection: Connection) -> bool:
        """Return whether the table exists and has rows."""
        from psycopg.sql import SQL

        if self.oid(connection) is None:
            return False
        return bool(one(connection, SQL("SELECT EXISTS (SELECT FROM {})").format(self.identifier)))

    def prepare(
        self, connection: Connection, names: Sequence[str], types: Sequence[DataType]
    ) -> list[Column]:
        """Create the table and the table of positions if they are missing; return the columns.

        Raises InvalidInputError if an existing table does not fit or is unlogged, a name is too
        long, or the schema is missing; MissingColumnsError if the table lacks columns.
        """
        check_names(f"table {self}", names)
        values = {"schema": self.schema, "name": _POSITIONS, "added": list(_ADDED)}
        if not one(connection, _HAS_POSITIONS, values):
            self._check_schema(connection)
            self._create_positions(connection)
        if self.oid(connection) is None:
            self._create(connection, names, types)
        self._check_seen(connection)
        self._check_logged(connection)
        return self._columns(connection, names, types)

    def _create(
        self, connection: Connection, names: Sequence[str], types: Sequence[DataType]
    ) -> None:
        """Create the table; delete the positions of a dropped table of the same name.

        The versions of its deleted rows go too.
        """
        from psycopg.sql import SQL

        declared = [
            Column(name, column_type(data_type), None).declaration()
            for name, data_type in zip(names, types, strict=True)
        ]
        declared.append(SQL("PRIMARY KEY ({})").format(self.key()))
        with connection.transaction():
            self.lock(connection)
            if self.oid(connection) is not None:
                return  # another upsert has been faster
            run(
                connection,
                SQL("CREATE TABLE {} ({})").format(self.identifier, SQL(", ").join(declared)),
            )
            run(
                connection,
                SQL("DELETE FROM {} WHERE target_table = %s").format(self.beside(_POSITIONS)),
                (self.name,),
            )
            gone = self.beside(self.deletions)
            run(connection, SQL("DROP TABLE IF EXISTS {}").format(gone))

    def _check_schema(self, connection: Connection) -> None:
        query = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = %s)"
        if not one(connection, query, (self.schema,)):
            raise InvalidInputError(
                f'table {self}: the database has no schema "{self.schema}"; create it, or give the '
                "table as schema.name with one that exists"
            )

    def _check_seen(self, connection: Connection) -> None:
        """Refuse a table whose rows the upsert may not see, or that may write other rows."""
        oid = self.oid(connection)
        kind = one(connection, "SELECT relkind::text FROM pg_class WHERE oid = %s", (oid,))
        if kind in _KINDS:
            raise InvalidInputError(
                f"table {self}: it is {_KINDS[kind]} (expected a table). Give the table that has "
                "the rows."
            )
        rule = one(connection, _RULE, (oid,))
        if rule is not None:
            raise InvalidInputError(
                f'table {self}: its rule "{rule}" may write other rows than the log has, without '
                f'an error. Run DROP RULE "{rule}" ON {self}, or write a trigger in its place.'
            )
        child = one(connection, _CHILD, (oid,))
        if child is not None:
            raise InvalidInputError(
                f"table {self}: {child} inherits from it (expected no such table, since its rows "
                "are found here, and no key is unique in both). Run ALTER TABLE "
                f"{child} NO INHERIT {self}, or give another table."
            )
        for name in (self.name, _POSITIONS):
            self._check_policies(connection, name)

    def _check_policies(self, connection: Connection, name: str) -> None:
        """Refuse a table in this one's schema if row-level security may hide rows of it.

        A policy that lets the role do everything, without restrictive ones, hides none.
        """
        values = {"oid": self.oid(connection, name)}
        if not one(connection, "SELECT row_security_active(%(oid)s::oid)", values):
            return
        policies = run(connection, _POLICIES, values).fetchall()
        restrictive = [policy for is_restrictive, policy, _ in policies if is_restrictive]
        if not restrictive and any(lets_all for _, _, lets_all in policies):
            return
        role, table = one(connection, "SELECT current_user"), f"{self.schema}.{name}"
        remedy = f'CREATE POLICY kafkalog ON {table} TO "{role}" USING (true)'
        if restrictive:
            remedy = f'DROP POLICY "{restrictive[0]}" ON {table}'
        raise InvalidInputError(
            f'table {table}: row-level security may hide rows from role "{role}", so a deletion '
            f'would not find them. Run ALTER ROLE "{role}" BYPASSRLS, or {remedy}, or write as a '
            "role that sees all rows."
        )

    def may_change_rows(self, connection: Connection) -> bool:
        """Return whether the table may store a row otherwise than it comes, or drop it."""
        values = {"oid": self.oid(connection), "keys": list(self.keys)}
        return bool(one(connection, _MAY_CHANGE_ROWS, values))

    def refers_to_itself(self, connection: Connection) -> bool:
        """Return whether rows of the table may refer to other rows of it."""
        return bool(one(connection, _REFERS_TO_ITSELF, {"oid": self.oid(connection)}))

    def _check_logged(self, connection: Connection) -> None:
        """Refuse a table that a server crash empties: its position would outlive its rows."""
        found = one(connection, _NOT_LOGGED, {"oid": self.oid(connection)})
        if found is not None:
            raise InvalidInputError(
                f"table {self}: {found} is unlogged or temporary, so a crash of the server would "
                f"take its rows and leave the position; ALTER TABLE {found} SET LOGGED, or give a "
                "permanent table"
            )

    def _create_positions(self, connection: Connection) -> None:
        from psycopg.sql import SQL

        with connection.transaction():
            PostgresTable(self.schema, _POSITIONS).lock(connection)
            run(
                connection,
                SQL(
                    "CREATE TABLE IF NOT EXISTS {} (query_id text, target_table text, "
                    "table_oid oid, batch_id bigint NOT NULL, end_offsets jsonb NOT NULL, "
                    "time_ms bigint NOT NULL, PRIMARY KEY (query_id, target_table))"
                ).format(self.beside(_POSITIONS)),
            )
            for name, kind in _ADDED.items():
                run(
                    connection,
                    SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} {}").format(
                        self.beside(_POSITIONS), sql_name(name), SQL(kind)
                    ),
                )

    def _columns(
        self, connection: Connection, names: Sequence[str], types: Sequence[DataType]
    ) -> list[Column]:
        oid = self.oid(connection)
        rows = run(connection, _COLUMNS, (oid,)).fetchall()
        found = {row[0]: Column(*row[:4]) for row in rows}
        generated = {row[0] for row in rows if row[4]}
        if not found.keys() >= set(names):
            raise MissingColumnsError
        for name, data_type in zip(names, types, strict=True):
            ours, theirs = column_type(data_type), found[name].kind
            if ours != theirs and "bytea" in {ours, theirs}:
                cast = "binary" if theirs == "bytea" else "string"
                raise InvalidInputError(
                    f'table {self}: column "{name}" is {theirs}, the rows have {ours}: shape them '
                    f'with select or key_type, as in "cast({name} as {cast}) as {name}"'
                )
            if name in generated:
                raise InvalidInputError(
                    f'table {self}: column "{name}" is generated by PostgreSQL, the rows bring it '
                    "too; leave it out of select or schema"
                )
            if changes_values(data_type, theirs):
                raise InvalidInputError(
                    f'table {self}: column "{name}" is {theirs}, which would round or truncate the '
                    f"rows' {ours}; cast it in select or schema to what the column holds, or make "
                    f"the column {ours}"
                )
        unfilled = one(connection, _UNFILLED, {"oid": oid, "names": list(names)})
        if unfilled is not None:
            raise InvalidInputError(
                f'table {self}: column "{unfilled}" is NOT NULL without a default, and the rows do '
                "not bring it. Make it in select or schema, or give it a default."
            )
        if not one(connection, _IS_KEY_UNIQUE, {"oid": oid, "keys": list(self.keys)}):
            raise InvalidInputError(
                f"table {self} has neither a primary key nor a unique constraint of exactly the "
                f"columns {', '.join(self.keys)}, by which its rows are found (a deferrable one "
                "doesn't count, nor an index with WHERE or an expression). If the upsert has got "
                "another key, drop the table and start the view or a new query. Else add one."
            )
        return [
            replace(found[name], staged=staged_type(data_type))
            for name, data_type in zip(names, types, strict=True)
        ]

    def additions(
        self, connection: Connection, names: Sequence[str], types: Sequence[DataType]
    ) -> list[str]:
        """Return the statements that add the columns which the table lacks; [] if it is missing.

        Raises InvalidInputError if a column of the key is missing.
        """
        from psycopg.sql import SQL

        oid = self.oid(connection)
        if oid is None:
            return []
        found = [row[0] for row in run(connection, _COLUMNS, (oid,)).fetchall()]
        if missing := [name for name in self.keys if name not in found]:
            raise InvalidInputError(
                f"table {self} has the columns {', '.join(found)}; of its key are missing: "
                f"{', '.join(missing)}"
            )
        form = SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {}")
        return [
            form.format(self.identifier, Column(name, column_type(data_type), None).declaration())
            .as_string(connection)
            .replace("%%", "%")
            for name, data_type in zip(names, types, strict=True)
            if name not in found
        ]

    def add_columns(self, connection: Connection, additions: Sequence[str]) -> None:
        """Run the statements of `additions`."""
        with connection.transaction():
            self.lock(connection)
            for statement in additions:
                run(connection, statement.replace("%", "%%"))

    def positions(self, connection: Connection) -> dict[str, Position]:
        """Return the position of each query that has written to the table.

        Positions of another table of this name (dropped, or restored without them) do not count.
        """
        from psycopg.sql import SQL

        oid = self.oid(connection)
        if oid is None or self.oid(connection, _POSITIONS) is None:
            return {}
        rows = run(
            connection,
            SQL(
                # Columns may be missing until the next micro-batch.
                "SELECT query_id, batch_id, end_offsets, time_ms, "
                "coalesce((to_jsonb(p) ->> 'bad_records')::bigint, 0), "
                "to_jsonb(p) ->> 'other_ends' FROM {} AS p "
                "WHERE target_table = %s AND table_oid = %s AND batch_id > %s"
            ).format(self.beside(_POSITIONS)),
            (self.name, oid, _UNAPPLIED),
        )
        return {query_id: Position(*values) for query_id, *values in rows.fetchall()}

    def writers(self, connection: Connection) -> set[str]:
        """Return the ids of all queries with a position for this name, even of a dropped table."""
        from psycopg.sql import SQL

        if self.oid(connection, _POSITIONS) is None:
            return set()
        rows = run(
            connection,
            SQL("SELECT query_id FROM {} WHERE target_table = %s AND batch_id > %s").format(
                self.beside(_POSITIONS)
            ),
            (self.name, _UNAPPLIED),
        )
        return {query_id for (query_id,) in rows.fetchall()}

    def lock_position(self, connection: Connection, query_id: str) -> Position | None:
        """Return the query's position; lock it, and the table's name, for this transaction."""
        from psycopg.sql import SQL

        run(connection, SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(self.identifier))
        run(
            connection,
            SQL(
                "INSERT INTO {} (query_id, target_table, batch_id, end_offsets, time_ms) "
                "VALUES (%s, %s, %s, '{{}}', 0) ON CONFLICT DO NOTHING"
            ).format(self.beside(_POSITIONS)),
            (query_id, self.name, _UNAPPLIED),
        )
        row = run(
            connection,
            SQL(
                "SELECT table_oid, batch_id, end_offsets, time_ms, bad_records, other_ends FROM {} "
                "WHERE query_id = %s AND target_table = %s FOR UPDATE"
            ).format(self.beside(_POSITIONS)),
            (query_id, self.name),
        ).fetchone()
        if row is None or row[0] != self.oid(connection) or row[1] == _UNAPPLIED:
            return None
        return Position(*row[1:])

    def forget_others(self, connection: Connection, query_id: str) -> None:
        """Delete the positions of all other queries, since their rows are replaced."""
        from psycopg.sql import SQL

        run(
            connection,
            SQL("DELETE FROM {} WHERE target_table = %s AND query_id <> %s").format(
                self.beside(_POSITIONS)
            ),
            (self.name, query_id),
        )

    def record(self, connection: Connection, query_id: str, position: Position) -> None:
        """Store the query's position."""
        from psycopg.sql import SQL

        run(
            connection,
            SQL(
                "UPDATE {} SET table_oid = %s, batch_id = %s, end_offsets = %s, time_ms = %s, "
                "bad_records = %s, other_ends = %s WHERE query_id = %s AND target_table = %s"
            ).format(self.beside(_POSITIONS)),
            (
                self.oid(connection),
                position.batch_id,
                position.end_offsets_json(),
                position.time_ms,
                position.bad_records,
                position.other_ends,
                query_id,
                self.name,
            ),
        )
