// Step 4 of the ladder to gemv: several warps a row.
// Changed
//   K_WARPS warps share a row: each takes every K_WARPS-th run of 32 chunks and leaves its sum in shared memory. After
//   a barrier one thread a row adds them up, in a fixed order. Grid ceil(N * K_WARPS / 8), block 256.
// Why it helps
//   K_WARPS times as many warps ask at the same time, so that few rows fill the GPU too. The bytes stay the same.
// Still lost
//   For every 16 bytes of weight a lane reads 32 bytes of x, if only from the cache. It still asks for one chunk of
//   weight at a time. Norm, bias and residual are launches of their own, which read and write their rows again.
//   Step 5, cupyllm/cuda/gemv.cu: 2 or 4 rows share each piece of x, the next chunks are asked for before the last are
//   used, and everything around the product is done in the same launch.

static_assert(K_WARPS == 2 || K_WARPS == 4 || K_WARPS == 8, "K_WARPS is 2, 4 or 8");
#define ROWS (8 / K_WARPS)  // of a block

extern "C" __global__ void __launch_bounds__(256) gemv_4_split_k(
    const float* __restrict__ x,           // (K,)
    const element_t* __restrict__ weight,  // (N, K)
    float* __restrict__ y,                 // (N,)
    int N, int K) {
    __shared__ float partial[8];  // each warp's sum
    int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    int n = blockIdx.x * ROWS + warp / K_WARPS;
    const element_t* row = weight + (long long)min(n, N - 1) * K;  // past the end: the last row again, and not stored
    const float4* x4 = reinterpret_cast<const float4*>(x);
    float sum = 0.0f;
    for (int chunk = warp % K_WARPS * WARP_SIZE + lane; chunk < K / 8; chunk += K_WARPS * WARP_SIZE) {
        sum = dot_8(load_8_elements(row + chunk * 8), __ldg(x4 + 2 * chunk), __ldg(x4 + 2 * chunk + 1), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();

    n = blockIdx.x * ROWS + threadIdx.x;
    if (threadIdx.x >= ROWS || n >= N) return;
    sum = 0.0f;
    for (int part = 0; part < K_WARPS; part++) sum += partial[threadIdx.x * K_WARPS + part];
    y[n] = sum;
}
