# The C types of `legacy.py`.
cimport cython

from kafkalog.storage_engine.records cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport (
    i64, i64s, i64s_out, pair, table, table_out, triple, u8s,
)

cdef i64[:, ::1] _TABLES

# A local that takes an item of bytes or int32 is declared here: C would compute in 32 bits.
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
