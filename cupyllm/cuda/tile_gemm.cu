// Purpose
//   A linear layer for many rows: the chunks of prompts, on installs without cuBLAS. round_rows comes before it.
// Computes
//   y[t, n] = inverse_scales[t] * sum over k of x[t, k] * weight[n, k], + bias[n], + residual[t, n]
//   with GATE_UP: hidden[t, n] = silu(gate) * up, gate from row n of weight and up from row N + n
//   Twin: ReferenceOps.linear, and with GATE_UP ReferenceOps.gate_up_silu_mul
// Arrays
//   x                (T, K)   fp16 or bf16   read      normed, scaled and rounded by round_rows
//   inverse_scales   (T,)     float32        read
//   weight           (N, K)   fp16 or bf16   read      with GATE_UP (2 * N, K)
//   bias             (N,)     fp16 or bf16   read      or null
//   residual         (T, N)   float32        read      or null
//   y                (T, N)   float32        written
// Constants
//   ELEMENT_BF16   0 or 1
//   GATE_UP        0 or 1
//   TILE           64 or 128: tokens, and rows of weight, of a block
// Launch
//   grid (ceil(T / TILE), ceil(N / outputs of a block)), block 256, dynamic shared memory STAGES * 2 * TILE * 64 bytes
//   block owns TILE tokens by TILE rows of weight; warp owns TILE / 2 tokens by TILE / 4 rows; lane owns of each 16 x 8
//   result two neighbours in each of two rows (drawn in common.cuh).
//       k           0 .. 31      32 .. 63      64 .. 95
//       shared   multiplied    arriving     asked for       three stages, one barrier for each K tile
// Bytes
//   x 2 * T * K, weight 2 * N * K (twice that with GATE_UP), y 4 * T * N, and what else is there. The work is
//   2 * T * N * K operations: from a few hundred tokens on, tensor cores are the limit, not bytes.
//   Example: least_bytes(T=512, N=3584, K=18944) totals 162,531,328 bytes: 33.9 us at the 4.8 TB/s of an H200
// Numerics
//   Tensor cores multiply elements exactly and add in float32, in the order of k.
// Preconditions
//   arrays contiguous; K a multiple of 8, so that rows can be copied by 16 bytes
// Why this way
//   Each element that reaches shared memory is used TILE times. Blocks that follow each other share their rows of
//   weight, which then come from memory once and from the L2 cache after that. With GATE_UP gate and up rows alternate
//   by eights in the tile, so that one lane gets both halves of an output.
// Source
//   CUTLASS documentation, "Efficient GEMM in CUDA"; PTX ISA, ldmatrix and mma.sync

static_assert(GATE_UP == 0 || GATE_UP == 1, "GATE_UP is 0 or 1");
static_assert(TILE == 64 || TILE == 128, "TILE is 64 or 128");

#define THREADS 256
#define STAGES 3
#define K_TILE 32
#define CHUNKS (K_TILE / 8)                // of a row: copies of 16 bytes
#define OUTPUTS (TILE / (1 + GATE_UP))     // columns of y that a block writes
#define WARP_TOKENS (TILE / 2)
#define WARP_ROWS (TILE / 4)
#define M_TILES (WARP_TOKENS / 16)
#define N_TILES (WARP_ROWS / 8)
#define STAGE_ELEMENTS (2 * TILE * K_TILE)  // tokens, then rows of weight

// Where a chunk of a row lies in a stage. Two rows fill the 128 bytes of all banks; permuting the chunks of later pairs
// of rows puts eight rows' chunks of the same k, which an ldmatrix reads, into different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * K_TILE + (chunk ^ (row / 2 % CHUNKS)) * 8; }

// The column of y that row `row` of the block's weight tile makes.
__device__ __forceinline__ int output_of(int row) { return GATE_UP ? row / 16 * 8 + row % 8 : row; }

