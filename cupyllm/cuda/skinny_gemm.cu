// Purpose
//   A linear layer for 2 to 64 rows of activations, with what surrounds it: a decode step of several sequences, for
//   the price of reading the weights once. Same fusions as gemv.
// Computes
//   y[t, n] = sum over k of normed[t, k] * weight[n, k], + bias[n], + residual[t, n]
//   normed = x * norm_weight / sqrt(mean of x[t]^2 + eps), or x itself without a norm
//   with GATE_UP: hidden[t, n] = silu(gate) * up, gate from row n of weight and up from row N + n
//   Twin: ReferenceOps.linear, and with GATE_UP ReferenceOps.gate_up_silu_mul
// Arrays
//   x             (T, K)              float32        read
//   weight        (N, K)              fp16 or bf16   read      with GATE_UP (2 * N, K)
//   norm_weight   (K,)                float32        read      or null: no norm
//   bias          (N,)                fp16 or bf16   read      or null
//   residual      (T, N)              float32        read      or null
//   y             (T, N)              float32        written
//   totals        (splits, blocks, TOKENS, ROWS + 1)   float32   written and read   what each block has summed
//   tickets       (blocks,)           uint32         written and read   zero before and after every launch
// Constants
//   ELEMENT_BF16   0 or 1
//   GATE_UP        0 or 1
//   TOKENS         8, 16, 32 or 64: T rounded up
// Launch
//   grid (ceil(N / outputs of a block), splits), block 256, no dynamic shared memory
//   block owns ROWS = 4 * TOKENS rows of weight and one of `splits` parts of K; warp owns 32 of the rows and 32 k of
//   every K tile; lane owns rows lane / 4 of four groups of eight, and of each run of 32 k the eight its operands need:
//       lane % 4     0         1         2         3
//       k         0 .. 7    8 .. 15   16 .. 23  24 .. 31     16 bytes of weight, and of the staged x
// Bytes
//   weight 2 * N * K (twice that with GATE_UP), x 4 * T * K, y 4 * T * N, and what else is there. The L2 cache gives x
//   again to every block: half the bytes of its weights.
//   Example: least_bytes(T=8, N=3584, K=18944, residual=1) totals 136,626,176 bytes: 28.5 us at the 4.8 TB/s of an H200
// Numerics
//   Tensor cores multiply elements exactly and add in float32. x is rounded once to the weights' type; for fp16 each
//   row is first scaled by a power of two from its largest magnitude so far, and the sums are rescaled when a larger
//   one comes, so that nothing overflows. 1 / rms multiplies the finished sum. The order of a sum is fixed: K tiles,
//   then warps, then splits, whichever block comes last.
// Preconditions
//   arrays contiguous; K a multiple of 8; 1 <= T <= TOKENS; weight has less than 2^32 elements
// Why this way
//   Weights are the 16-row operand and tokens the 8 columns, so 8 tokens cost one instruction, not 2. A sum over k may
//   take the k in any order: a lane's eight neighbours serve as the four pairs of two instructions, so weights go from
//   global memory to registers by 16 bytes, and need neither shared memory nor ldmatrix. Splitting K over blocks fills
//   the GPU without narrower blocks, which would read x more often.
// Source
//   PTX ISA, mma.sync m16n8k16; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (rescaling);
//   CUDA samples, threadFenceReduction (the last block adds up)

static_assert(GATE_UP == 0 || GATE_UP == 1, "GATE_UP is 0 or 1");
static_assert(TOKENS == 8 || TOKENS == 16 || TOKENS == 32 || TOKENS == 64, "TOKENS is 8, 16, 32 or 64");

#define WARPS 8
#define THREADS (WARPS * WARP_SIZE)
#define K_TILE (2048 / TOKENS)                     // k staged at once: eight values of x for each thread
#define K_WARPS (K_TILE / 32)                      // warps that share their rows
#define ROWS (WARPS / K_WARPS * 32)
#define OUTPUTS (ROWS / (1 + GATE_UP))             // of a block
#define DEPTH (TOKENS < 64 ? 2 : 1)                // K tiles whose weights are on their way
#define COLUMNS (TOKENS / 8)
#define STRIDE (K_TILE + (K_TILE > 32 ? 32 : 0))   // of a staged row: neighbours 64 bytes apart among the banks
#define ROW_LANES (K_TILE / 8)                     // lanes that stage one row
#define ROUND (TOKENS < 16 ? TOKENS : 16)          // tokens whose sums are exchanged at once
#define SUM_STRIDE 36                              // of a token's 32 sums: 4 more keep banks apart

