// Threads that exchange values through shared memory with and without the barrier that orders them.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    __shared__ float s[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    s[t] = 0.0f;
    __syncthreads();
    s[t] = x[i];
    if (fault == 0) {
        __syncwarp();
        float neighbour = s[t ^ 1];   // of the same warp
        float all = s[t / 32 * 32];   // every lane reads the same word
        __syncwarp();
        s[t] = neighbour + all;       // ordered after both reads
        __syncthreads();
        y[i] = s[63 - t];
    } else if (fault == 1) {
        y[i] = s[63 - t];  // fault 1: read after write, other warp
    } else if (fault == 2) {
        __syncwarp();
        y[i] = s[63 - t];  // fault 2: __syncwarp does not order two warps
    } else if (fault == 3) {
        y[i] = s[t ^ 1];  // fault 3: read after write, same warp
    } else if (fault == 4) {
        float sum = __shfl_xor_sync(0xffffffffu, x[i], 1);
        y[i] = s[t ^ 1] + sum;  // fault 4: a shuffle is not a memory barrier
    } else if (fault == 5) {
        __syncthreads();
        float value = s[63 - t];
        s[t] = value;  // fault 5: write after read
        y[i] = value;
    } else if (fault == 6) {
        __syncthreads();
        s[0] = x[i];  // fault 6: several writers
    } else if (fault == 7) {
        __syncwarp();
        float all = s[t / 32 * 32];
        s[t] = all;  // fault 7: lane 0 writes what the other lanes read
        y[i] = all;
    } else if (fault == 8) {
        __syncwarp(t % 32 < 16 ? 0x0000ffffu : 0xffff0000u);
        y[i] = s[t ^ 16];  // fault 8: the two halves of the warp were not synchronised with each other
    }
}
