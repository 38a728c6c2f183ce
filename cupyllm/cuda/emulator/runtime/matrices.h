// mma.sync and ldmatrix: which lane's register holds which element of a matrix, and the arithmetic.
//
// With g = lane / 4 and t = lane % 4, and i counting the 16-bit elements of a lane's registers (two per register, the
// low half first), the PTX ISA (chapter on warp-level matrix instructions) places
//   m16n8k16  A (16 x 16)  a_i at row g + 8 * (i / 2 % 2),  column 2 t + i % 2 + 8 * (i / 4)     i = 0..7
//             B (16 x 8)   b_i at row 2 t + i % 2 + 8 * (i / 2),  column g                       i = 0..3
//   m16n8k8   A (16 x 8)   a_i at row g + 8 * (i / 2),  column 2 t + i % 2                       i = 0..3
//             B (8 x 8)    b_i at row 2 t + i,  column g                                         i = 0..1
//   both      C, D (16x8)  c_i at row g + 8 * (i / 2),  column 2 t + i % 2                       i = 0..3
// Products are added in fp32 in the order of k. A tensor core adds in a wider format and in an order NVIDIA does not
// state, so the last bits differ from a GPU's.
#pragma once

static struct MmaOperands {
    float* d;
    const uint32_t *a, *b;
    const float* c;
} mma_operands[MAX_THREADS];

static struct LdmatrixOperands {
    uint32_t* r;
    const char* row;
} ldmatrix_operands[MAX_THREADS];

static inline float element(const uint32_t* registers, int i, bool bf16) {
    unsigned short bits = (unsigned short)(registers[i / 2] >> 16 * (i % 2));
    return bf16 ? emu_bits<float>((uint32_t)bits << 16) : (float)emu_bits<emu_float16>(bits);
}

static void compute_mma(Warp&, uint32_t warp, int k, bool bf16) {
    float A[16][16], B[16][8], C[16][8];
    const MmaOperands* operands = mma_operands + warp * WARP;
    for (int lane = 0; lane < WARP; lane++) {
        const int g = lane / 4, t = lane % 4;
        const MmaOperands& o = operands[lane];
        for (int i = 0; i < k / 2; i++) A[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = element(o.a, i, bf16);
        for (int i = 0; i < k / 4; i++) B[2 * t + i % 2 + 8 * (i / 2)][g] = element(o.b, i, bf16);
        for (int i = 0; i < 4; i++) C[g + 8 * (i / 2)][2 * t + i % 2] = o.c[i];
    }
    for (int m = 0; m < 16; m++)
        for (int i = 0; i < k; i++)
            for (int n = 0; n < 8; n++) C[m][n] += A[m][i] * B[i][n];
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++) operands[lane].d[i] = C[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

void emu_mma(int k, int bf16, float* d, const uint32_t* a, const uint32_t* b, const float* c, emu_site site) {
    EMU_CALLED_FROM_KERNEL;
    mma_operands[current().number] = {d, a, b, c};
    warp_collective(EMU_MMA, ALL_LANES, 0, k, bf16, site);
}

// ldmatrix loads 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 j + i gives the address of row i (16
// bytes) of matrix j; the other lanes' addresses are ignored. With g and t as above, a lane receives in register j the
// elements (g, 2 t) and (g, 2 t + 1) of matrix j, or with .trans the elements (2 t, g) and (2 t + 1, g).
static void compute_ldmatrix(Warp&, uint32_t warp, int matrices, bool transposed) {
    const LdmatrixOperands* operands = ldmatrix_operands + warp * WARP;
    unsigned short M[4][8][8];
    for (int lane = 0; lane < 8 * matrices; lane++) {
        check_shared_row(operands[lane].row, warp * WARP + lane);
        memcpy(M[lane / 8][lane % 8], operands[lane].row, 16);
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int j = 0; j < matrices; j++) {
            const int major = lane / 4, minor = 2 * (lane % 4);
            unsigned short low = transposed ? M[j][minor][major] : M[j][major][minor];
            unsigned short high = transposed ? M[j][minor + 1][major] : M[j][major][minor + 1];
            operands[lane].r[j] = low | (uint32_t)high << 16;
        }
}

void emu_ldmatrix(int matrices, int transposed, uint32_t* r, const void* row, emu_site site) {
    EMU_CALLED_FROM_KERNEL;
    ldmatrix_operands[current().number] = {r, (const char*)row};
    warp_collective(EMU_LDMATRIX, ALL_LANES, 0, matrices, transposed, site);
}
