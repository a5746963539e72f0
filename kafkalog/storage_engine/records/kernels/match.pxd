# The C types of `match.py`.
cimport cython

from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport i64, i64s, i64s_out, u8s

cdef inline bint _is_equal(u8s first, i64 at, u8s second, i64 place, i64 size) noexcept nogil
@cython.locals(limit=i64, size=i64, place=i64, row=i64, at=i64)
cpdef void last_rows(
    u8s arena, i64s key_positions, i64s key_sizes, i64s offsets, u8s keys, i64s places, i64s sizes,
    i64s numbers, i64s firsts, i64s stops, i64 start, i64 end, i64s_out rows,
) noexcept nogil
