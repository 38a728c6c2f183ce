// Shared memory that is read before anything has been written there.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    if (t < 32) fixed[t] = dynamic[t] = x[i];
    __syncthreads();
    float value = fixed[t % 32] + dynamic[t % 32];
    if (fault == 1) value += fixed[t];  // fault 1
    if (fault == 2) value += dynamic[t];  // fault 2
    if (fault == 3) value += atomicAdd(&fixed[63], 1.0f);  // fault 3
    y[i] = value;
}
