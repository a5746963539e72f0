"""The client side of PostgreSQL: connections, names in statements, and the kind of an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.postgres.arrow_connection import ArrowConnection

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import SQL, Composed, Identifier

    Connection = psycopg.Connection[tuple[Any, ...]]
    Statement = str | SQL | Composed


_DEFAULTS = {
    "application_name": "kafkalog",
    "connect_timeout": 30,
    "keepalives_idle": 30,
    "tcp_user_timeout": 60_000,
}
"""The last two end a wait for a server that is no longer there."""
_ROW_FAULTS = {"21", "22", "23", "44", "54", "P0"}
"""Classes of SQLSTATE: two rows for one, data, constraints, check option, program limits, raised by
users."""
_HOW_TO_WRITE = (
    "as name=value with values that hold spaces or quotes in single quotes, or as a URL with such "
    "characters, and any of @ / ? # in a password, as %40, %2F and so on"
)


def address(conninfo: str) -> dict[str, Any]:
    """Return the parameters that libpq reads from `conninfo`.

    Raises InvalidInputError if libpq cannot read it, or if a part of the password may have become
    part of a host or database name. The error quotes nothing of `conninfo`, and has no cause that
    would.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found = conninfo_to_dict(conninfo)
    except (psycopg.Error, UnicodeError):
        found = None
    if found is None or "\0" in conninfo or _is_ambiguous(conninfo):
        raise InvalidInputError(
            f"PostgresUpsert: conninfo cannot be read, or not surely; write it {_HOW_TO_WRITE}"
        )
    return found


def _is_ambiguous(conninfo: str) -> bool:
    """Return whether it is a URL with an @ or / that may belong to the password."""
    scheme, is_url, rest = conninfo.partition("://")
    before, at, after = rest.partition("@")
    if not is_url or scheme not in {"postgresql", "postgres"} or not at:
        return False
    if "/" in before:
        return "?" not in before  # else the @ is a parameter's
    return "@" in after.partition("?")[0]


def connect(conninfo: str) -> Connection:
    """Return a connection in autocommit; its text is UTF-8 whatever the database's encoding."""
    import psycopg

    # Without prepared statements: these would outlive a change of the table's columns.
    connection = psycopg.connect(
        complete_conninfo(conninfo), autocommit=True, prepare_threshold=None
    )
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def connect_for_arrow(conninfo: str) -> ArrowConnection:
    """Return a connection that copies Arrow columns, with the same settings as `connect`."""
    return ArrowConnection(complete_conninfo(conninfo))


def complete_conninfo(conninfo: str) -> str:
    """Return a connection string with our defaults, and text in UTF-8."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    given = conninfo_to_dict(conninfo)
    more: dict[str, Any] = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return make_conninfo(conninfo, client_encoding="UTF8", **more)


def is_about_rows(fault: psycopg.Error) -> bool:
    """Return whether PostgreSQL refuses a row, and not the work as a whole."""
    return is_row_fault(fault.sqlstate)


def is_row_fault(sqlstate: str | None) -> bool:
    """Return whether an SQLSTATE is about a row."""
    return (sqlstate or "")[:2] in _ROW_FAULTS


def sql_name(*parts: str) -> Identifier:
    """Return a name for a statement of `run`, where % begins a parameter."""
    from psycopg.sql import Identifier

    return Identifier(*(part.replace("%", "%%") for part in parts))


def run(
    connection: Connection, statement: Statement, values: Sequence[Any] | Mapping[str, Any] = ()
) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run one statement."""
    # Always pass values, even none: only then %% means one %.
    return connection.execute(statement, values)


def one(
    connection: Connection, statement: Statement, values: Sequence[Any] | Mapping[str, Any] = ()
) -> Any:
    """Return the first value of the first row of a query, or None without a row."""
    row = run(connection, statement, values).fetchone()
    return None if row is None else row[0]
