// Arithmetic that C++ does not define, and __trap.
extern "C" __global__ void kernel(const float* x, float* y, int n, int fault) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, zero = n - 128, value = i;
    if (fault == 1) value = n / zero;  // fault 1
    if (fault == 2) value = n % zero;  // fault 2
    if (fault == 3) value = (zero + 2147483647) + n;  // fault 3
    if (fault == 4) value = 1 << (n - 96);  // fault 4
    if (fault == 5) value = int(x[0] + 1e10f);  // fault 5
    if (fault == 6 && i == 100) __trap();  // fault 6
    y[i] = float(value);
}
