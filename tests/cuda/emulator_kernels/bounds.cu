// Accesses outside of what a pointer may reach. `fault` picks the mistake; 0 has none.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    extern __shared__ float dynamic[];  // 64 floats
    __shared__ float fixed[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    dynamic[t] = x[i];
    fixed[t] = x[i];
    float* pointer = fixed;
    const float* null = nullptr;
    if (fault == 1) dynamic[t] = x[i + 1];  // fault 1
    if (fault == 2 && i == n - 1) y[i + 1] = 0.0f;  // fault 2
    if (fault == 3 && i == 0) y[-1] = 0.0f;  // fault 3
    if (fault == 4 && t == 63) fixed[t + 1] = x[i];  // fault 4
    if (fault == 5 && t == 63) pointer[t + 1] = x[i];  // fault 5
    if (fault == 6 && t == 63) dynamic[t + 1] = x[i];  // fault 6
    if (fault == 7) reinterpret_cast<float4*>(y)[n / 4] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // fault 7
    if (fault == 8) dynamic[t] = null[t];  // fault 8
    y[i] = dynamic[t] + pointer[t];
}