// A K tile's weights of one lane, four rows. Beyond K they are zero and nothing is read.
__device__ __forceinline__ void load_weights(uint4 weights[4], const element_t* weight, const u32 rows[4], int k,
                                             int K) {
#pragma unroll
    for (int r = 0; r < 4; r++) weights[r] = k < K ? load_8_elements(weight + rows[r] + k) : make_uint4(0u, 0u, 0u, 0u);
}

// sums += a K tile's weights times the staged x, 8 tokens at a time.
__device__ __forceinline__ void multiply(float sums[2][COLUMNS][4], const uint4 weights[4], const element_t* staged) {
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        uint4 b = *reinterpret_cast<const uint4*>(staged + column * 8 * STRIDE);
        u32 b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            uint4 upper = weights[tile * 2], lower = weights[tile * 2 + 1];
            u32 a_first[4] = {upper.x, lower.x, upper.y, lower.y}, a_second[4] = {upper.z, lower.z, upper.w, lower.w};
            mma_16x8x16(sums[tile][column], a_first, b_first);
            mma_16x8x16(sums[tile][column], a_second, b_second);
        }
    }
}

// The part of a row of x that a thread stages.
struct Staging {
    float4 first, second;  // x[t, k : k + 8]
    float squares;         // sum of the squares of x so far
    float scale;           // what staged values and sums are multiplied by; changes for fp16 only

    __device__ __forceinline__ void fetch(const float* x, int offset, bool exists) {
        const float4* x4 = reinterpret_cast<const float4*>(x + offset);
        first = exists ? __ldg(x4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        second = exists ? __ldg(x4 + 1) : first;
    }

    // Round what was fetched to elements and store it. True when the row's scale changed, by `factor`.
    __device__ __forceinline__ bool store(element_t* staged, float* factor, const float* norm_weight, int k) {
        float4 a = first, b = second;
        if (norm_weight) {
            const float4* norm4 = reinterpret_cast<const float4*>(norm_weight + k);
            squares += sum_of_products(a, a) + sum_of_products(b, b);
            a = product(a, __ldg(norm4));
            b = product(b, __ldg(norm4 + 1));
        }
        float old = scale;
        if (!ELEMENT_BF16) {
            float largest = warp_max<ROW_LANES>(fmaxf(largest_magnitude(a), largest_magnitude(b)));
            // An eighth of what just fits: room for larger ones to come.
            if (largest * scale > 60000.0f) scale = scale_for_elements(largest) * 0.125f;
            if (threadIdx.x % ROW_LANES == 0) *factor = __fdividef(scale, old);
        }
        *reinterpret_cast<uint4*>(staged) = pack_8(product(a, scale), product(b, scale));
        return !ELEMENT_BF16 && scale != old;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) skinny_gemm(
    const float* __restrict__ x,            // (T, K)
    const element_t* __restrict__ weight,   // (N, K) or (2 * N, K)
    const float* __restrict__ norm_weight,  // (K,)
    const element_t* __restrict__ bias,     // (N,)
    const float* __restrict__ residual,     // (T, N)
    float* __restrict__ y,                  // (T, N)
    float* totals,                          // (splits, blocks, TOKENS, ROWS + 1)
    u32* tickets,                           // (blocks,)
    int T, int N, int K, float eps) {
    __shared__ __align__(16) element_t staged[2][TOKENS][STRIDE];
    __shared__ float exchange[WARPS][ROUND][SUM_STRIDE];
    __shared__ float factors[2][TOKENS];  // by which the sums of a token change before a K tile
    __shared__ bool is_last;

    // 1 locate
    int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, group = lane / 4, member = lane % 4;
    int row_warp = warp / K_WARPS, tiles = CEIL_DIV(K, K_TILE);
    int first_tile = tiles * blockIdx.y / gridDim.y, end_tile = tiles * (blockIdx.y + 1) / gridDim.y;
    int weight_k = warp % K_WARPS * 32 + member * 8, x_k = threadIdx.x % ROW_LANES * 8, t = threadIdx.x / ROW_LANES;
    u32 rows[4];  // where weight[n, 0] is
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int n = blockIdx.x * OUTPUTS + row_warp * (GATE_UP ? 16 : 32) + r % 2 * 8 + (GATE_UP ? 0 : r / 2 * 16) + group;
        rows[r] = u32(min(n, N - 1) + (GATE_UP ? r / 2 * N : 0)) * K;  // past the end: the last row again, not stored
    }

    // 2 ask for the first weights, stage the first x
    uint4 weights[DEPTH][4];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        int k = (first_tile + d) * K_TILE + weight_k;
        load_weights(weights[d], weight, rows, k, first_tile + d < end_tile ? K : 0);
    }
    Staging staging;
    staging.squares = 0.0f;
    staging.scale = ELEMENT_BF16 ? 1.0f : 1.2676506e30f;  // 2^100: all but values too small to matter will change it
    int k = first_tile * K_TILE + x_k;
    staging.fetch(x, t * K + k, t < T && k < K);
    bool rescale = __syncthreads_or(staging.store(&staged[0][t][x_k], &factors[0][t], norm_weight, min(k, K - 8)));

