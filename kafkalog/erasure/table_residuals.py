"""Keys in the files of materialized tables, which an erasure does not change.

A table leaves a mark in the log that names its place. All of its Parquet files are searched, also
those that a refresh has replaced and that stay for a grace time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.erasure.residuals import Residual
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files
from kafkalog.tables.table_moment import location_of, marks_of
from kafkalog.tables.table_place import KEY_COLUMN, TablePlace, table_place

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.storage_engine.metadata.state import State

_REFRESH = (
    "refresh(grace_s=0) of the materialized table takes the keys out, once queries have ended; "
    "a deleted key that it remembers for version= goes after its delete_retention_ms"
)


def table_residuals(
    state: State, topic: str, keys: ErasedKeys, options: Mapping[str, str]
) -> Iterator[Residual]:
    """Yield what the tables of a topic have of the keys; options `store.*` are those of the log."""
    for location in sorted({location_of(mark) for mark in marks_of(state, topic)}):
        try:
            yield from _of_table(table_place(location, options), keys)
        except (OSError, ValueError, KafkaLogError) as fault:  # pyarrow's errors are ValueErrors
            files.pass_on(fault)
            yield Residual(
                Path(location),
                None,
                f"a materialized table, and its content is unknown: {fault}",
                remedy="look for the keys where the table can be read, or remove it",
            )


def _of_table(place: TablePlace, keys: ErasedKeys) -> Iterator[Residual]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    wanted = pa.array(keys.keys, pa.binary())
    for name in place.names():
        if not name.endswith(".parquet") or (data := place.read(name)) is None:
            continue
        file = pq.ParquetFile(pa.BufferReader(data))
        column = (file.schema_arrow.metadata or {}).get(KEY_COLUMN, b"key").decode()
        found = set[bytes]()
        for batch in file.iter_batches(columns=[column]):
            held = batch.column(0)
            found.update(held.filter(pc.is_in(held, value_set=wanted)).to_pylist())
        if found:
            what = "a key" if len(found) == 1 else f"{len(found)} keys"
            sentence = f"{what} in a file of a materialized table"
            yield Residual(Path(f"{place}/{name}"), None, sentence, remedy=_REFRESH)
