// Threads as a kernel sees them: indices, barriers, and the warp collectives (shuffles, votes, matches, reductions).
//
// The calls below only pack their operands; runtime/fibers.h, barriers.h and warps.h do the work. Every call carries
// its source location, which is how the runtime tells two different barriers or shuffles apart.
//
// Not emulated: __activemask (threads run one after the other, so no honest answer exists), cooperative groups,
// __nanosleep and clocks.
#pragma once

typedef std::source_location emu_site;
#define EMU_HERE emu_site site = emu_site::current()

struct emu_thread {
    uint3 index;
};
EMU_INTERNAL emu_thread* emu_current;
EMU_INTERNAL dim3 emu_block_dim, emu_grid_dim;
EMU_INTERNAL uint3 emu_block_index;

#define threadIdx (emu_current->index)
#define blockIdx  emu_block_index
#define blockDim  emu_block_dim
#define gridDim   emu_grid_dim
#define warpSize  32

enum emu_barrier_kind { EMU_BARRIER, EMU_BARRIER_COUNT, EMU_BARRIER_AND, EMU_BARRIER_OR };
EMU_INTERNAL int emu_barrier(emu_barrier_kind kind, int predicate, emu_site site);

EMU_INLINE void __syncthreads(EMU_HERE) { emu_barrier(EMU_BARRIER, 0, site); }
EMU_INLINE int __syncthreads_count(int p, EMU_HERE) { return emu_barrier(EMU_BARRIER_COUNT, p != 0, site); }
EMU_INLINE int __syncthreads_and(int p, EMU_HERE) { return emu_barrier(EMU_BARRIER_AND, p != 0, site); }
EMU_INLINE int __syncthreads_or(int p, EMU_HERE) { return emu_barrier(EMU_BARRIER_OR, p != 0, site); }

enum emu_warp_op {
    EMU_SHUFFLE,
    EMU_SHUFFLE_XOR,
    EMU_SHUFFLE_DOWN,
    EMU_SHUFFLE_UP,
    EMU_SYNCWARP,
    EMU_BALLOT,
    EMU_ANY,
    EMU_ALL,
    EMU_MATCH_ANY,
    EMU_MATCH_ALL,
    EMU_ADD,
    EMU_MIN,
    EMU_MAX,
    EMU_UMIN,
    EMU_UMAX,
    EMU_AND,
    EMU_OR,
    EMU_XOR,
    EMU_MMA,
    EMU_LDMATRIX,
};
// One lane's part in a collective over the lanes of `mask`; returns this lane's result once all of them have arrived.
EMU_INTERNAL uint64_t emu_warp(emu_warp_op op, uint32_t mask, uint64_t value, int argument, int width, emu_site site);

template <class T>
EMU_INLINE T emu_shuffle(emu_warp_op op, uint32_t mask, T value, int argument, int width, emu_site site) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = emu_warp(op, mask, bits, argument, width, site);
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_HERE) {
    return emu_shuffle(EMU_SHUFFLE, mask, value, lane, width, site);
}
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_HERE) {
    return emu_shuffle(EMU_SHUFFLE_XOR, mask, value, lane_mask, width, site);
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    return emu_shuffle(EMU_SHUFFLE_DOWN, mask, value, (int)delta, width, site);
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    return emu_shuffle(EMU_SHUFFLE_UP, mask, value, (int)delta, width, site);
}

EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) { emu_warp(EMU_SYNCWARP, mask, 0, 0, 32, site); }
EMU_INLINE unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) {
    return (unsigned)emu_warp(EMU_BALLOT, mask, p != 0, 0, 32, site);
}
EMU_INLINE int __any_sync(unsigned mask, int p, EMU_HERE) { return (int)emu_warp(EMU_ANY, mask, p != 0, 0, 32, site); }
EMU_INLINE int __all_sync(unsigned mask, int p, EMU_HERE) { return (int)emu_warp(EMU_ALL, mask, p != 0, 0, 32, site); }

template <class T>
EMU_INLINE uint64_t emu_match(emu_warp_op op, unsigned mask, T value, emu_site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return emu_warp(op, mask, bits, 0, 32, site);
}
template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value, EMU_HERE) {
    return (unsigned)emu_match(EMU_MATCH_ANY, mask, value, site);
}
template <class T>
EMU_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all_equal, EMU_HERE) {
    unsigned equal = (unsigned)emu_match(EMU_MATCH_ALL, mask, value, site);
    *all_equal = equal != 0;
    return equal;
}

#define EMU_REDUCE(NAME, T, OP)                                               \
    EMU_INLINE T NAME(unsigned mask, T value, EMU_HERE) {                     \
        return (T)emu_warp(OP, mask, (uint64_t)(uint32_t)value, 0, 32, site); \
    }
EMU_REDUCE(__reduce_add_sync, int, EMU_ADD)
EMU_REDUCE(__reduce_add_sync, unsigned, EMU_ADD)
EMU_REDUCE(__reduce_min_sync, int, EMU_MIN)
EMU_REDUCE(__reduce_min_sync, unsigned, EMU_UMIN)
EMU_REDUCE(__reduce_max_sync, int, EMU_MAX)
EMU_REDUCE(__reduce_max_sync, unsigned, EMU_UMAX)
EMU_REDUCE(__reduce_and_sync, unsigned, EMU_AND)
EMU_REDUCE(__reduce_or_sync, unsigned, EMU_OR)
EMU_REDUCE(__reduce_xor_sync, unsigned, EMU_XOR)
#undef EMU_REDUCE
