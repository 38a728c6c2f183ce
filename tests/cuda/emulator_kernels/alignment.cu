// Vector accesses at addresses that are not multiples of their size.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    __shared__ float4 tile[16];
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = threadIdx.x;
    if (t < 16) tile[t] = reinterpret_cast<const float4*>(x)[t];
    if (fault == 1 && i == 0) y[0] = reinterpret_cast<const float4*>(x + 1)->y;  // fault 1
    if (fault == 2 && i == 0) *reinterpret_cast<float2*>(y + 1) = make_float2(0.0f, 0.0f);  // fault 2
    if (fault == 3 && t == 0) y[0] = reinterpret_cast<float2*>(reinterpret_cast<float*>(tile) + 1)->x;  // fault 3
    __syncthreads();
    y[i] = reinterpret_cast<float*>(tile)[t];
}
