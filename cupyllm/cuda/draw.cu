// Purpose
//   Draw the next token of every row among those that cutoff left, with the row's own random numbers.
// Computes
//   token_ids[r] = the id with the largest noise - distance among those of rank at most cutoffs[r]; the smallest of
//   equals. distance = (largest - logits[r, id]) / temperature, rank = (distance, id), noise = -log(-log(uniform)).
//   The largest of such sums is a sample of the softmax: no probabilities are needed and no sum over them.
//   A greedy row gets its most likely token and a failed one -1.
//   Twin: ReferenceOps.sample
// Arrays
//   logits        (R, V)   float32   read      as adjust_logits leaves them; the first N columns
//   maxima        (R, G)   float32   read      of group_maxima, G is ceil(N / 128)
//   most_likely   (R,)     int32     read      of cutoff; -1 is a failed row
//   cutoffs       (R,)     uint64    read      of cutoff
//   temperature   (R,)     float32   read      below greedy_below is greedy
//   seeds         (R,)     uint64    read      the key of the random numbers
//   positions     (R,)     int32     read      their counter, together with the id
//   token_ids     (R,)     int32     written
// Constants
//   none
// Launch
//   grid (R), block 512, no dynamic shared memory
//   block owns a row; warp owns every 16th run of 32 groups, and of these it reads the ones that are near enough; lane
//   owns four neighbouring ids of a group, whose random numbers come from one call.
// Bytes
//   maxima 4 * R * G, and of logits at least the group of the most likely token
//   Example: least_bytes(R=64, N=151936) totals 338,688 bytes: 0.071 us at the 4.8 TB/s of an H200
// Numerics
//   Integers and distances are those of the reference; its logarithm may differ by a few units in the last place, so
//   that a draw whose two best sums are as close as that may take the other one.
// Preconditions
//   arrays contiguous; N at most 2^19
// Why this way
//   Noise is at most 16.64. So a token that is farther away than that less the score of the most likely token cannot
//   win, and most of the row is skipped even where no filter is on.
// Source
//   Gumbel, 1954, and Maddison et al., "A* sampling", 2014; Salmon et al., "Parallel random numbers: as easy as 1, 2,
//   3", 2011, for Philox4x32-10

#define WARPS 16
#define GROUP_IDS 128
#define ID_BITS 19         // as in cutoff.cu
#define MOST_NOISE 16.64f  // -log(-log(1 - 2^-24)), rounded up

typedef unsigned long long u64;

// Four random words for the four ids 4 * quad .. 4 * quad + 3 at a position of a sequence: ten rounds of Philox4x32.
__device__ __forceinline__ uint4 random_words(int quad, int position, u64 seed) {
    uint4 c = make_uint4(u32(quad), u32(position), 0u, 0u);
    u32 key_0 = u32(seed), key_1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high_0 = __umulhi(0xd2511f53u, c.x), low_0 = 0xd2511f53u * c.x;
        u32 high_1 = __umulhi(0xcd9e8d57u, c.z), low_1 = 0xcd9e8d57u * c.z;
        c = make_uint4(high_1 ^ c.y ^ key_0, low_1, high_0 ^ c.w ^ key_1, low_0);
        key_0 += 0x9e3779b9u;
        key_1 += 0xbb67ae85u;
    }
    return c;
}

// Gumbel noise from the upper 23 bits of a random word; the half keeps the uniform off 0 and 1.
__device__ __forceinline__ float noise_of(u32 word) {
    float uniform = (float(word >> 9) + 0.5f) * 1.1920929e-7f;  // 2^-23
    return -logf(-logf(uniform));
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) draw(
    const float* __restrict__ logits,       // (R, V)
    const float* __restrict__ maxima,       // (R, G)
    const int* __restrict__ most_likely,    // (R,)
    const u64* __restrict__ cutoffs,        // (R,)
    const float* __restrict__ temperature,  // (R,)
    const u64* __restrict__ seeds,          // (R,)
    const int* __restrict__ positions,      // (R,)
    int* __restrict__ token_ids,            // (R,)
    int V, int N, float greedy_below) {
    __shared__ u64 scratch[WARPS];

    // 1 locate
    int r = blockIdx.x, lane = threadIdx.x % WARP_SIZE, groups = CEIL_DIV(N, GROUP_IDS);
    int likely_id = most_likely[r];
    if (likely_id < 0 || temperature[r] < greedy_below) {
        if (threadIdx.x == 0) token_ids[r] = likely_id;
        return;
    }
    const float* row = logits + (long long)r * V;  // logits[r, :]
    maxima += (long long)r * groups;               // maxima[r, :]
    float largest = row[likely_id], divisor = temperature[r];
    u64 seed = seeds[r], cutoff = cutoffs[r];
    int position = positions[r];

    // 2 how far away a token may be
    uint4 words = random_words(likely_id / 4, position, seed);
    float likely_score = noise_of(likely_id % 4 == 0 ? words.x : likely_id % 4 == 1 ? words.y
                                  : likely_id % 4 == 2 ? words.z : words.w);
    float limit = fminf(__uint_as_float(u32(cutoff >> ID_BITS)), MOST_NOISE - likely_score);

    // 3 the best of each lane's tokens, which it meets in rising order
    float best_score = likely_score;
    int best_id = likely_id;
    for (int begin = threadIdx.x - lane; begin < groups; begin += WARPS * WARP_SIZE) {
        bool is_near = begin + lane < groups && __fdiv_rn(largest - maxima[begin + lane], divisor) <= limit;
        for (u32 near = __ballot_sync(FULL_MASK, is_near); near; near &= near - 1) {
            int first = (begin + __ffs(near) - 1) * GROUP_IDS + lane * 4;
            float4 four = load_4_floats(row, first, N);
            float distances[4] = {__fdiv_rn(largest - four.x, divisor), __fdiv_rn(largest - four.y, divisor),
                                  __fdiv_rn(largest - four.z, divisor), __fdiv_rn(largest - four.w, divisor)};
            if (fminf(fminf(distances[0], distances[1]), fminf(distances[2], distances[3])) > limit) continue;
            words = random_words(first / 4, position, seed);
            u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u64 rank = (u64)__float_as_uint(distances[j]) << ID_BITS | u32(first + j);
                float score = noise_of(word[j]) - distances[j];
                if (rank <= cutoff && score > best_score) best_score = score, best_id = first + j;
            }
        }
    }

    // 4 the best of the block; among equals the smallest id, because its complement is the largest
    u64 mine = (u64)ordered_bits(best_score) << 32 | ~u32(best_id);
    u64 best = block_reduce<WARPS>(mine, scratch, [](u64 a, u64 b) { return max(a, b); });
    if (threadIdx.x == 0) token_ids[r] = int(~u32(best));
}
