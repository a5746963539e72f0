# The types of kernels, and `ops.py` for C.
from libc.stdint cimport int16_t, int32_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

ctypedef long long i64
ctypedef unsigned long long u64
ctypedef (i64, i64) pair
ctypedef (i64, i64, i64) triple
ctypedef (i64, i64, i64, i64) four
ctypedef (i64, i64, i64, i64, i64) five
ctypedef (u64, u64, u64, u64) four_words

ctypedef const unsigned char[::1] u8s
ctypedef unsigned char[::1] u8s_out
ctypedef const i64[::1] i64s
ctypedef i64[::1] i64s_out
ctypedef const int[::1] i32s
ctypedef int[::1] i32s_out
ctypedef const i64[:, ::1] table
ctypedef i64[:, ::1] table_out
ctypedef const u64[::1] u64s
ctypedef const u64[:, ::1] rows_in
ctypedef u64[:, ::1] rows_out
ctypedef char[::1] flags_in
ctypedef char[::1] flags_out

cdef extern from *:
    """
    #include <stdint.h>
    #define kl_LOW_32 0xFFFFFFFFLL
    #define kl_INT64_MAX INT64_MAX
    #define kl_INT64_MIN INT64_MIN
    #define kl_SIP_0 0x736F6D6570736575ULL
    #define kl_SIP_1 0x646F72616E646F6DULL
    #define kl_SIP_2 0x6C7967656E657261ULL
    #define kl_SIP_3 0x7465646279746573ULL
    #if defined(__GNUC__) || defined(__clang__)
    #define kl_prefetch(address) __builtin_prefetch(address, 0, 3)
    #else
    #define kl_prefetch(address)
    #endif
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define kl_little_32 __builtin_bswap32
    #define kl_little_64 __builtin_bswap64
    #define kl_big_16(value) (value)
    #define kl_big_32(value) (value)
    #define kl_big_64(value) (value)
    #else
    #define kl_little_32(value) (value)
    #define kl_little_64(value) (value)
    #define kl_big_16 __builtin_bswap16
    #define kl_big_32 __builtin_bswap32
    #define kl_big_64 __builtin_bswap64
    #endif
    """
    const i64 LOW_32 "kl_LOW_32"
    const i64 INT64_MAX "kl_INT64_MAX"
    const i64 INT64_MIN "kl_INT64_MIN"
    const u64 SIP_0 "kl_SIP_0"
    const u64 SIP_1 "kl_SIP_1"
    const u64 SIP_2 "kl_SIP_2"
    const u64 SIP_3 "kl_SIP_3"
    void kl_prefetch(const void *address) noexcept nogil
    uint32_t kl_little_32(uint32_t value) noexcept nogil
    uint64_t kl_little_64(uint64_t value) noexcept nogil
    uint16_t kl_big_16(uint16_t value) noexcept nogil
    uint32_t kl_big_32(uint32_t value) noexcept nogil
    uint64_t kl_big_64(uint64_t value) noexcept nogil

cdef inline void copy_bytes(u8s_out target, i64 to, u8s source, i64 start, i64 size) noexcept nogil:
    if size > 0:
        memcpy(&target[to], &source[start], size)

cdef inline i64 wrap(i64 value) noexcept nogil:
    return value

cdef inline i64 signed(u64 value) noexcept nogil:
    return <i64>value

cdef inline u64 word(i64 value) noexcept nogil:
    return <u64>value

cdef inline u64 add(u64 a, u64 b) noexcept nogil:
    return a + b

cdef inline u64 turn(u64 word, int bits) noexcept nogil:
    return (word << bits) | (word >> (64 - bits))

cdef inline u64 zigzag(i64 value) noexcept nogil:
    return (<u64>value << 1) ^ <u64>(value >> 63)

cdef inline i64 little_32(u8s data, i64 position) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, &data[position], 4)
    return kl_little_32(value)

cdef inline u64 little_64(u8s data, i64 position) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, &data[position], 8)
    return kl_little_64(value)

cdef inline i64 big_16(u8s data, i64 position) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, &data[position], 2)
    return <int16_t>kl_big_16(value)

cdef inline i64 big_32(u8s data, i64 position) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, &data[position], 4)
    return <int32_t>kl_big_32(value)

cdef inline i64 big_64(u8s data, i64 position) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, &data[position], 8)
    return <i64>kl_big_64(value)

cdef inline void prefetch(rows_out slots, u64 slot) noexcept nogil:
    kl_prefetch(&slots[0, 0] + 3 * slot)
