// Purpose
//   Greedy sampling: the most likely token of every row, in one launch.
// Computes
//   token_ids[r] = the smallest id of the largest of logits[r, 0 .. N); -1 if one of them is NaN or the largest is not
//   finite
//   Twin: ReferenceOps.sample
// Arrays
//   logits      (R, V)   float32   read      the first N columns
//   token_ids   (R,)     int32     written
// Constants
//   none
// Launch
//   grid (R), block 1024, no dynamic shared memory
//   block owns a row; warp owns every 32nd run of 128 ids; lane owns four neighbours of each run.
//       lane     0         1         2        ...      31
//       ids    0 .. 3    4 .. 7    8 .. 11          124 .. 127     16 bytes a lane, 512 bytes a warp
// Bytes
//   logits 4 * R * N, token_ids 4 * R
//   Example: least_bytes(R=64, N=151936) totals 38,895,872 bytes: 8.1 us at the 4.8 TB/s of an H200
// Numerics
//   exact
// Preconditions
//   arrays contiguous, N at least 1
// Why this way
//   One block a row needs one barrier and no memory that outlives the launch. The price is paid with few rows: one
//   multiprocessor takes in about 64 bytes a clock, so a row of 151,936 logits costs 5 us even if nothing else runs.
//   Several blocks a row with a counter of those that are done would save about half of that.
// Source
//   the op itself; no paper

#define WARPS 32

typedef unsigned long long u64;

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) argmax(
    const float* __restrict__ logits,  // (R, V)
    int* __restrict__ token_ids,       // (R,)
    int V, int N) {
    __shared__ u64 scratch[WARPS];

    // 1 locate
    const float* row = logits + (long long)blockIdx.x * V;  // logits[r, :]

    // 2 the largest of each thread's ids, which it meets in rising order
    float largest = NEGATIVE_INFINITY;
    int largest_id = 0;
    bool has_nan = false;
#pragma unroll 4
    for (int first = threadIdx.x * 4; first < N; first += WARPS * WARP_SIZE * 4) {
        float4 four = load_4_floats(row, first, N);
        float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            has_nan |= x[j] != x[j];
            if (x[j] > largest) largest = x[j], largest_id = first + j;
        }
    }
    has_nan = __syncthreads_or(has_nan);

    // 3 the largest of the block; among equals the smallest id, because its complement is the largest
    u64 mine = (u64)ordered_bits(largest) << 32 | ~u32(largest_id);
    u64 best = block_reduce<WARPS>(mine, scratch, [](u64 a, u64 b) { return max(a, b); });

    // 4 store
    u32 bits = u32(best >> 32);
    bool finite = bits > ordered_bits(NEGATIVE_INFINITY) && bits < ordered_bits(-NEGATIVE_INFINITY);
    if (threadIdx.x == 0) token_ids[blockIdx.x] = finite && !has_nan ? int(~u32(best)) : -1;
}
