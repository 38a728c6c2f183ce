// Purpose
//   Draw the next token of every row: how far down its ranking a row may go by top-k, top-p and min-p, without sorting,
//   and the draw among those tokens with the row's own random numbers.
// Computes
//   distance[id] = (largest - logits[r, id]) / temperature: 0 is the most likely. The rank of a token is the pair
//   (distance, id) as one number, so that ties go to the smaller id.
//   cutoffs[r]   = the last rank that all of top-k, top-p and min-p keep. Each works on what the one before it kept.
//   token_ids[r] = the id with the largest noise - distance among those of rank at most cutoffs[r]; the smallest of
//   equals. noise = -log(-log(uniform)). The largest of such sums is a sample of the softmax: no probabilities are
//   needed and no sum over them.
//   A greedy row gets the id of the first rank. A row that holds NaN or whose largest logit is not finite gets -1.
//   Twin: ReferenceOps.sample
// Arrays
//   logits        (R, V)   float32   read      as the row's request wants them; the first N columns
//   maxima        (R, G)   float32   read      of group_maxima, G is ceil(N / 128)
//   sums          (R, G)   float32   read      of group_maxima
//   temperature   (R,)     float32   read      below greedy_below is greedy: no filters, and no cutoff is written
//   top_k         (R,)     int32     read      0 is off
//   top_p         (R,)     float32   read      1 is off
//   min_p         (R,)     float32   read      0 is off
//   seeds         (R,)     uint64    read      the key of the random numbers
//   positions     (R,)     int32     read      their counter, together with the id
//   token_ids     (R,)     int32     written
//   cutoffs       (R,)     uint64    written
// Constants
//   none
// Launch
//   grid (R), block 512, 4 * G bytes of shared memory: the distance of each group's most likely token
//   block owns a row; warp owns every 16th run of 32 groups, and of these it reads the ones that are near enough; lane
//   owns four neighbouring ids of a group, whose random numbers come from one call.
// Bytes
//   maxima and sums 4 * R * G each, and what is read again of logits: at least the group of the most likely token. A
//   search reads the same groups about 20 times, out of the L1 cache.
//   Example: least_bytes(R=64, N=151936) totals 643,072 bytes: 0.13 us at the 4.8 TB/s of an H200
// Numerics
//   Distances are rounded as in the reference, so top-k keeps the same tokens. Probabilities are 40-bit fixed-point
//   numbers made from float32 exponentials, so that their sums do not depend on any order; they are right to about
//   2^-22. A token that is closer than this to the edge of top-p or min-p may fall on its other side. Random integers
//   are those of the reference; its logarithm may differ by a few units in the last place, so that a draw whose two
//   best sums are as close as that may take the other one.
// Preconditions
//   arrays contiguous; N at most 2^19
// Why this way
//   A search halves an interval of ranks and counts the tokens up to its middle; it ends when one token is left in it,
//   after some 20 steps. A step reads only groups whose most likely token lies before the middle, and none if these are
//   k or more. One block a row, because the few groups that matter would not fill more, and the draw in the same block,
//   which has the distances of the groups at hand. Noise is at most 16.64: a token that is farther away than that less
//   the score of the most likely token cannot win, and most of the row is skipped even where no filter is on.
// Source
//   Qrita, arXiv 2602.01518, 2026, for searching pivots instead of sorting; Gumbel, 1954, and Maddison et al., "A*
//   sampling", 2014; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for Philox4x32-10

#define WARPS 16
#define GROUP_IDS 128
#define ID_BITS 19
#define NOT_COUNTED 0xffffffffu
#define MASS_OF_ONE 1099511627776.0f  // 2^40
#define POSITIVE_INFINITY_BITS 0x7f800000u
#define MOST_NOISE 16.64f  // -log(-log(1 - 2^-24)), rounded up

typedef unsigned long long u64;

struct Row {
    const float* logits;   // (N,)
    const u32* distances;  // (G,) in shared memory: of each group's most likely token
    int N, groups;
    float largest, temperature;
};

struct Measure {
    u32 count;
    u64 mass;  // sum of exp(-distance)
};

struct Sum { template <class T> __device__ T operator()(T a, T b) const { return a + b; } };

// As bits: those of floats that are not negative order as the floats do.
__device__ __forceinline__ u32 distance_of(const Row& row, float x) {
    return __float_as_uint(__fdiv_rn(row.largest - x, row.temperature));
}

__device__ __forceinline__ u64 rank_of(u32 distance, int id) { return (u64)distance << ID_BITS | u32(id); }

