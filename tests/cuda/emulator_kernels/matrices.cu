// One tile product D = A B + C, operands brought to registers as on a GPU. A is (16, K), B is (K, 8) or its transpose.
#ifndef K
#define K 16
#endif

__device__ void store(float* D, const float d[4]) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    D[g * 8 + 2 * t] = d[0];
    D[g * 8 + 2 * t + 1] = d[1];
    D[(g + 8) * 8 + 2 * t] = d[2];
    D[(g + 8) * 8 + 2 * t + 1] = d[3];
}

__device__ void load_c(const float* C, float c[4]) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) c[i] = C[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
}

// Plain loads of pairs: B is given transposed, (8, K).
extern "C" __global__ void by_hand(const unsigned* A, const unsigned* B, const float* C, float* D, int bf16) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4, row = K / 2;
    float c[4], d[4];
    load_c(C, c);
#if K == 16
    unsigned a[4] = {A[g * row + t], A[(g + 8) * row + t], A[g * row + t + 4], A[(g + 8) * row + t + 4]};
    unsigned b[2] = {B[g * row + t], B[g * row + t + 4]};
    if (bf16) emulated_mma_m16n8k16_bf16(d, a, b, c);
    else emulated_mma_m16n8k16_f16(d, a, b, c);
#else
    unsigned a[2] = {A[g * row + t], A[(g + 8) * row + t]};
    unsigned b[1] = {B[g * row + t]};
    emulated_mma_m16n8k8_f16(d, a, b, c);
#endif
    store(D, d);
}

// ldmatrix, as kernels do it: A row-major, and B either transposed (8, 16) or row-major (16, 8) with .trans.
extern "C" __global__ void by_ldmatrix(const unsigned short* A, const unsigned short* B, const float* C, float* D, int trans) {
    __shared__ __align__(16) unsigned short a_tile[16][16], b_tile[16 * 8], b_twice[2][16 * 8];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) a_tile[i / 16][i % 16] = A[i];
    for (int i = lane; i < 128; i += 32) b_tile[i] = b_twice[0][i] = b_twice[1][i] = B[i];
    __syncthreads();
    unsigned a[4], b[2], b4[4];
    float c[4], d[4], e[4];
    load_c(C, c);
    emulated_ldmatrix_x4(a, &a_tile[lane % 16][lane / 16 * 8]);
    if (trans) {
        emulated_ldmatrix_x2_trans(b, &b_tile[lane % 16 * 8]);
        emulated_ldmatrix_x4_trans(b4, &b_twice[lane / 16][lane % 16 * 8]);
    } else {
        emulated_ldmatrix_x2(b, &b_tile[lane % 8 * 16 + lane / 8 % 2 * 8]);
        emulated_ldmatrix_x4(b4, &b_twice[lane / 16][lane % 8 * 16 + lane / 8 % 2 * 8]);
    }
    emulated_mma_m16n8k16_f16(d, a, b, c);
    emulated_mma_m16n8k16_f16(e, a, b4 + 2, c);
    for (int i = 0; i < 4; i++) d[i] = d[i] == e[i] ? d[i] : NAN;
    store(D, d);
}

// ldmatrix reads what one lane has just written.
extern "C" __global__ void unordered_ldmatrix(unsigned* out, int fault) {
    __shared__ __align__(16) unsigned tile[32 * 4];
    int lane = threadIdx.x;
    for (int i = 0; i < 4; i++) tile[lane * 4 + i] = lane;
    if (fault == 0) __syncwarp();
    unsigned r[4];
    emulated_ldmatrix_x4(r, &tile[lane * 4]);  // fault 1
    out[lane] = r[0];
}
