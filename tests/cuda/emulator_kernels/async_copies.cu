// cp.async: data may be used after commit, wait, and a barrier if another thread issued the copy.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    __shared__ __align__(16) float s[64];
    int t = threadIdx.x, base = blockIdx.x * blockDim.x;
    s[t] = -1.0f;
    __syncthreads();
    if (fault == 4) y[base + t] = s[t];  // fault 4: others still read the destination
    if (fault == 5 && t == 0) emulated_cp_async_16(&s[1], &x[base]);  // fault 5: not a multiple of 16
    if (fault == 6 && t < 16) emulated_cp_async_16(&s[4 * t], &x[base + 64 + 4 * t]);  // fault 6: past the end
    if (fault < 5 && t < 16) emulated_cp_async_16(&s[4 * t], &x[base + 4 * t]);
    if (fault != 3) emulated_cp_async_commit();
    if (fault != 1) emulated_cp_async_wait(0);
    if (fault != 2) __syncthreads();
    y[base + t] = s[63 - t];  // fault 1: no wait; fault 2: no barrier; fault 3: no commit
}
