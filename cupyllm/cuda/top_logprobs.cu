// Purpose
//   The log-probability of every row's chosen token, and its most likely tokens with theirs, by the model's own
//   distribution: before penalties and temperature. Launched only when some row wants them.
// Computes
//   logprobs[r]            = logits[r, token_ids[r]] - log(sum of exp(logits[r, :]))
//   top_ids[r, i]          = the id of the i-th largest of logits[r, :]; of equals the smaller id first
//   top_logprobs_out[r, i] = the same difference for it
//   A row whose token is -1 gets zeros.
//   Twin: ReferenceOps.sample
// Arrays
//   logits             (R, V)   float32   read      the first N columns
//   maxima             (R, G)   float32   read      of group_maxima without a temperature, G is ceil(N / 128)
//   sums               (R, G)   float32   read      of the same
//   token_ids          (R,)     int32     read      the chosen tokens
//   logprobs           (R,)     float32   written
//   top_ids            (R, n)   int32     written
//   top_logprobs_out   (R, n)   float32   written
// Constants
//   none
// Launch
//   grid (R), block 256, 4 * G bytes of shared memory: the largest logit that is left in each group
//   block owns a row and looks at the groups; its first warp reads a group when its turn has come; lane owns four
//   neighbouring ids of the group.
// Bytes
//   maxima and sums 4 * R * G each, 512 bytes of logits for each of the n tokens, and the results
//   Example: least_bytes(R=64, N=151936, n=20) totals 1,273,856 bytes: 0.27 us at the 4.8 TB/s of an H200
// Numerics
//   float32. The sum is right to about 2^-21, so that is the absolute error of a log-probability that is small.
// Preconditions
//   arrays contiguous, n at most N
// Why this way
//   A tournament: the best of the groups' best is the next token, and only its group has to be read to find the one
//   that takes its place. n rounds, and no sort.
// Source
//   Knuth, "The art of computer programming", volume 3, 5.2.3, tree selection

#define WARPS 8
#define GROUP_IDS 128

typedef unsigned long long u64;

struct Larger {
    __device__ u64 operator()(u64 a, u64 b) const { return max(a, b); }
};

// One number that is larger for a larger logit, and for the smaller of two ids with the same. 0 is nobody.
__device__ __forceinline__ u64 place_of(u32 logit_bits, int id) { return (u64)logit_bits << 32 | ~u32(id); }

// The largest place before `bound` among a group's tokens, in every lane of the warp; 0 if there is none. What lies
// past N is -infinity with the largest ids of all, so that its turn never comes while n is at most N.
__device__ u64 best_of_group(const float* row, int N, int g, u64 bound) {
    int first = g * GROUP_IDS + threadIdx.x % WARP_SIZE * 4;
    float4 four = load_4_floats(row, first, N);
    float x[4] = {four.x, four.y, four.z, four.w};
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u64 place = place_of(ordered_bits(x[j]), first + j);
        if (place < bound) best = max(best, place);
    }
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        best = max(best, __shfl_xor_sync(FULL_MASK, best, distance));
    }
    return best;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) top_logprobs(
    const float* __restrict__ logits,      // (R, V)
    const float* __restrict__ maxima,      // (R, G)
    const float* __restrict__ sums,        // (R, G)
    const int* __restrict__ token_ids,     // (R,)
    float* __restrict__ logprobs,          // (R,)
    int* __restrict__ top_ids,             // (R, n)
    float* __restrict__ top_logprobs_out,  // (R, n)
    int V, int N, int n) {
    extern __shared__ u32 left[];  // (G,) ordered bits of the largest logit that is left in a group; 0 if none is
    __shared__ u64 scratch[WARPS];
    __shared__ float floats[WARPS];

    // 1 locate
    int r = blockIdx.x, groups = CEIL_DIV(N, GROUP_IDS), token_id = token_ids[r];
    top_ids += (long long)r * n;           // top_ids[r, :]
    top_logprobs_out += (long long)r * n;  // top_logprobs_out[r, :]
    if (token_id < 0) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) top_ids[i] = 0, top_logprobs_out[i] = 0.0f;
        if (threadIdx.x == 0) logprobs[r] = 0.0f;
        return;
    }
    const float* row = logits + (long long)r * V;  // logits[r, :]
    maxima += (long long)r * groups;               // maxima[r, :]
    sums += (long long)r * groups;                 // sums[r, :]

    // 2 the logarithm of the sum, as its distance from the largest logit
    float largest = NEGATIVE_INFINITY, sum = 0.0f;
    for (int g = threadIdx.x; g < groups; g += blockDim.x) largest = fmaxf(largest, maxima[g]);
    largest = block_reduce<WARPS>(largest, floats, [](float a, float b) { return fmaxf(a, b); });
    for (int g = threadIdx.x; g < groups; g += blockDim.x) {
        left[g] = ordered_bits(maxima[g]);
        sum += sums[g] * expf(maxima[g] - largest);
    }
    float log_sum = logf(block_sum<WARPS>(sum, floats));
    if (threadIdx.x == 0) logprobs[r] = row[token_id] - largest - log_sum;

    // 3 the n most likely tokens, one after the other
    u64 bound = ~0ull;
    for (int i = 0; i < n; i++) {
        u64 best = 0;
        for (int g = threadIdx.x; g < groups; g += blockDim.x) best = max(best, place_of(left[g], g));
        int g = int(~u32(block_reduce<WARPS>(best, scratch, Larger())));
        if (threadIdx.x < WARP_SIZE) {
            bound = best_of_group(row, N, g, bound);
            u64 next = best_of_group(row, N, g, bound);
            if (threadIdx.x == 0) {
                int id = int(~u32(bound));
                top_ids[i] = id;
                top_logprobs_out[i] = row[id] - largest - log_sum;
                left[g] = u32(next >> 32);
            }
        }
        __syncthreads();
    }
}
