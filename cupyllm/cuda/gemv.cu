// Purpose
//   A linear layer for one row of activations, with everything around it: RMSNorm of the input before, bias, residual
//   or the MLP's SiLU(gate) * up after. A decode step of one sequence is mostly this kernel, four times a layer.
// Computes
//   y[n] = sum over k of normed[k] * weight[n, k], + bias[n], + residual[n]
//   normed = x * norm_weight / sqrt(mean of x^2 + eps), or x itself without a norm
//   with GATE_UP: hidden[n] = silu(gate) * up, gate from row n of weight and up from row N + n
//   Twin: ReferenceOps.linear, and with GATE_UP ReferenceOps.gate_up_silu_mul
// Arrays
//   x             (1, K)              float32        read
//   weight        (N, K)              fp16 or bf16   read      with GATE_UP (2 * N, K)
//   norm_weight   (K,)                float32        read      or null: no norm
//   bias          (N,)                fp16 or bf16   read      or null
//   residual      (1, N)              float32        read      or null
//   y             (1, N)              float32        written
// Constants
//   ELEMENT_BF16   0 or 1
//   GATE_UP        0 or 1
//   ROWS           2 or 4: rows of weight that a warp reads side by side
//   K_WARPS        1, 2, 4 or 8: warps that share a row, each with its own chunks (split-K)
// Launch
//   grid ceil(N / outputs of a block), block 256, no dynamic shared memory
//   block owns 8 / K_WARPS groups of ROWS rows; warp owns every K_WARPS-th run of 32 chunks of its rows; lane owns one
//   chunk of eight k in each run: 16 bytes of every row, 32 bytes of x.
//       lane      0         1         2       ...     31
//       k       0 .. 7    8 .. 15   16 .. 23       248 .. 255      a warp reads 512 bytes of a row at once
// Bytes
//   weight 2 * N * K (twice that with GATE_UP), x 4 * K, norm_weight 4 * K, y 4 * N, and what else is there. Every warp
//   reads x and norm_weight for itself; after the first on a multiprocessor they come from its L1 cache.
//   Example: least_bytes(N=3584, K=18944, residual=1) totals 135,895,040 bytes: 28.3 us at the 4.8 TB/s of an H200
// Numerics
//   fp16 and bf16 weights are widened exactly; products and sums are float32. 1 / rms multiplies the finished sum, so
//   that x is read once. Order of a sum: a lane's chunks, then lanes, then the K_WARPS parts.
// Preconditions
//   arrays contiguous; K a multiple of 8, so that every row starts at a multiple of 16 bytes; N, K at least 1; weight
//   has less than 2^32 elements
// Why this way
//   The weights are the cost: nothing else is worth saving. ROWS rows at once keep several 16-byte loads of each lane
//   under way and use each piece of x several times. x is not staged in shared memory: it fits the L1 cache, and
//   staging would put a barrier before the first product and, at K = 18944, leave room for two blocks.
//   Split-K inside a block is enough: N is at least several hundred in every model.
// Source
//   Williams, Waterman and Patterson, "Roofline", 2009, for counting bytes first

static_assert(GATE_UP == 0 || GATE_UP == 1, "GATE_UP is 0 or 1");
static_assert(ROWS == 2 || ROWS == 4, "ROWS is 2 or 4");
static_assert(K_WARPS == 1 || K_WARPS == 2 || K_WARPS == 4 || K_WARPS == 8, "K_WARPS is 1, 2, 4 or 8");

#define WARPS 8
#define ROWS_PER_OUTPUT (1 + GATE_UP)
#define WARP_OUTPUTS (ROWS / ROWS_PER_OUTPUT)
#define BLOCK_OUTPUTS (WARPS / K_WARPS * WARP_OUTPUTS)

// One lane's chunk of every row.
__device__ __forceinline__ void load_chunk(uint4 weights[ROWS], const element_t* weight, const u32 rows[ROWS],
                                           int chunk) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) weights[r] = load_8_elements(weight + rows[r] + chunk * 8);
}

