// What the intrinsics compute; the test has the same in NumPy.
extern "C" __global__ void shuffles(const int* x, int* out, int argument, int width) {
    int t = threadIdx.x, n = blockDim.x;
    out[t] = __shfl_sync(0xffffffffu, x[t], argument + t, width);
    out[n + t] = __shfl_xor_sync(0xffffffffu, x[t], argument, width);
    out[2 * n + t] = __shfl_down_sync(0xffffffffu, x[t], argument, width);
    out[3 * n + t] = __shfl_up_sync(0xffffffffu, x[t], argument, width);
}

extern "C" __global__ void votes(const int* x, unsigned* out) {
    int t = threadIdx.x, all;
    out[t] = __ballot_sync(0xffffffffu, x[t] > 0);
    out[32 + t] = __any_sync(0xffffffffu, x[t] > 0);
    out[64 + t] = __all_sync(0xffffffffu, x[t] > 0);
    out[96 + t] = __match_any_sync(0xffffffffu, x[t]);
    out[128 + t] = __match_all_sync(0xffffffffu, x[t], &all) + all;
    out[160 + t] = __reduce_add_sync(0xffffffffu, x[t]);
    out[192 + t] = __reduce_min_sync(0xffffffffu, x[t]);
    out[224 + t] = __reduce_max_sync(0xffffffffu, x[t]);
    out[256 + t] = __reduce_xor_sync(0xffffffffu, unsigned(x[t]));
    out[288 + t] = __reduce_max_sync(0xffffffffu, unsigned(x[t]));
}

extern "C" __global__ void block_votes(const int* x, int* out) {
    int t = threadIdx.x;
    out[t] = __syncthreads_count(x[t] > 0);
    out[t] = out[t] * 4 + __syncthreads_or(x[t] > 0) * 2 + __syncthreads_and(x[t] > 0);
}

extern "C" __global__ void indices(int* out) {
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

extern "C" __global__ void atomics(int* out, float* sum, unsigned* wrapped) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&out[0], t);
    atomicMax(&out[1], t);
    atomicMin(&out[2], t);
    atomicSub(&out[3], 1);
    atomicOr(&out[4], 1 << t % 8);
    atomicCAS(&out[5], 0, 7);
    atomicAdd(sum, 0.5f);
    atomicInc(wrapped, 9u);
}

extern "C" __global__ void convert(const unsigned short* bits, float* halves, float* bfloats, const float* x,
                                   __half* to_half, __nv_bfloat16* to_bfloat, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    halves[i] = __half2float(__ushort_as_half(bits[i]));
    bfloats[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
    to_half[i] = __float2half_rn(x[i]);
    to_bfloat[i] = __float2bfloat16_rn(x[i]);
}

extern "C" __global__ void integers(unsigned x, unsigned y, unsigned* out) {
    out[0] = __byte_perm(x, y, 0x7251);
    out[1] = __funnelshift_l(x, y, 8);
    out[2] = __funnelshift_r(x, y, 8);
    out[3] = __brev(x);
    out[4] = __dp4a(x, y, 5u);
    out[5] = unsigned(__dp4a(int(x), int(y), 5));
    out[6] = __umulhi(x, y);
    out[7] = unsigned(__clz(int(x))) * 100 + unsigned(__popc(x)) * 10 + unsigned(__ffs(int(x)) > 0);
    out[8] = unsigned(__float2int_rn(2.5f)) * 100 + unsigned(__float2int_ru(2.5f)) * 10 + unsigned(__float2int_rd(2.5f));
    out[9] = unsigned(__float2int_rz(1e20f));
}

extern "C" __global__ void shared_start(float* y) {
    extern __shared__ float s[];
    y[threadIdx.x] = s[threadIdx.x];
}
