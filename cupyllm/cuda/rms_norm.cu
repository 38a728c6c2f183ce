// Purpose
//   RMSNorm of every row. The products of a decode step norm their input themselves (gemv, skinny_gemm); this is the
//   op alone, and the place to see a sum over a block.
// Computes
//   y[t, c] = x[t, c] / sqrt(mean over c of x[t, c]^2 + eps) * weight[c]
//   Twin: ReferenceOps.rms_norm
// Arrays
//   x        (T, C)   float32   read
//   weight   (C,)     float32   read      the norm's own parameters
//   y        (T, C)   float32   written
// Constants
//   none
// Launch
//   grid (T), block 256, no dynamic shared memory
//   block owns a row; warp owns every eighth run of 128 columns; lane owns four neighbours of each run.
//       lane       0         1         2          3
//       columns  0 .. 3    4 .. 7    8 .. 11   12 .. 15      then + 1024: 16 bytes a lane, 512 bytes a warp
// Bytes
//   x 4 * T * C, weight 4 * C, y 4 * T * C. The second reading of x comes from the cache.
//   Example: least_bytes(T=64, C=3584) totals 1,849,344 bytes: 0.39 us at the 4.8 TB/s of an H200
// Numerics
//   float32 sum of squares, in an order fixed by the block size: each lane its own columns, then lanes, then warps.
// Preconditions
//   arrays contiguous, C a multiple of 4 (16-byte loads)
// Why this way
//   A row fits one block at every size in use, so one barrier is enough, and the row is read twice rather than kept:
//   keeping it would tie the register count to C.
// Source
//   Zhang and Sennrich, "Root mean square layer normalization", 2019

#define WARPS 8

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) rms_norm(
    const float* __restrict__ x,       // (T, C)
    const float* __restrict__ weight,  // (C,)
    float* __restrict__ y,             // (T, C)
    int C, float eps) {
    __shared__ float scratch[WARPS];

    // 1 locate
    long long row = (long long)blockIdx.x * C;
    const float4* x4 = reinterpret_cast<const float4*>(x + row);  // x[t, :]
    const float4* weight4 = reinterpret_cast<const float4*>(weight);
    float4* y4 = reinterpret_cast<float4*>(y + row);  // y[t, :]

    // 2 mean square
    float squares = 0.0f;
    for (int c = threadIdx.x; c < C / 4; c += blockDim.x) {
        float4 v = x4[c];
        squares += sum_of_products(v, v);
    }
    float inverse_rms = rsqrtf(__fdividef(block_sum<WARPS>(squares, scratch), C) + eps);

    // 3 scale
    for (int c = threadIdx.x; c < C / 4; c += blockDim.x) {
        float4 v = x4[c], w = weight4[c];
        y4[c] = make_float4(v.x * inverse_rms * w.x, v.y * inverse_rms * w.y,  //
                            v.z * inverse_rms * w.z, v.w * inverse_rms * w.w);
    }
}