// visit(found, id), where found[j] is the distance of id + j, for all tokens of the groups that have one at `limit` or
// nearer: four to a lane, in rising order. Past N distances are infinite.
template <class Visit>
__device__ __forceinline__ void visit_near(const Row& row, u32 limit, Visit visit) {
    int lane = threadIdx.x % WARP_SIZE;
    for (int begin = threadIdx.x - lane; begin < row.groups; begin += WARPS * WARP_SIZE) {
        u32 distance = begin + lane < row.groups ? row.distances[begin + lane] : POSITIVE_INFINITY_BITS + 1;
        for (u32 near = __ballot_sync(FULL_MASK, distance <= limit); near; near &= near - 1) {
            int id = (begin + __ffs(near) - 1) * GROUP_IDS + lane * 4;
            float4 x = load_4_floats(row.logits, id, row.N);
            u32 found[4] = {distance_of(row, x.x), distance_of(row, x.y), distance_of(row, x.z), distance_of(row, x.w)};
            visit(found, id);
        }
    }
}

// The tokens with a rank of at most `last`: how many, and their mass. NOT_COUNTED if they clearly are `enough`.
__device__ Measure measure(const Row& row, u64 last, u32 enough) {
    __shared__ u32 counts[WARPS];
    __shared__ u64 masses[WARPS];
    u32 limit = u32(last >> ID_BITS);
    if (enough != NOT_COUNTED) {
        u32 nearer = 0;  // groups with a token before `limit`
        for (int g = threadIdx.x; g < row.groups; g += blockDim.x) nearer += row.distances[g] < limit;
        if (block_reduce<WARPS>(nearer, counts, Sum()) >= enough) return {NOT_COUNTED, 0};
    }
    Measure sum = {0, 0};
    visit_near(row, limit, [&](const u32* found, int id) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (rank_of(found[j], id + j) > last) continue;
            sum.count++;
            sum.mass += u64(expf(-__uint_as_float(found[j])) * MASS_OF_ONE);
        }
    });
    return {block_reduce<WARPS>(sum.count, counts, Sum()), block_reduce<WARPS>(sum.mass, masses, Sum())};
}

// The first rank of low .. high up to which the tokens reach `target`, a count or a mass; high if they never do.
__device__ u64 first_rank_reaching(const Row& row, bool by_mass, u64 target, u64 low, u64 high) {
    u32 count_below = 0, count_within = NOT_COUNTED;  // tokens before low, and up to high
    while (low < high && count_within - count_below > 1) {
        u64 middle = low + (high - low) / 2;
        Measure found = measure(row, middle, by_mass ? NOT_COUNTED : u32(target));
        bool reached = (by_mass ? found.mass : found.count) >= target;
        if (reached) high = middle, count_within = found.count;
        if (!reached) low = middle + 1, count_below = found.count;
    }
    return high;
}

