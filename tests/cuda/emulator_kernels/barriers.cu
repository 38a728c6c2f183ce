// Barriers and warp collectives that not all of their threads reach.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float value = x[i];
    if (fault == 0) {
        __syncthreads();
        if (warp == 0) value += __shfl_down_sync(0xffffffffu, value, 1);
        if (lane < 8) value += __shfl_xor_sync(0x000000ffu, value, 7);
        y[i] = value;
        if (warp == 1) return;  // after the last barrier
        if (lane < 16) return;
        y[i] += __shfl_xor_sync(0xffff0000u, value, 1);
        return;
    } else if (fault == 1) {
        if (warp == 0) __syncthreads();
        else __syncthreads();  // fault 1: two different barriers
    } else if (fault == 2) {
        if (warp == 1) return;
        __syncthreads();  // fault 2: warp 1 has left
    } else if (fault == 3) {
        if (lane < 16) __syncthreads();
        else value = __shfl_xor_sync(0xffffffffu, value, 1);  // fault 3: nobody can go on
    } else if (fault == 4) {
        if (lane < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);  // fault 4: the other lanes leave
    } else if (fault == 5) {
        value = __shfl_xor_sync(0x0000ffffu, value, 1);  // fault 5: lanes 16..31 are not in their own mask
    } else if (fault == 6) {
        if (lane < 16) value = __shfl_xor_sync(0x0000ffffu, value, 16);  // fault 6: reads lanes outside of the mask
    } else if (fault == 7) {
        if (lane < 16) value = __shfl_sync(0xffffffffu, value, 0);
        else value = __shfl_sync(0xffffffffu, value, 1);  // fault 7: one mask, two calls
    } else if (fault == 8) {
        value = __shfl_xor_sync(0xffffffffu, value, 1, 24);  // fault 8: not a power of two
    }
    y[i] = value;
}
