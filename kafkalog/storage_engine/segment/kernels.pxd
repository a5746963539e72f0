# The C types of `kernels.py`.
from kafkalog.storage_engine.format.ops cimport four, i64, i64s, i64s_out

cpdef four choose_index_entries(
    i64s positions, i64s last_offsets, i64s max_timestamps, i64 indexed_position, i64 interval,
    i64 top, i64 top_offset, i64s_out rows, i64s_out tops, i64s_out top_offsets,
) noexcept nogil
