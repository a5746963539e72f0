"""Arrow arrays that a task makes from its own values.

`pa.array` and `pa.scalar` import pandas where it is installed. That takes a fresh task most of a
second, and 50 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def repeated(number: int, count: int) -> pa.Array:
    """Return an int64 array of one number."""
    import numpy as np
    import pyarrow as pa

    values = np.full(count, number, np.int64)
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(values)])


def cell(name: str, content: bytes | None) -> pa.RecordBatch:
    """Return one row of one binary column."""
    import numpy as np
    import pyarrow as pa

    data = content or b""
    validity = pa.py_buffer(b"\0") if content is None else None
    ends = pa.py_buffer(np.array([0, len(data)], np.int32))
    array = pa.Array.from_buffers(pa.binary(), 1, [validity, ends, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([array], names=[name])
