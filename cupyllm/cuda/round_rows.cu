// Purpose
//   Before a product of many rows (tile_gemm, or cuBLAS): norm the rows of the residual stream where the layer wants
//   it, and round them to the weights' type, so that tensor cores can take them.
// Computes
//   rounded[t, k] = normed[t, k] * scale[t], rounded to an element; inverse_scales[t] = 1 / scale[t]
//   normed = x * norm_weight / sqrt(mean of x[t]^2 + eps), or x itself without a norm
//   scale[t] is a power of two, for bf16 always 1
//   Twin: ReferenceOps.rms_norm, which rounds nothing
// Arrays
//   x                (T, K)   float32        read
//   norm_weight      (K,)     float32        read      or null: no norm
//   rounded          (T, K)   fp16 or bf16   written
//   inverse_scales   (T,)     float32        written   what a product's rows are multiplied by
// Constants
//   ELEMENT_BF16   0 or 1
// Launch
//   grid (T), block 256, no dynamic shared memory
//   block owns a row; warp owns every eighth run of 256 columns; lane owns eight neighbours of each run.
//       lane        0         1         2
//       columns   0 .. 7    8 .. 15   16 .. 23      32 bytes a lane in, 16 bytes out
// Bytes
//   x 4 * T * K, norm_weight 4 * K, rounded 2 * T * K, inverse_scales 4 * T. The cache gives x the second time.
//   Example: least_bytes(T=512, K=3584, norm=1) totals 11,026,432 bytes: 2.3 us at the 4.8 TB/s of an H200
// Numerics
//   float32 until the one rounding, to nearest even. fp16 ends at 65504: a row's largest magnitude is brought to
//   [2^14, 2^15), so that nothing overflows, and values down to 2^-29 of it keep their 11 bits.
// Preconditions
//   arrays contiguous, K a multiple of 8
// Why this way
//   A tiled product reads each row N / 128 times: rounding once here is cheaper than in every tile, and lets both
//   operands take the asynchronous way to shared memory. The factor from the norm and the scale are applied together.
// Source
//   Zhang and Sennrich, "Root mean square layer normalization", 2019

#define WARPS 8

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) round_rows(
    const float* __restrict__ x,            // (T, K)
    const float* __restrict__ norm_weight,  // (K,)
    element_t* __restrict__ rounded,        // (T, K)
    float* __restrict__ inverse_scales,     // (T,)
    int K, float eps) {
    __shared__ float squares_of_warps[WARPS], largest_of_warps[WARPS];

    // 1 locate
    long long t = blockIdx.x;
    const float4* x4 = reinterpret_cast<const float4*>(x + t * K);  // x[t, :]
    const float4* norm4 = reinterpret_cast<const float4*>(norm_weight);
    uint4* rounded8 = reinterpret_cast<uint4*>(rounded + t * K);  // rounded[t, :]

    // 2 mean square, and the largest magnitude of what will be rounded
    float squares = 0.0f, largest = 0.0f;
    for (int c = threadIdx.x; c < K / 4; c += blockDim.x) {
        float4 v = x4[c];
        squares += sum_of_products(v, v);
        largest = fmaxf(largest, largest_magnitude(norm_weight ? product(v, norm4[c]) : v));
    }
    largest = warp_max(largest);
    if (threadIdx.x % WARP_SIZE == 0) largest_of_warps[threadIdx.x / WARP_SIZE] = largest;
    squares = block_sum<WARPS>(squares, squares_of_warps);  // has the barrier that both need
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) largest = fmaxf(largest, largest_of_warps[warp]);

    // 3 round
    float factor = norm_weight ? rsqrtf(__fdividef(squares, K) + eps) : 1.0f;
    float scale = scale_for_elements(largest * factor);
    factor *= scale;
    for (int c = threadIdx.x; c < K / 8; c += blockDim.x) {
        float4 first = product(x4[2 * c], factor), second = product(x4[2 * c + 1], factor);
        if (norm_weight) {
            first = product(first, norm4[2 * c]);
            second = product(second, norm4[2 * c + 1]);
        }
        rounded8[c] = pack_8(first, second);
    }
    if (threadIdx.x == 0) inverse_scales[t] = 1.0f / scale;
}
