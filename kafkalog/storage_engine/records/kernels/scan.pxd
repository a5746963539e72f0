# The C types of `scan.py`.
cimport cython

from kafkalog.storage_engine.records cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.format.ops cimport i64, table, table_out, triple, u8s

@cython.locals(attributes=i64, crc=i64)
cpdef inline void scan_message(u8s buffer, i64 position, i64 magic, table_out table, i64 i) noexcept nogil
@cython.locals(magic=i64, size=i64, position=i64, count=i64)
cpdef triple count_batches(u8s buffer) noexcept nogil
@cython.locals(magic=i64, size=i64, position=i64, base_offset=i64)
cpdef void scan_batches(u8s buffer, table_out table) noexcept nogil
