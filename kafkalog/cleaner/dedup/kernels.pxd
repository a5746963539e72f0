# The C types of `kernels.py`.
cimport cython

from kafkalog.cleaner.dedup cimport codes
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport (
    flags_in, flags_out, four, four_words, i32s, i64, i64s, i64s_out, rows_in, rows_out, triple,
    u8s, u8s_out, u64, u64s,
)

cdef inline four_words _round(u64 v0, u64 v1, u64 v2, u64 v3) noexcept nogil
@cython.locals(k0=u64, k1=u64, v0=u64, v1=u64, v2=u64, v3=u64, word=u64, byte=u64, size=i64, position=i64)
cpdef i64 hash_keys(u8s arena, i64s positions, i64s sizes, u64s secret, rows_out hashes) noexcept nogil
cdef inline u64 _home(rows_out slots, u64 high) noexcept nogil
@cython.locals(slot=u64, count=u64)
cdef inline i64 _find(rows_out slots, u64 high, u64 low) noexcept nogil
cdef inline void _set_bit(u8s_out bits, i64 place) noexcept nogil
@cython.locals(last=i64, slot=i64)
cpdef triple put_offsets(
    rows_out slots, rows_in hashes, i64s sizes, i64s offsets, i64 first, i64 start, i64 end,
    i64 capacity, i64 size, u64 mask, u64 prefix, u8s_out bits, i64 bits_start,
) noexcept nogil
cpdef void get_offsets(rows_out slots, rows_in hashes, i64s_out out) noexcept nogil
cpdef void mark_obsolete(
    rows_out slots, rows_in hashes, i64s key_sizes, i64s offsets, i64 latest_offset,
    flags_out flags,
) noexcept nogil
cpdef void test_bits(u8s bits, i64 start, i64s offsets, flags_out flags) noexcept nogil
@cython.locals(byte=i64, found=i64, place=i64, end=i64)
cpdef void find_covered(
    u8s bits, i64 start, i64s firsts, i64s lasts, i64s counts, flags_out flags
) noexcept nogil
@cython.locals(batch=i64, stay=cython.bint)
cpdef i64 keep_records(
    flags_in obsolete, i64s key_sizes, i64s value_sizes, i64s offsets, i32s batch_index,
    flags_in is_control, flags_in is_expired, i64 latest_offset, flags_out keep, i64s_out kept,
    i64s_out tombstones,
) noexcept nogil
