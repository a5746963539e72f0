# The C types of `kernels.py`.
cimport cython

from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.records.lz4_frames cimport codes
from kafkalog.storage_engine.format.ops cimport i64, i64s, i64s_out, pair, triple, u8s, u8s_out

cpdef inline i64 read_u32(u8s source, i64 position) noexcept nogil
@cython.locals(byte=i64)
cpdef inline pair read_length(u8s source, i64 position, i64 end, i64 length) noexcept nogil
@cython.locals(done=i64)
cpdef inline void copy_ahead(
    u8s_out target, i64 to, u8s source, i64 start, i64 size, i64 source_end
) noexcept nogil
@cython.locals(done=i64)
cpdef inline void repeat(u8s_out target, i64 to, i64 distance, i64 size) noexcept nogil
@cython.locals(token=i64, size=i64, distance=i64)
cpdef inline pair decompress_block(
    u8s source, i64 position, i64 end, u8s_out target, i64 to, i64 floor, i64 room_end
) noexcept nogil
@cython.locals(flags=i64, kind=i64, code=i64, place=i64, block_size=i64, size=i64, floor=i64, one=i64)
cpdef inline pair decompress_frame(
    u8s source, i64 position, i64 end, u8s_out target, i64 to, i64s checksums
) noexcept nogil
cpdef triple decompress_frames(
    u8s source, i64s starts, i64s ends, i64 first, i64s checksums, u8s_out target, i64 to,
    i64 run_size, i64s_out places,
) noexcept nogil
