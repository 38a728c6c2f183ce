// Purpose
//   What a request does to its logits before anything is drawn from them, on a copy: repetition penalty, offsets, and a
//   mask. Launched only when some row of the batch has one of them; the logits themselves stay, for the
//   log-probabilities.
// Computes
//   adjusted[r, id] = logits[r, id], and in this order
//     for the row's penalty ids divided by the penalty where it is positive, times the penalty where it is not;
//     for the row's offset ids with the offset added: penalties by count, biases, -infinity for what is forbidden;
//     -infinity where the row has a mask and id's bit in it is 0, but not for NaN and infinity: they fail a row
//   Twin: ReferenceOps.sample
// Arrays
//   logits               (R, V)          float32   read      the first N columns
//   repetition_penalty   (R,)            float32   read
//   penalty_starts       (R + 1,)        int32     read      row r owns penalty_ids[starts[r] .. starts[r + 1]]
//   penalty_ids          (M,)            int32     read      each id once in a row
//   offset_starts        (R + 1,)        int32     read      the same of offset_ids and offsets
//   offset_ids           (O,)            int32     read      each id once in a row
//   offsets              (O,)            float32   read
//   mask_rows            (R,)            int32     read      the row's place in masks, -1 for one without a mask
//   masks                (masked, words) uint32    read      bit id % 32 of word id / 32 is 1 for what may be chosen
//   adjusted             (R, W)          float32   written   W is N rounded up to a multiple of 4; -infinity past N
// Constants
//   none
// Launch
//   grid (ceil(N / 4096), R), block 256, no shared memory
//   block owns 4096 ids of one row; warp owns every eighth run of 128 ids; lane owns four neighbours of each run, and
//   then every 256th of the row's penalty ids and of its offset ids
//       lane     0 .. 7     8 .. 15    16 .. 23    24 .. 31     16 bytes of logits a lane
//       ids      0 .. 31    32 .. 63   64 .. 95    96 .. 127    a word of the mask for eight lanes, four bits each
// Bytes
//   logits 4 * R * N, adjusted 4 * R * W, masks N / 8 for each row that has one; the ids and offsets once for each
//   block of a row (that is counted once)
//   Example: least_bytes(R=64, N=151936, M=65536, O=8192, masked=64) totals 79,335,432 bytes: 16.5 us at the 4.8 TB/s
//   of an H200
// Numerics
//   float32; quotient, product and sum are each rounded as in the reference
// Preconditions
//   arrays contiguous, penalties above 0, 32 * words at least N. Ids outside the row are passed over.
// Why this way
//   Every block looks through all of its row's ids, a few thousand integers out of the cache, and takes those that lie
//   in its own columns. So the copy and the changes need no second kernel and no barrier between blocks. The mask comes
//   last in the definition and first here, where every logit is in a register anyway: neither a penalty nor an offset
//   brings -infinity back.
// Source
//   Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019, for the
//   repetition penalty; the OpenAI API reference for penalties by count and biases, which the host makes offsets of

#define BLOCK_IDS 4096

// What is not allowed becomes -infinity. NaN and infinity do not: the comparison is false for them.
__device__ __forceinline__ float masked(float x, u32 allowed) {
    return !allowed && x < -NEGATIVE_INFINITY ? NEGATIVE_INFINITY : x;
}

extern "C" __global__ void __launch_bounds__(256) adjust_logits(
    const float* __restrict__ logits,              // (R, V)
    const float* __restrict__ repetition_penalty,  // (R,)
    const int* __restrict__ penalty_starts,        // (R + 1,)
    const int* __restrict__ penalty_ids,           // (M,)
    const int* __restrict__ offset_starts,         // (R + 1,)
    const int* __restrict__ offset_ids,            // (O,)
    const float* __restrict__ offsets,             // (O,)
    const int* __restrict__ mask_rows,             // (R,)
    const u32* __restrict__ masks,                 // (masked, words)
    float* __restrict__ adjusted,                  // (R, W)
    int V, int N, int words) {
    // 1 locate
    int r = blockIdx.y, begin = blockIdx.x * BLOCK_IDS, end = min(begin + BLOCK_IDS, N), mask_row = mask_rows[r];
    const float* row = logits + (long long)r * V;                     // logits[r, :]
    const u32* mask = masks + (long long)max(mask_row, 0) * words;    // masks[mask_row, :]
    float* out = adjusted + (long long)r * (CEIL_DIV(N, 4) * 4);      // adjusted[r, :]

    // 2 copy what the mask allows
    for (int id = begin + threadIdx.x * 4; id < end; id += blockDim.x * 4) {
        float4 x = load_4_floats(row, id, N);
        u32 allowed = mask_row < 0 ? 15u : __ldg(mask + id / 32) >> (id % 32);
        *reinterpret_cast<float4*>(out + id) = make_float4(masked(x.x, allowed & 1), masked(x.y, allowed & 2),
                                                           masked(x.z, allowed & 4), masked(x.w, allowed & 8));
    }
    __syncthreads();

    // 3 penalise
    float penalty = repetition_penalty[r];
    for (int i = penalty_starts[r] + threadIdx.x; i < penalty_starts[r + 1]; i += blockDim.x) {
        int id = penalty_ids[i];
        if (id < begin || id >= end) continue;
        float x = out[id];
        out[id] = x > 0.0f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
    }
    __syncthreads();

    // 4 add
    for (int i = offset_starts[r] + threadIdx.x; i < offset_starts[r + 1]; i += blockDim.x) {
        int id = offset_ids[i];
        if (id >= begin && id < end) out[id] = __fadd_rn(out[id], offsets[i]);
    }
}
