// Step 3 of the ladder to gemv: 16 bytes a load.
// Changed
//   A lane takes eight neighbouring elements at once, and the eight x that belong to them. Grid ceil(N / 8), block 256.
//   K must be a multiple of 8, so that every row starts at a multiple of 16 bytes.
// Why it helps
//   An eighth of the load instructions for the same sectors: each puts 512 bytes of a row under way.
// Still lost
//   A row is one warp, and a warp waits for each load before it asks for the next. With few rows (896 in Qwen2.5-0.5B)
//   the warps of the whole grid ask for less at once than the memory can have under way.

extern "C" __global__ void __launch_bounds__(256) gemv_3_vectorised(
    const float* __restrict__ x,           // (K,)
    const element_t* __restrict__ weight,  // (N, K)
    float* __restrict__ y,                 // (N,)
    int N, int K) {
    int lane = threadIdx.x % WARP_SIZE, n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP_SIZE;
    if (n >= N) return;
    const element_t* row = weight + (long long)n * K;  // weight[n, :]
    const float4* x4 = reinterpret_cast<const float4*>(x);
    float sum = 0.0f;
    for (int chunk = lane; chunk < K / 8; chunk += WARP_SIZE) {
        sum = dot_8(load_8_elements(row + chunk * 8), __ldg(x4 + 2 * chunk), __ldg(x4 + 2 * chunk + 1), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[n] = sum;
}
