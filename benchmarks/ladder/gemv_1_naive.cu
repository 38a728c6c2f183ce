// Step 1 of the ladder to gemv: y[n] = sum over k of x[k] * weight[n, k], as one would write it first.
// Changed
//   Nothing yet: thread n walks row n, element by element. Grid ceil(N / 256), block 256.
// Why it helps
//   It is right, and short enough to hold the later steps against.
// Still lost
//   At each step of the loop the 32 lanes of a warp read addresses 2 * K bytes apart: they touch 32 sectors of 32 bytes
//   for 2 bytes of each. The next 15 steps want the rest, if the cache still has it. And N rows are only N threads.

extern "C" __global__ void __launch_bounds__(256) gemv_1_naive(
    const float* __restrict__ x,           // (K,)
    const element_t* __restrict__ weight,  // (N, K)
    float* __restrict__ y,                 // (N,)
    int N, int K) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const element_t* row = weight + (long long)n * K;  // weight[n, :]
    float sum = 0.0f;
    for (int k = 0; k < K; k++) sum = fmaf(to_float(row[k]), x[k], sum);
    y[n] = sum;
}
