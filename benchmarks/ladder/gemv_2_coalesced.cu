// Step 2 of the ladder to gemv: a warp a row.
// Changed
//   Lane l takes k = l, l + 32, ... of its warp's row, and a shuffle adds the lanes up. Grid ceil(N / 8), block 256.
// Why it helps
//   Neighbouring lanes read neighbouring elements: the 64 bytes that a warp asks for fill 2 sectors. There are also
//   32 times as many threads.
// Still lost
//   A load brings a lane 2 bytes. As many instructions are issued as in step 1, each with an address to compute, and
//   few bytes are under way at any time: latency decides, not bandwidth.

extern "C" __global__ void __launch_bounds__(256) gemv_2_coalesced(
    const float* __restrict__ x,           // (K,)
    const element_t* __restrict__ weight,  // (N, K)
    float* __restrict__ y,                 // (N,)
    int N, int K) {
    int lane = threadIdx.x % WARP_SIZE, n = (blockIdx.x * blockDim.x + threadIdx.x) / WARP_SIZE;
    if (n >= N) return;
    const element_t* row = weight + (long long)n * K;  // weight[n, :]
    float sum = 0.0f;
    for (int k = lane; k < K; k += WARP_SIZE) sum = fmaf(to_float(row[k]), x[k], sum);
    sum = warp_sum(sum);
    if (lane == 0) y[n] = sum;
}
