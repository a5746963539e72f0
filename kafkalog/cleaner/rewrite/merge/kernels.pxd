# The C types of `kernels.py`.
cimport cython

from kafkalog.cleaner.rewrite.merge cimport codes
from kafkalog.storage_engine.format cimport layout
from kafkalog.storage_engine.format cimport ops
from kafkalog.storage_engine.records.kernels cimport encode
from kafkalog.storage_engine.format.ops cimport (
    flags_in, i32s, i64, i64s, i64s_out, pair, table, table_out, u8s, u8s_out,
)

@cython.locals(batch=i64)
cpdef i64 measure_kept(table records, i32s batch_index, flags_in keep, table_out kept) noexcept nogil
cdef i64 _joins(table batches, i64 i, i64s_out group, i64 target) noexcept nogil
cdef i64 _put_output(
    table_out outputs, i64 count, i64 kind, i64 first, i64 end, i64 carried
) noexcept nogil
@cython.locals(kind=i64)
cdef i64 _close_group(
    i64s_out group, table_out outputs, i64 count, i64 first, i64 end, i64 carried
) noexcept nogil
@cython.locals(count=i64, first=i64, end=i64, carried=i64, action=i64)
cpdef pair plan_outputs(table batches, i64 target, i64s_out group, table_out outputs) noexcept nogil
@cython.locals(position=i64, size=i64, is_message=cython.bint)
cpdef i64 gather_records(
    u8s arena, table records, i64s rows, u8s_out target, table_out gathered
) noexcept nogil
