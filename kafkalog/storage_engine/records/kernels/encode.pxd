# The C types of `encode.py`.
cimport cython

from kafkalog.storage_engine.records cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport (
    i64, i64s, i64s_out, table, table_out, triple, u8s, u8s_out, u64,
)

@cython.locals(rest=u64)
cpdef inline i64 varint_size(i64 value) noexcept nogil
@cython.locals(rest=u64)
cpdef inline i64 write_varint(u8s_out target, i64 position, i64 value) noexcept nogil
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
