# The C types of `murmur2.py`.
cimport cython

from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport i32s_out, i64, i64s, u8s

@cython.locals(multiplier=i64, seed=i64, mask=i64, value=i64, part=i64, byte=i64)
cpdef bint murmur2_partitions(
    u8s data, i64s positions, i64s sizes, i64 partition_count, i32s_out partitions
) noexcept nogil