// sums[r] += row r of weight times x, and with NORM times norm_weight, squares += x * x; a chunk of every row at once,
// while the next chunks are on their way.
template <bool NORM>
__device__ __forceinline__ void multiply(float sums[ROWS], float& squares, const element_t* weight,
                                         const u32 rows[ROWS], const float* x, const float* norm_weight, int chunk,
                                         int chunks) {
    const float4* x4 = reinterpret_cast<const float4*>(x);
    const float4* norm4 = reinterpret_cast<const float4*>(norm_weight);
    const int step = K_WARPS * WARP_SIZE;
    uint4 next[ROWS];
    if (chunk < chunks) load_chunk(next, weight, rows, chunk);
    for (; chunk < chunks; chunk += step) {
        uint4 weights[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) weights[r] = next[r];
        if (chunk + step < chunks) load_chunk(next, weight, rows, chunk + step);
        float4 first = __ldg(x4 + 2 * chunk), second = __ldg(x4 + 2 * chunk + 1);
        if (NORM) {
            squares += sum_of_products(first, first) + sum_of_products(second, second);
            first = product(first, __ldg(norm4 + 2 * chunk));
            second = product(second, __ldg(norm4 + 2 * chunk + 1));
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] = dot_8(weights[r], first, second, sums[r]);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE, ROWS == 4 ? 3 : 4) gemv(
    const float* __restrict__ x,            // (1, K)
    const element_t* __restrict__ weight,   // (N, K) or (2 * N, K)
    const float* __restrict__ norm_weight,  // (K,)
    const element_t* __restrict__ bias,     // (N,)
    const float* __restrict__ residual,     // (1, N)
    float* __restrict__ y,                  // (1, N)
    int N, int K, float eps) {
    __shared__ float partial[WARPS][ROWS + 1];  // each warp's sums, and its sum of squares of x

    // 1 locate
    int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    int block_n = blockIdx.x * BLOCK_OUTPUTS;
    int warp_n = block_n + warp / K_WARPS * WARP_OUTPUTS;  // the warp's first output
    u32 rows[ROWS];  // where weight[n, 0] is; the launch refuses weights of 2^32 elements and more
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int n = min(warp_n + r / ROWS_PER_OUTPUT, N - 1);  // past the end: the last row again, and not stored
        rows[r] = u32(n + r % ROWS_PER_OUTPUT * N) * K;    // weight[n, :], or weight[N + n, :]
    }
    int chunk = warp % K_WARPS * WARP_SIZE + lane;

    // 2 multiply and add
    float sums[ROWS] = {}, squares = 0.0f;
    if (norm_weight) {
        multiply<true>(sums, squares, weight, rows, x, norm_weight, chunk, K / 8);
    } else {
        multiply<false>(sums, squares, weight, rows, x, norm_weight, chunk, K / 8);
    }

    // 3 add up the lanes
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = warp_sum(sums[r]);
        if (lane == 0) partial[warp][r] = sum;
    }
    squares = warp_sum(squares);
    if (lane == 0) partial[warp][ROWS] = squares;
    __syncthreads();

    // 4 add up the warps of a row, finish, store: one thread an output
    int n = block_n + threadIdx.x;
    if (threadIdx.x >= BLOCK_OUTPUTS || n >= N) return;
    int first_warp = threadIdx.x / WARP_OUTPUTS * K_WARPS, r = threadIdx.x % WARP_OUTPUTS * ROWS_PER_OUTPUT;
    float sum = 0.0f, up = 0.0f, scale = 1.0f;
    squares = 0.0f;
#pragma unroll
    for (int part = first_warp; part < first_warp + K_WARPS; part++) {
        sum += partial[part][r];
        if (GATE_UP) up += partial[part][r + 1];
        squares += partial[part][ROWS];
    }
    if (norm_weight) scale = rsqrtf(__fdividef(squares, K) + eps);
    sum *= scale;
    if (GATE_UP) sum = silu(sum) * (up * scale);
    if (bias) sum += to_float(bias[n]);
    if (residual) sum += residual[n];
    y[n] = sum;
}
