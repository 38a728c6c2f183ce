// Threads and blocks that touch the same global memory. y[n] counts the blocks that are done and starts at zero.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    __shared__ bool last;
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    if (fault == 0 || fault == 5) {
        y[i] = x[i];
        if (fault == 0) __threadfence();
        __syncthreads();
        if (t == 0) last = atomicAdd(reinterpret_cast<unsigned*>(y) + n, 1u) == gridDim.x - 1;
        __syncthreads();
        if (last) y[i] = y[(i + 64) % n];  // fault 5: published without a fence
    } else if (fault == 1) {
        y[i / 2] = x[i];  // fault 1: two threads of a block write one element
    } else if (fault == 2) {
        y[t] = x[i];  // fault 2: two blocks write the same elements
    } else if (fault == 3) {
        y[i] = x[i];
        if (i >= 64) y[i] += y[i - 64];  // fault 3: a block reads what another writes
    } else if (fault == 4) {
        y[0] += x[i];  // fault 4: needs an atomic
    } else if (fault == 6) {
        if (blockIdx.x == 0) y[i] = y[127];
        else if (t == 63) y[127] = 1.0f;  // fault 6: another block has read it
    }
}
