// Purpose
//   Bring the counts of decode rows up to date with tokens that they got in other ways than by captured steps: all
//   tokens of a sequence that joined, or those that were sampled since a row was counted last. Launched only for rows
//   with a penalty.
// Computes
//   for every job j, (row, clears, first, output, end) = jobs[j, :]:
//     counts[row, :] = 0 where clears is 1
//     counts[row, tokens[i]] |= 1 for first <= i < output, the tokens of the prompt
//     counts[row, tokens[i]] += 2 for output <= i < end, the tokens of the output
//   Twin: ReferenceOps.count_tokens
// Arrays
//   jobs     (J, 5)   int32    read      each row at most once
//   tokens   (M,)     int32    read      N and above, an id without a token, is passed over
//   counts   (R, W)   uint32   written   W is N rounded up to a multiple of 4
// Constants
//   none
// Launch
//   grid (ceil(W / 4096), J), block 256, no shared memory
//   block owns 4096 ids of one row; lane owns every 256th run of four of them to clear, and every 256th token
// Bytes
//   jobs 20 * J, counts 4 * W for each row that is cleared, tokens 4 * M: each block of a row reads them, out of the
//   cache, and that is counted once
//   Example: least_bytes(J=1, N=151936, M=1000, cleared=1) totals 611,764 bytes: 0.13 us at the 4.8 TB/s of an H200
// Numerics
//   whole numbers, so that the order of the atomics does not matter
// Preconditions
//   arrays contiguous
// Why this way
//   A count for every id costs as much memory as the logits of the row, and makes counting a token one addition, which
//   is all that a captured step does. Every block looks through all tokens of its row, out of the cache, and takes
//   those that lie in its own columns, so that clearing and counting need no second launch.
// Source
//   the op itself; no paper

#define BLOCK_IDS 4096

extern "C" __global__ void __launch_bounds__(256) count_tokens(
    const int* __restrict__ jobs,    // (J, 5)
    const int* __restrict__ tokens,  // (M,)
    u32* counts,                     // (R, W)
    int N) {
    // 1 locate
    const int* job = jobs + blockIdx.y * 5;
    int clears = job[1], first = job[2], output = job[3], end = job[4], width = CEIL_DIV(N, 4) * 4;
    int begin_id = blockIdx.x * BLOCK_IDS, end_id = min(begin_id + BLOCK_IDS, width);
    u32* row = counts + (long long)job[0] * width;  // counts[row, :]

    // 2 clear
    for (int id = begin_id + threadIdx.x * 4; clears && id < end_id; id += blockDim.x * 4) {
        *reinterpret_cast<uint4*>(row + id) = make_uint4(0u, 0u, 0u, 0u);
    }
    __syncthreads();

    // 3 count
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
        int id = tokens[i];
        if (id < begin_id || id >= min(end_id, N)) continue;
        if (i < output) atomicOr(row + id, 1u);
        else atomicAdd(row + id, 2u);
    }
}
