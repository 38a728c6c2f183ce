// Purpose
//   An index of a row of logits: for every group of 128 neighbours the largest, and the group's weight beside it. With
//   it draw and top_logprobs read only the groups that can matter, usually a few dozen out of 1187.
// Computes
//   maxima[r, g] = max of logits[r, i] over the group's ids i, 128 * g <= i < 128 * (g + 1), i < N; NaN if one is NaN
//   sums[r, g]   = sum of exp((logits[r, i] - maxima[r, g]) / temperature[r]) over the same ids
//   Without HAS_TEMPERATURE the temperature is 1. The sums of a greedy row, temperature 0, mean nothing.
//   Twin: ReferenceOps.sample
// Arrays
//   logits        (R, V)   float32   read      the first N columns
//   temperature   (R,)     float32   read      with HAS_TEMPERATURE
//   maxima        (R, G)   float32   written   G is ceil(N / 128)
//   sums          (R, G)   float32   written
// Constants
//   HAS_TEMPERATURE   0 or 1
// Launch
//   grid (ceil(G / 8), R), block 256, no shared memory
//   block owns eight groups of one row; warp owns a group; lane owns four neighbours of it.
//       lane     0         1         2        ...      31
//       ids    0 .. 3    4 .. 7    8 .. 11          124 .. 127     16 bytes a lane, 512 bytes a warp
// Bytes
//   logits 4 * R * N, maxima 4 * R * G, sums 4 * R * G
//   Example: least_bytes(R=64, N=151936) totals 39,503,360 bytes: 8.2 us at the 4.8 TB/s of an H200
// Numerics
//   maxima are exact; sums are float32 in the order lane, then lanes, with the largest term 1, so nothing overflows
// Preconditions
//   arrays contiguous, N at least 1
// Why this way
//   This is the only pass over all logits, so it is spread over all multiprocessors, and a warp that has loaded its 512
//   bytes once needs no barrier and no shared memory.
// Source
//   the idea of a summary that lets a search skip most of the data is that of any index; no paper

#ifndef HAS_TEMPERATURE
#define HAS_TEMPERATURE 0
#endif
static_assert(HAS_TEMPERATURE == 0 || HAS_TEMPERATURE == 1, "HAS_TEMPERATURE is 0 or 1");

#define WARPS 8
#define GROUP_IDS 128

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) group_maxima(
    const float* __restrict__ logits,       // (R, V)
    const float* __restrict__ temperature,  // (R,)
    float* __restrict__ maxima,             // (R, G)
    float* __restrict__ sums,               // (R, G)
    int V, int N) {
    // 1 locate
    int r = blockIdx.y, g = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    int groups = CEIL_DIV(N, GROUP_IDS);
    if (g >= groups) return;

    // 2 load
    float4 x = load_4_floats(logits + (long long)r * V, g * GROUP_IDS + lane * 4, N);

    // 3 the largest
    float largest = warp_max(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));  // fmaxf passes NaN over
    bool has_nan = __any_sync(FULL_MASK, x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w);

    // 4 the sum
    float divisor = HAS_TEMPERATURE ? temperature[r] : 1.0f;
    float sum = expf((x.x - largest) / divisor) + expf((x.y - largest) / divisor) +  //
                expf((x.z - largest) / divisor) + expf((x.w - largest) / divisor);
    sum = warp_sum(sum);

    // 5 store
    if (lane != 0) return;
    long long out = (long long)r * groups + g;
    maxima[out] = has_nan ? __int_as_float(0x7fc00000) : largest;
    sums[out] = largest == NEGATIVE_INFINITY ? 0.0f : sum;
}
