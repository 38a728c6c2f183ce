// A write through a pointer that the kernel declares const.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (fault == 1) const_cast<float*>(x)[i] = 1.0f;  // fault 1
    y[i] = x[i];
}
