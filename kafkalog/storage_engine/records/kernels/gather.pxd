# The C types of `gather.py`.

from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport i32s_out, i64, i64s, pair, u8s, u8s_out

cpdef pair measure_column(i64 arena_size, i64s positions, i64s sizes, i64s rows) noexcept nogil
cpdef void gather_column(
    u8s arena, i64s positions, i64s sizes, i64s rows, i32s_out offsets, u8s_out validity,
    u8s_out data,
) noexcept nogil
