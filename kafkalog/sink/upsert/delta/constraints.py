"""The search for the record that a Delta table's CHECK constraints refuse.

Delta only says that some rows are refused. To find the first one, the rows are written again, by
halves, into a scratch table with the same constraint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.sink.upsert.delta.columns import DeltaColumns, first_fault, record_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

__all__ = ["first_refused", "is_refusal"]

_CONSTRAINT = "delta.constraints."


def is_refusal(fault: Exception) -> bool:
    """Return whether a constraint of the table caused the fault."""
    return "validation check" in str(fault)


def first_refused(
    table: DeltaTable, target: DeltaColumns, driver_batches: Iterator[pa.RecordBatch]
) -> str | None:
    """Name the first record that a constraint refuses, and the constraint; None without one."""
    import pyarrow.compute as pc

    constraints = {
        name.removeprefix(_CONSTRAINT): text
        for name, text in table.metadata().configuration.items()
        if name.startswith(_CONSTRAINT)
    }
    if not constraints:
        return None
    with tempfile.TemporaryDirectory(prefix="kafkalog-") as scratch:
        checks = {
            name: _Check(table, name, text, Path(scratch) / str(number))
            for number, (name, text) in enumerate(constraints.items())
        }
        for driver_batch in driver_batches:
            stored = driver_batch.filter(pc.invert(driver_batch.column(0)))
            for name, check in checks.items():
                row = check.first_refused(stored, target)
                if row is not None:
                    return (
                        f"{record_of(stored, row)}: {target.where}: the table's constraint {name} "
                        f"({constraints[name]}) refuses the row"
                    )
    return None


class _Check:
    """A scratch table with one constraint."""

    def __init__(self, table: DeltaTable, name: str, text: str, directory: Path) -> None:
        from deltalake import DeltaTable, Schema

        schema = table.schema()
        self._scratch = DeltaTable.create(directory, Schema(schema.fields))
        self._scratch.alter.add_constraint({name: text})

    def first_refused(self, stored: pa.RecordBatch, target: DeltaColumns) -> int | None:
        if stored.num_rows == 0:
            return None
        (rows,) = target.fit(stored)
        if self._takes(rows):
            return None
        return first_fault(
            rows.num_rows, lambda start, count: self._takes(rows.slice(start, count))
        )

    def _takes(self, rows: pa.RecordBatch) -> bool:
        import pyarrow as pa
        from deltalake import write_deltalake

        schema = pa.schema(self._scratch.schema().to_arrow())
        columns = [
            rows.column(field.name)
            if field.name in rows.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ]
        whole = pa.table(columns, schema=schema)
        try:
            write_deltalake(self._scratch, whole, mode="overwrite")
        except Exception as fault:
            if not is_refusal(fault):
                raise
            return False
        return True