// Ask for a K tile of the block's tokens and rows of weight; where there is none it is zero.
__device__ __forceinline__ void copy_stage(element_t* stage, const element_t* x, const element_t* weight, int k0, int T,
                                           int N, int K) {
#pragma unroll
    for (int i = 0; i < 2 * TILE * CHUNKS / THREADS; i++) {
        int item = i * THREADS + threadIdx.x, row = item / CHUNKS, chunk = item % CHUNKS, k = k0 + chunk * 8;
        bool is_weight = row >= TILE;
        long long index = blockIdx.x * TILE + row;  // x[t, k]
        bool valid = index < T && k < K;
        if (is_weight) {
            row -= TILE;
            index = blockIdx.y * OUTPUTS + output_of(row);  // weight[n, k]
            valid = index < N && k < K;
            if (GATE_UP && row / 8 % 2) index += N;  // weight[N + n, k]
        }
        const element_t* source = (is_weight ? weight : x) + (valid ? index * K + k : 0);
        copy_async_16(stage + place(item / CHUNKS, chunk), source, valid);
    }
}

// sums += the warp's tokens times its rows of weight, over one K tile.
__device__ __forceinline__ void multiply(float sums[M_TILES][N_TILES][4], const element_t* stage, int warp_token,
                                         int warp_row) {
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int k = 0; k < K_TILE; k += 16) {
        u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            load_matrix_x4(a[m], stage + place(warp_token + m * 16 + lane % 16, k / 8 + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < N_TILES / 2; n++) {  // two tiles of eight rows: both halves of k of each
            int row = TILE + warp_row + n * 16 + lane / 16 * 8 + lane % 8;
            load_matrix_x4(b[n], stage + place(row, k / 8 + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES; i++) {
            int m = i / N_TILES, n = i % N_TILES;
            mma_16x8x16(sums[m][n], a[m], b[n / 2] + n % 2 * 2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ARCH >= 800 ? 2 : 1) tile_gemm(
    const element_t* __restrict__ x,           // (T, K)
    const float* __restrict__ inverse_scales,  // (T,)
    const element_t* __restrict__ weight,      // (N, K) or (2 * N, K)
    const element_t* __restrict__ bias,        // (N,)
    const float* __restrict__ residual,        // (T, N)
    float* __restrict__ y,                     // (T, N)
    int T, int N, int K) {
    extern __shared__ __align__(16) element_t stages[];  // (STAGES, 2 * TILE, K_TILE)

    // 1 locate
    int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, group = lane / 4, member = lane % 4;
    int warp_token = warp / 4 * WARP_TOKENS, warp_row = warp % 4 * WARP_ROWS, tiles = CEIL_DIV(K, K_TILE);

    // 2 ask for the first K tiles
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) {
        copy_stage(stages + tile * STAGE_ELEMENTS, x, weight, tile * K_TILE, T, N, K);
        copy_async_commit();
    }

    // 3 multiply one K tile while the next ones arrive
    float sums[M_TILES][N_TILES][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // this tile is here for everyone, and nobody reads the stage that is filled next
        int ahead = tile + STAGES - 1;
        copy_stage(stages + ahead % STAGES * STAGE_ELEMENTS, x, weight, ahead * K_TILE, T, N, K);
        copy_async_commit();
        multiply(sums, stages + tile % STAGES * STAGE_ELEMENTS, warp_token, warp_row);
    }

    // 4 finish and store: four lanes write eight neighbours
#pragma unroll
    for (int i = 0; i < M_TILES * (N_TILES / (1 + GATE_UP)) * 4; i++) {
        int m = i / 4 % M_TILES, tile = i / 4 / M_TILES * (1 + GATE_UP);
        int t = blockIdx.x * TILE + warp_token + m * 16 + i % 4 / 2 * 8 + group;
        int n = blockIdx.y * OUTPUTS + output_of(warp_row + tile * 8 + member * 2 + i % 2);
        if (t >= T || n >= N) continue;
        float value = sums[m][tile][i % 4] * inverse_scales[t];
        if (GATE_UP) value = silu(value) * (sums[m][tile + GATE_UP][i % 4] * inverse_scales[t]);
        if (bias) value += to_float(bias[n]);
        if (residual) value += residual[(long long)t * N + n];
        y[(long long)t * N + n] = value;  // y[t, n]
    }
}
