# The C types of `decode.py`.
cimport cython

from kafkalog.storage_engine.records cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport (
    five, i32s_out, i64, i64s, pair, table, table_out, triple, u8s, u8s_out,
)

# A local that takes an item of bytes or int32 is declared here: C would compute in 32 bits.
@cython.locals(first=i64, second=i64, byte=i64, value=i64)
cpdef inline pair read_varint(u8s buffer, i64 position, i64 end) noexcept nogil
@cython.locals(first=i64, second=i64, byte=i64, value=i64)
cpdef inline pair read_varlong(u8s buffer, i64 position, i64 end) noexcept nogil
cpdef inline pair skip_headers(u8s buffer, i64 position, i64 end) noexcept nogil
cpdef inline i64 read_record(u8s buffer, i64 position, i64 section_end, table_out records, i64 n) noexcept nogil
@cython.locals(n=i64, position=i64)
cpdef triple index_records(u8s arena, table sections, table_out records) noexcept nogil
cpdef inline i64 column_room(i32s_out offsets, u8s_out validity, u8s_out data, i64 count) noexcept nogil
cpdef inline i64 append_value(
    u8s arena, table_out record, i64 field, i64 n, i32s_out offsets, u8s_out validity,
    u8s_out data, i64 end,
) noexcept nogil
@cython.locals(key_end=i64, value_end=i64, key_nulls=i64, value_nulls=i64, room=i64, size=i64,
    last_delta=i64, count=i64, delta=i64, timestamp=i64)
cpdef five decode_records(
    u8s arena, table sections, table_out record, table_out numbers, i32s_out key_offsets,
    u8s_out key_validity, u8s_out keys, i32s_out value_offsets, u8s_out value_validity,
    u8s_out values,
) noexcept nogil
@cython.locals(lists=i64, headers=i64, key_bytes=i64, value_bytes=i64)
cpdef five measure_headers(u8s arena, i64s header_positions, i64s ends, i64s rows) noexcept nogil
cpdef void gather_headers(
    u8s arena, i64s header_positions, i64s ends, i64s rows, i32s_out list_offsets,
    u8s_out list_validity, i32s_out key_offsets, u8s_out key_data, i32s_out value_offsets,
    u8s_out value_validity, u8s_out value_data,
) noexcept nogil