    // 3 multiply a K tile while the next x and the next weights are on their way
    float sums[2][COLUMNS][4] = {};
    for (int first = first_tile; first < end_tile; first += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int tile = first + d, now = (tile - first_tile) % 2, next = 1 - now;
            if (tile >= end_tile) break;
            k = (tile + 1) * K_TILE + x_k;
            staging.fetch(x, t * K + k, t < T && k < K && tile + 1 < end_tile);
            if (!ELEMENT_BF16 && rescale) {
#pragma unroll
                for (int i = 0; i < 2 * COLUMNS * 4; i++) {
                    int column = i / 4 % COLUMNS;
                    sums[i / 4 / COLUMNS][column][i % 4] *= factors[now][column * 8 + member * 2 + i % 2];
                }
            }
            multiply(sums, weights[d], &staged[now][group][weight_k]);
            load_weights(weights[d], weight, rows, (tile + DEPTH) * K_TILE + weight_k, tile + DEPTH < end_tile ? K : 0);
            rescale = __syncthreads_or(
                staging.store(&staged[next][t][x_k], &factors[next][t], norm_weight, min(k, K - 8)));
        }
    }

    // 4 each row's sum of squares and the inverse of its scale
    float* block_totals = totals + (long long)(blockIdx.y * gridDim.x + blockIdx.x) * TOKENS * (ROWS + 1);
    float squares = warp_sum<ROW_LANES>(staging.squares);
    if (threadIdx.x % ROW_LANES == 0) {
        block_totals[t * (ROWS + 1) + ROWS] = squares;
        factors[0][t] = 1.0f / staging.scale;
    }

    // 5 add up the warps that share rows, in their order
#pragma unroll
    for (int round = 0; round < TOKENS / ROUND; round++) {
#pragma unroll
        for (int i = 0; i < 2 * ROUND / 8 * 4; i++) {
            int tile = i / 4 / (ROUND / 8), column = i / 4 % (ROUND / 8);
            exchange[warp][column * 8 + member * 2 + i % 2][tile * 16 + i % 4 / 2 * 8 + group] =
                sums[tile][round * (ROUND / 8) + column][i % 4];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ROUND * ROWS; i += THREADS) {
            int token = i / ROWS, row = i % ROWS;
            float total = 0.0f;
#pragma unroll
            for (int part = 0; part < K_WARPS; part++) total += exchange[row / 32 * K_WARPS + part][token][row % 32];
            block_totals[(round * ROUND + token) * (ROWS + 1) + row] = total * factors[0][round * ROUND + token];
        }
        __syncthreads();
    }

    // 6 only the block that comes last for its rows goes on; the ticket counter is then zero again
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(tickets + blockIdx.x, gridDim.y - 1) == gridDim.y - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    // 7 add up the splits in their order, finish, store: neighbours write neighbours
    for (int i = threadIdx.x; i < T * OUTPUTS; i += THREADS) {
        int token = i / OUTPUTS, output = i % OUTPUTS, n = blockIdx.x * OUTPUTS + output;
        if (n >= N) continue;
        int row = GATE_UP ? output / 16 * 32 + output % 16 : output;  // a warp's gate tile, then its up tile
        float sum = 0.0f, up = 0.0f, scale = 1.0f;
        squares = 0.0f;
        for (int split = 0; split < gridDim.y; split++) {
            const float* part = totals + ((long long)(split * gridDim.x + blockIdx.x) * TOKENS + token) * (ROWS + 1);
            sum += __ldcg(part + row);
            if (GATE_UP) up += __ldcg(part + row + 16);
            squares += __ldcg(part + ROWS);
        }
        if (norm_weight) scale = rsqrtf(__fdividef(squares, K) + eps);
        sum *= scale;
        if (GATE_UP) sum = silu(sum) * (up * scale);
        if (bias) sum += to_float(bias[n]);
        if (residual) sum += residual[(long long)token * N + n];
        y[(long long)token * N + n] = sum;  // y[t, n]
    }
}
