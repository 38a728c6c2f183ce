// Purpose
//   Top-k, top-p and min-p without sorting: how far down its ranking a row may draw its next token.
// Computes
//   distance[id] = (largest - logits[r, id]) / temperature: 0 is the most likely. The rank of a token is the pair
//   (distance, id) as one number, so that ties go to the smaller id.
//   most_likely[r] = the id of the first rank; -1 if the row holds NaN or its largest logit is not finite
//   cutoffs[r]     = the last rank that all of top-k, top-p and min-p keep. Each works on what the one before it kept.
//   Twin: ReferenceOps.sample
// Arrays
//   logits        (R, V)   float32   read      as adjust_logits leaves them; the first N columns
//   maxima        (R, G)   float32   read      of group_maxima, G is ceil(N / 128)
//   sums          (R, G)   float32   read      of group_maxima
//   temperature   (R,)     float32   read      below greedy_below is greedy: no filters, and no cutoff is written
//   top_k         (R,)     int32     read      0 is off
//   top_p         (R,)     float32   read      1 is off
//   min_p         (R,)     float32   read      0 is off
//   most_likely   (R,)     int32     written
//   cutoffs       (R,)     uint64    written
// Constants
//   none
// Launch
//   grid (R), block 512, 4 * G bytes of shared memory: the distance of each group's most likely token
//   block owns a row; warp owns every 16th run of 32 groups, and of these it reads the ones that are near enough; lane
//   owns four neighbouring ids of a group.
// Bytes
//   maxima and sums 4 * R * G each, and what is read again of logits: at least the group of the most likely token. A
//   search reads the same groups about 20 times, out of the L1 cache.
//   Example: least_bytes(R=64, N=151936) totals 642,304 bytes: 0.13 us at the 4.8 TB/s of an H200
// Numerics
//   Distances are rounded as in the reference, so top-k keeps the same tokens. Probabilities are 40-bit fixed-point
//   numbers made from float32 exponentials, so that their sums do not depend on any order; they are right to about
//   2^-22. A token that is closer than this to the edge of top-p or min-p may fall on its other side.
// Preconditions
//   arrays contiguous; N at most 2^19
// Why this way
//   A search halves an interval of ranks and counts the tokens up to its middle; it ends when one token is left in it,
//   after some 20 steps. A step reads only groups whose most likely token lies before the middle, and none if these are
//   k or more. One block a row, because the few groups that matter would not fill more.
// Source
//   Qrita, arXiv 2602.01518, 2026, for searching pivots instead of sorting

#define WARPS 16
#define GROUP_IDS 128
#define ID_BITS 19
#define NOT_COUNTED 0xffffffffu
#define MASS_OF_ONE 1099511627776.0f  // 2^40
#define POSITIVE_INFINITY_BITS 0x7f800000u

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

struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};

// As bits: those of floats that are not negative order as the floats do.
__device__ __forceinline__ u32 distance_of(const Row& row, float x) {
    return __float_as_uint(__fdiv_rn(row.largest - x, row.temperature));
}

__device__ __forceinline__ u64 rank_of(u32 distance, int id) { return (u64)distance << ID_BITS | u32(id); }

// visit(distance, id) for all tokens of the groups that have one at `limit` or nearer. Past N distances are infinite.
template <class Visit>
__device__ __forceinline__ void visit_near(const Row& row, u32 limit, Visit visit) {
    int lane = threadIdx.x % WARP_SIZE;
    for (int begin = threadIdx.x - lane; begin < row.groups; begin += WARPS * WARP_SIZE) {
        u32 distance = begin + lane < row.groups ? row.distances[begin + lane] : POSITIVE_INFINITY_BITS + 1;
        for (u32 near = __ballot_sync(FULL_MASK, distance <= limit); near; near &= near - 1) {
            int id = (begin + __ffs(near) - 1) * GROUP_IDS + lane * 4;
            float4 x = load_4_floats(row.logits, id, row.N);
            visit(distance_of(row, x.x), id);
            visit(distance_of(row, x.y), id + 1);
            visit(distance_of(row, x.z), id + 2);
            visit(distance_of(row, x.w), id + 3);
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
    visit_near(row, limit, [&](u32 distance, int id) {
        if (rank_of(distance, id) > last) return;
        sum.count++;
        sum.mass += u64(expf(-__uint_as_float(distance)) * MASS_OF_ONE);
    });
    return {block_reduce<WARPS>(sum.count, counts, Sum()), block_reduce<WARPS>(sum.mass, masses, Sum())};
}

// The first rank of low .. high up to which the tokens reach `target`, a count or a mass; high if they never do.
__device__ u64 first_rank_reaching(const Row& row, bool by_mass, u64 target, u64 low, u64 high) {
    u32 count_below = 0, count_within = NOT_COUNTED;  // tokens before low, and up to high
    while (low < high && count_within - count_below > 1) {
        u64 middle = low + (high - low) / 2;
        Measure found = measure(row, middle, by_mass ? NOT_COUNTED : u32(target));
        if ((by_mass ? found.mass : found.count) >= target) {
            high = middle;
            count_within = found.count;
        } else {
            low = middle + 1;
            count_below = found.count;
        }
    }
    return high;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) cutoff(
    const float* __restrict__ logits,       // (R, V)
    const float* __restrict__ maxima,       // (R, G)
    const float* __restrict__ sums,         // (R, G)
    const float* __restrict__ temperature,  // (R,)
    const int* __restrict__ top_k,          // (R,)
    const float* __restrict__ top_p,        // (R,)
    const float* __restrict__ min_p,        // (R,)
    int* __restrict__ most_likely,          // (R,)
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

    // 2 the largest logit and the groups' distances from it
    float largest = NEGATIVE_INFINITY;
    bool has_nan = false;
    for (int g = threadIdx.x; g < groups; g += blockDim.x) {
        has_nan |= maxima[g] != maxima[g];
        largest = fmaxf(largest, maxima[g]);
    }
    largest = block_reduce<WARPS>(largest, floats, [](float a, float b) { return fmaxf(a, b); });
    if (__syncthreads_or(has_nan) || !isfinite(largest)) {
        if (threadIdx.x == 0) most_likely[r] = -1;
        return;
    }
    Row row = {logits + (long long)r * V, distances, N, groups, largest, greedy ? 1.0f : temperature[r]};
    for (int g = threadIdx.x; g < groups; g += blockDim.x) distances[g] = distance_of(row, maxima[g]);
    __syncthreads();

    // 3 the first rank
    u64 first = ~0ull;
    visit_near(row, 0, [&](u32 distance, int id) { first = min(first, rank_of(distance, id)); });
    first = block_reduce<WARPS>(first, ranks, [](u64 a, u64 b) { return min(a, b); });
    if (threadIdx.x == 0) most_likely[r] = int(first);  // its distance is 0
    if (greedy) return;

    // 4 top-k
    u64 last = rank_of(POSITIVE_INFINITY_BITS, N - 1);
    bool cut = 0 < top_k[r] && top_k[r] < N;
    if (cut) last = first_rank_reaching(row, false, top_k[r], first, last);

    // 5 top-p
    float p = top_p[r];
    if (p < 1.0f) {
        u64 total = 0;
        if (cut) {
            total = measure(row, last, NOT_COUNTED).mass;
        } else {
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
}
