// Purpose
//   An index of a row of logits: for every group of 128 neighbours the largest, and the group's weight beside it. With
//   it draw and top_logprobs read only the groups that can matter, usually a few dozen out of 1187. In a captured step
//   also the penalties of the rows that have some, since every logit passes by here.
// Computes
//   With HAS_PENALTIES first, in place, for every id < N whose counts[r, id] is not 0, in rows where a penalty is on:
//     logits[r, id] divided by the repetition penalty where it is positive, times it where it is not; then, if c, half
//     of the count without its lowest bit, is not 0, less presence_penalty[r] + c * frequency_penalty[r]
//   maxima[r, g] = max of logits[r, i] over the group's ids i, 128 * g <= i < 128 * (g + 1), i < N; NaN if one is NaN
//   sums[r, g]   = sum of exp((logits[r, i] - maxima[r, g]) / temperature[r]) over the same ids
//   Without HAS_TEMPERATURE the temperature is 1. The sums of a greedy row, temperature 0, mean nothing.
//   Twin: ReferenceOps.sample, with HAS_PENALTIES ReferenceOps.sample_rows
// Arrays
//   logits               (R, V)   float32   read      the first N columns; with HAS_PENALTIES written, too
//   temperature          (R,)     float32   read      with HAS_TEMPERATURE
//   repetition_penalty   (R,)     float32   read      with HAS_PENALTIES; 1 is off
//   presence_penalty     (R,)     float64   read      with HAS_PENALTIES; 0 is off
//   frequency_penalty    (R,)     float64   read      with HAS_PENALTIES; 0 is off
//   counts               (R, W)   uint32    read      with HAS_PENALTIES; 1 for a token of the prompt and 2 for each
//                                                     time it is in the output; W is N rounded up to a multiple of 4
//   maxima               (R, G)   float32   written   G is ceil(N / 128)
//   sums                 (R, G)   float32   written
// Constants
//   HAS_TEMPERATURE   0 or 1
//   HAS_PENALTIES     0 or 1
// Launch
//   grid (ceil(G / 8), R), block 256, no shared memory
//   block owns eight groups of one row; warp owns a group; lane owns four neighbours of it.
//       lane     0         1         2        ...      31
//       ids    0 .. 3    4 .. 7    8 .. 11          124 .. 127     16 bytes a lane, 512 bytes a warp
// Bytes
//   logits 4 * R * N, maxima 4 * R * G, sums 4 * R * G; counts 4 * N for each row with a penalty
//   Example: least_bytes(R=64, N=151936) totals 39,503,360 bytes: 8.2 us at the 4.8 TB/s of an H200
// Numerics
//   maxima are exact; sums are float32 in the order lane, then lanes, with the largest term 1, so nothing overflows.
//   Penalties are rounded as the host rounds them, by count in float64, so that logits are the same to the last bit.
// Preconditions
//   arrays contiguous, N at least 1; counts of ids from N on, which fill the row up, are 0
// Why this way
//   This is the only pass over all logits, so it is spread over all multiprocessors, and a warp that has loaded its 512
//   bytes once needs no barrier and no shared memory. Penalties change the logits in place, a few hundred of them, so
//   that whoever reads them again need not know of counts.
// Source
//   the idea of a summary that lets a search skip most of the data is that of any index; Keskar et al., "CTRL: a
//   conditional transformer language model for controllable generation", 2019, for the repetition penalty

#ifndef HAS_TEMPERATURE
#define HAS_TEMPERATURE 0
#endif
#ifndef HAS_PENALTIES
#define HAS_PENALTIES 0
#endif
static_assert(HAS_TEMPERATURE == 0 || HAS_TEMPERATURE == 1, "HAS_TEMPERATURE is 0 or 1");
static_assert(HAS_PENALTIES == 0 || HAS_PENALTIES == 1, "HAS_PENALTIES is 0 or 1");

#define WARPS 8
#define GROUP_IDS 128

struct Penalty {
    float repetition;
    double presence, frequency;
};

// A logit and, if that changes it, its place in memory.
__device__ __forceinline__ float penalised(float x, u32 count, const Penalty& penalty, float* place) {
    if (count == 0) return x;
    x = x > 0.0f ? __fdiv_rn(x, penalty.repetition) : __fmul_rn(x, penalty.repetition);
    if (count > 1) {
        double by_count = __dadd_rn(penalty.presence, __dmul_rn(penalty.frequency, double(count / 2)));
        x = __fsub_rn(x, __double2float_rn(by_count));
    }
    *place = x;
    return x;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) group_maxima(
    float* __restrict__ logits,                    // (R, V)
    const float* __restrict__ temperature,         // (R,)
    const float* __restrict__ repetition_penalty,  // (R,)
    const double* __restrict__ presence_penalty,   // (R,)
    const double* __restrict__ frequency_penalty,  // (R,)
    const u32* __restrict__ counts,                // (R, W)
    float* __restrict__ maxima,                    // (R, G)
    float* __restrict__ sums,                      // (R, G)
    int V, int N) {
    // 1 locate
    int r = blockIdx.y, g = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    int groups = CEIL_DIV(N, GROUP_IDS), id = g * GROUP_IDS + lane * 4;
    if (g >= groups) return;
    float* row = logits + (long long)r * V;  // logits[r, :]

    // 2 load
    float4 x = load_4_floats<HAS_PENALTIES>(row, id, N);

    // 3 penalise
    if (HAS_PENALTIES && id < N) {
        Penalty penalty = {repetition_penalty[r], presence_penalty[r], frequency_penalty[r]};
        if (penalty.repetition != 1.0f || penalty.presence != 0.0 || penalty.frequency != 0.0) {
            const u32* counts_4 = counts + (long long)r * (CEIL_DIV(N, 4) * 4) + id;  // counts[r, id : id + 4]
            uint4 count = __ldg(reinterpret_cast<const uint4*>(counts_4));
            x = make_float4(penalised(x.x, count.x, penalty, row + id), penalised(x.y, count.y, penalty, row + id + 1),
                            penalised(x.z, count.z, penalty, row + id + 2),
                            penalised(x.w, count.w, penalty, row + id + 3));
        }
    }

    // 4 the largest
    float largest = warp_max(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));  // fmaxf passes NaN over
    bool has_nan = __any_sync(FULL_MASK, x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w);

    // 5 the sum
    float divisor = HAS_TEMPERATURE ? temperature[r] : 1.0f;
    float sum = expf((x.x - largest) / divisor) + expf((x.y - largest) / divisor) +  //
                expf((x.z - largest) / divisor) + expf((x.w - largest) / divisor);
    sum = warp_sum(sum);

    // 6 store
    if (lane != 0) return;
    long long out = (long long)r * groups + g;
    maxima[out] = has_nan ? __int_as_float(0x7fc00000) : largest;
    sums[out] = largest == NEGATIVE_INFINITY ? 0.0f : sum;
}