// Gumbel noise of the tokens id .. id + 3, id a multiple of 4, at a position of a sequence: ten rounds of Philox4x32.
// The upper 23 bits of a word make a uniform, and the half keeps it off 0 and 1.
__device__ __forceinline__ float4 noise_of(int id, int position, u64 seed) {
    uint4 c = make_uint4(u32(id / 4), u32(position), 0u, 0u);
    u32 key_0 = u32(seed), key_1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high_0 = __umulhi(0xd2511f53u, c.x), low_0 = 0xd2511f53u * c.x;
        u32 high_1 = __umulhi(0xcd9e8d57u, c.z), low_1 = 0xcd9e8d57u * c.z;
        c = make_uint4(high_1 ^ c.y ^ key_0, low_1, high_0 ^ c.w ^ key_1, low_0);
        key_0 += 0x9e3779b9u;
        key_1 += 0xbb67ae85u;
    }
    auto noise = [](u32 word) { return -logf(-logf((float(word >> 9) + 0.5f) * 1.1920929e-7f)); };  // 2^-23
    return make_float4(noise(c.x), noise(c.y), noise(c.z), noise(c.w));
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) draw(
    const float* __restrict__ logits,       // (R, V)
    const float* __restrict__ maxima,       // (R, G)
    const float* __restrict__ sums,         // (R, G)
    const float* __restrict__ temperature,  // (R,)
    const int* __restrict__ top_k,          // (R,)
    const float* __restrict__ top_p,        // (R,)
    const float* __restrict__ min_p,        // (R,)
    const u64* __restrict__ seeds,          // (R,)
    const int* __restrict__ positions,      // (R,)
    int* __restrict__ token_ids,            // (R,)
    u64* __restrict__ cutoffs,              // (R,)
    int V, int N, float greedy_below) {
    extern __shared__ u32 distances[];  // (G,)
    __shared__ u64 ranks[WARPS];
    __shared__ float floats[WARPS];

    // 1 locate
    int r = blockIdx.x, groups = CEIL_DIV(N, GROUP_IDS);
    bool greedy = temperature[r] < greedy_below;
    maxima += (long long)r * groups;  // maxima[r, :]
    sums += (long long)r * groups;    // sums[r, :]

    // 2 the largest logit and the groups' distances from it; of these a thread reads only what it wrote itself
    float largest = NEGATIVE_INFINITY;
    bool has_nan = false;
    for (int g = threadIdx.x; g < groups; g += blockDim.x) {
        has_nan |= maxima[g] != maxima[g];
        largest = fmaxf(largest, maxima[g]);
    }
    largest = block_reduce<WARPS>(largest, floats, [](float a, float b) { return fmaxf(a, b); });
    if (__syncthreads_or(has_nan) || !isfinite(largest)) {
        if (threadIdx.x == 0) token_ids[r] = -1;
        return;
    }
    Row row = {logits + (long long)r * V, distances, N, groups, largest, greedy ? 1.0f : temperature[r]};
    for (int g = threadIdx.x; g < groups; g += blockDim.x) distances[g] = distance_of(row, maxima[g]);

    // 3 the first rank, which has distance 0
    u64 first = ~0ull;
    visit_near(row, 0, [&](const u32* found, int id) {
        for (int j = 0; j < 4; j++) first = min(first, rank_of(found[j], id + j));
    });
    first = block_reduce<WARPS>(first, ranks, [](u64 a, u64 b) { return min(a, b); });
    if (greedy && threadIdx.x == 0) token_ids[r] = int(first);
    if (greedy) return;

    // 4 top-k
    u64 last = rank_of(POSITIVE_INFINITY_BITS, N - 1);
    bool cut = 0 < top_k[r] && top_k[r] < N;
    if (cut) last = first_rank_reaching(row, false, top_k[r], first, last);

    // 5 top-p
    float p = top_p[r];
    if (p < 1.0f) {
        u64 total = cut ? measure(row, last, NOT_COUNTED).mass : 0;
        if (!cut) {
            float sum = 0.0f;
            for (int g = threadIdx.x; g < groups; g += blockDim.x) {
                sum += sums[g] * expf(-__uint_as_float(distances[g]));
            }
            sum = block_sum<WARPS>(sum, floats);
            total = u64(sum * MASS_OF_ONE);
            // All tokens farther away than this have less than 1 - p together, so the search need not go there.
            float farthest = fmaxf(logf(N / ((1.0f - p) * sum)), 0.0f);
            last = min(last, rank_of(__float_as_uint(farthest), N - 1));
        }
        last = first_rank_reaching(row, true, u64(p * double(total)), first, last);
    }

    // 6 min-p
    if (min_p[r] > 0.0f) last = min(last, rank_of(__float_as_uint(fabsf(logf(min_p[r]))), N - 1));
    if (threadIdx.x == 0) cutoffs[r] = last;

    // 7 the most likely token's score says how far away another one may be
    int likely = int(first), position = positions[r];
    u64 seed = seeds[r];
    float4 noise = noise_of(likely / 4 * 4, position, seed);
    float best_score = likely % 4 == 0 ? noise.x : likely % 4 == 1 ? noise.y : likely % 4 == 2 ? noise.z : noise.w;
    u32 limit = min(u32(last >> ID_BITS), __float_as_uint(MOST_NOISE - best_score));

    // 8 the best of each lane's tokens
    int best_id = likely;
    visit_near(row, limit, [&](const u32* found, int id) {
        if (min(min(found[0], found[1]), min(found[2], found[3])) > limit) return;
        float4 four = noise_of(id, position, seed);
        float noises[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float score = noises[j] - __uint_as_float(found[j]);
            if (rank_of(found[j], id + j) <= last && score > best_score) best_score = score, best_id = id + j;
        }
    });

    // 9 the best of the block; among equals the smallest id, because its complement is the largest
    u64 mine = (u64)ordered_bits(best_score) << 32 | ~u32(best_id);
    u64 best = block_reduce<WARPS>(mine, ranks, [](u64 a, u64 b) { return max(a, b); });
    if (threadIdx.x == 0) token_ids[r] = int(~u32(best));
}
