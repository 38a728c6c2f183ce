// Access patterns whose sectors and bank conflicts can be counted by hand. One file, so that it compiles once.
#define INDEX int i = blockIdx.x * blockDim.x + threadIdx.x

extern "C" __global__ void coalesced(const float* x, float* y) { INDEX; y[i] = x[i]; }
extern "C" __global__ void shifted(const float* x, float* y) { INDEX; y[i] = x[i + 1]; }
extern "C" __global__ void strided(const float* x, float* y) { INDEX; y[i] = x[8 * i]; }
extern "C" __global__ void reversed(const float* x, float* y) { INDEX; y[i] = x[i ^ 31]; }
extern "C" __global__ void broadcast(const float* x, float* y) { INDEX; y[i] = x[0]; }
extern "C" __global__ void half_warp(const float* x, float* y) { INDEX; if (i % 32 < 16) y[i] = x[i]; }
extern "C" __global__ void vectors(const float4* x, float4* y) { INDEX; y[i] = x[i]; }
extern "C" __global__ void halves(const __half* x, __half* y) { INDEX; y[i] = x[i]; }
extern "C" __global__ void atomics(const float* x, float* y) { INDEX; atomicAdd(&y[i / 32], x[i]); }

// Lane l of each warp loads l % 3 + 1 elements, 32 apart.
extern "C" __global__ void uneven_loops(const float* x, float* y) {
    INDEX;
    float sum = 0.0f;
    for (int k = 0; k <= i % 3; k++) sum += x[i + 32 * k];
    y[i] = sum;
}

// One warp stores to shared memory with a stride, then all lanes read one word.
extern "C" __global__ void banks(float* y, int stride) {
    __shared__ float s[33 * 32];
    s[threadIdx.x * stride] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[0];
}
extern "C" __global__ void vector_banks(float* y, int stride) {
    __shared__ float4 s[64];
    s[threadIdx.x * stride] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    __syncthreads();
    y[threadIdx.x] = s[0].x;
}
// Rows of 16 bytes, `pitch` bytes apart.
extern "C" __global__ void matrix_banks(float* y, int pitch) {
    extern __shared__ __align__(16) unsigned char s[];
    for (int i = threadIdx.x; i < 32 * pitch / 4; i += 32) reinterpret_cast<unsigned*>(s)[i] = 0u;
    __syncthreads();
    unsigned r[4];
    emulated_ldmatrix_x4(r, s + threadIdx.x * pitch);
    y[threadIdx.x] = float(r[0] + r[1] + r[2] + r[3]);
}
extern "C" __global__ void three_barriers(float* y) {
    for (int k = 0; k < 3; k++) __syncthreads();
    y[threadIdx.x] = 0.0f;
}
