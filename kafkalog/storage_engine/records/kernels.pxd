# The C types of `kernels.py`; a function that is not here stays Python's.
cimport cython

from kafkalog.storage_engine.records cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport (
    five, i32s_out, i64, i64s, i64s_out, pair, table, table_out, triple, u8s, u8s_out, u64,
)

cdef i64[:, ::1] _TABLES

# A local that takes an item of bytes or int32 is declared here: C would compute in 32 bits.
@cython.locals(first=i64, second=i64, byte=i64, value=i64)
cpdef inline pair read_varint(u8s buffer, i64 position, i64 end) noexcept nogil
@cython.locals(first=i64, second=i64, byte=i64, value=i64)
cpdef inline pair read_varlong(u8s buffer, i64 position, i64 end) noexcept nogil
@cython.locals(rest=u64)
cpdef inline i64 varint_size(i64 value) noexcept nogil
@cython.locals(rest=u64)
cpdef inline i64 write_varint(u8s_out target, i64 position, i64 value) noexcept nogil
@cython.locals(value=i64)
cpdef inline i64 read_integer(u8s buffer, i64 position, i64 size) noexcept nogil
@cython.locals(attributes=i64, crc=i64)
cpdef inline void scan_message(u8s buffer, i64 position, i64 magic, table_out table, i64 i) noexcept nogil
@cython.locals(magic=i64, size=i64, position=i64, count=i64)
cpdef triple count_batches(u8s buffer) noexcept nogil
@cython.locals(magic=i64, size=i64, position=i64, base_offset=i64)
cpdef void scan_batches(u8s buffer, table_out table) noexcept nogil
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
@cython.locals(byte=i64, crc=i64, mixed=i64)
cpdef i64 crc32(u8s buffer, i64 start, i64 end) noexcept nogil
cpdef pair find_wrong_crc32(u8s buffer, i64s starts, i64s ends, i64s crcs) noexcept nogil
@cython.locals(position=i64, size=i64, count=i64, last_offset=i64)
cpdef triple count_messages(u8s arena, table sections, i64s_out counts, i64s_out last_offsets) noexcept nogil
@cython.locals(magic=i64, timestamp=i64, crc=i64, key_size=i64, value_size=i64)
cpdef inline i64 read_message(
    u8s arena, i64 position, i64 end, i64 is_wrapped, table_out records, i64 n
) noexcept nogil
@cython.locals(n=i64, position=i64, size=i64, end=i64, found=i64, last_found=i64)
cpdef triple index_messages(u8s arena, table sections, table_out records) noexcept nogil
cpdef pair measure_column(i64 arena_size, i64s positions, i64s sizes, i64s rows) noexcept nogil
cpdef void gather_column(
    u8s arena, i64s positions, i64s sizes, i64s rows, i32s_out offsets, u8s_out validity,
    u8s_out data,
) noexcept nogil
@cython.locals(lists=i64, headers=i64, key_bytes=i64, value_bytes=i64)
cpdef five measure_headers(u8s arena, i64s header_positions, i64s ends, i64s rows) noexcept nogil
cpdef void gather_headers(
    u8s arena, i64s header_positions, i64s ends, i64s rows, i32s_out list_offsets,
    u8s_out list_validity, i32s_out key_offsets, u8s_out key_data, i32s_out value_offsets,
    u8s_out value_validity, u8s_out value_data,
) noexcept nogil
cpdef inline i64 measure_fields(table column, i64 row, i64 data_size, i64 minimum) noexcept nogil
@cython.locals(is_first=cython.bint, count=i64, size=i64, body=i64, record_size=i64, headers=i64, headers_size=i64, fixed=i64)
cpdef triple plan_batches(
    table keys, i64 key_data_size, table values, i64 value_data_size, table header_lists,
    table header_keys, i64 header_key_data_size, table header_values, i64 header_value_data_size,
    i64s timestamps, i64s rows, i64s groups, i64 batch_size, i64 size_max, i64s_out body_sizes,
    table_out batches,
) noexcept nogil
cpdef inline i64 write_field(u8s_out target, i64 position, u8s data, table column, i64 row) noexcept nogil
@cython.locals(position=i64, batch_end=i64)
cpdef i64 write_records(
    u8s_out target, u8s key_data, table keys, u8s value_data, table values, table header_lists,
    u8s header_key_data, table header_keys, u8s header_value_data, table header_values,
    i64s timestamps, i64s rows, i64s body_sizes, table batches,
) noexcept nogil
@cython.locals(position=i64, size=i64, body=i64)
cpdef i64 rewrite_records(
    u8s arena, table records, i64s rows, i64 base_offset, i64 base_timestamp, u8s_out target
) noexcept nogil
