// Purpose
//   The repetition penalty: a copy of the logits in which the tokens that a row has seen are less likely. Launched only
//   when some row of the batch has a penalty; the logits themselves stay, for the log-probabilities.
// Computes
//   penalised[r, id] = logits[r, id], and for the row's penalty ids that divided by the penalty where it is positive,
//   times the penalty where it is not
//   Twin: ReferenceOps.sample
// Arrays
//   logits               (R, V)     float32   read      the first N columns
//   repetition_penalty   (R,)       float32   read
//   penalty_starts       (R + 1,)   int32     read      row r owns penalty_ids[starts[r] .. starts[r + 1]]
//   penalty_ids          (M,)       int32     read
//   penalised            (R, W)     float32   written   W is N rounded up to a multiple of 4; -infinity past N
// Constants
//   none
// Launch
//   grid (ceil(N / 4096), R), block 256, no shared memory
//   block owns 4096 ids of one row; warp owns every eighth run of 128 ids; lane owns four neighbours of each run, and
//   then every 256th of the row's penalty ids
// Bytes
//   logits 4 * R * N, penalised 4 * R * W, the penalty ids once for each block of a row (that is counted once)
//   Example: least_bytes(R=64, N=151936, M=65536) totals 78,053,892 bytes: 16.3 us at the 4.8 TB/s of an H200
// Numerics
//   float32; division and product are rounded as in the reference
// Preconditions
//   arrays contiguous. Ids outside the row are passed over.
// Why this way
//   Every block looks through all of its row's ids, a few thousand integers out of the cache, and takes those that lie
//   in its own columns. So the copy and the penalty need no second kernel and no barrier between blocks.
// Source
//   Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019

#define BLOCK_IDS 4096

extern "C" __global__ void __launch_bounds__(256) penalise(
    const float* __restrict__ logits,              // (R, V)
    const float* __restrict__ repetition_penalty,  // (R,)
    const int* __restrict__ penalty_starts,        // (R + 1,)
    const int* __restrict__ penalty_ids,           // (M,)
    float* __restrict__ penalised,                 // (R, W)
    int V, int N) {
    // 1 locate
    int r = blockIdx.y, begin = blockIdx.x * BLOCK_IDS, end = min(begin + BLOCK_IDS, N);
    const float* row = logits + (long long)r * V;                            // logits[r, :]
    float* out = penalised + (long long)r * (CEIL_DIV(N, 4) * 4);            // penalised[r, :]

    // 2 copy
    for (int id = begin + threadIdx.x * 4; id < end; id += blockDim.x * 4) {
        *reinterpret_cast<float4*>(out + id) = load_4_floats(row, id, N);
    }
    __syncthreads();

    // 3 penalise
    float penalty = repetition_penalty[r];
    for (int i = penalty_starts[r] + threadIdx.x; i < penalty_starts[r + 1]; i += blockDim.x) {
        int id = penalty_ids[i];
        if (id < begin || id >= end) continue;
        float x = row[id];
        out[id] = x > 0.0f ? __fdiv_rn(x, penalty) : x * penalty;
    }
}
