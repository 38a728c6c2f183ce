// Purpose
//   Attention of prompt chunks: several queries a sequence, the last tokens of its context, over its pages. A chunk may
//   follow tokens that are cached already, and every sequence's chunk has a length of its own.
// Computes
//   out[t, h] = sum over k of p[k] * values[k, h / G],  p = softmax over k of q[t, h] . keys[k, h / G] / sqrt(D)
//   with G = H / KH, and k from 0 to the query's own position: context_lens[s] - N + n for the n-th of the N queries of
//   sequence s, which are the rows query_starts[s] + n; with a window only the last `window` of those (0: all)
//   Twin: ReferenceOps.paged_attention
// Arrays
//   q              (T, H, D)               float32        read
//   keys           (P, page_size, KH, D)   fp16 or bf16   read
//   values         (P, page_size, KH, D)   fp16 or bf16   read
//   query_starts   (S + 1,)                int32          read      rows of q and out; others are not touched
//   context_lens   (S,)                    int32          read      this step's tokens included
//   page_tables    (S, max_pages)          int32          read      entries past the context are not looked at
//   out            (T, H * D)              float32        written
// Constants
//   ELEMENT_BF16   0 or 1: the type of the cache
//   HEAD_SIZE      64 or 128: D
// Launch
//   grid (ceil(most queries of a sequence * G / 64), KH, S), block 128, no dynamic shared memory
//   block owns 64 rows of one KV head and sequence: row r is query r / G, head r % G of the group, so that all heads of
//   a group share the staged keys; warp owns 16 of the rows; lane owns its fragment of their scores and results.
//       stage 0   4096 / D keys, as many values      while one stage is multiplied, the other is being filled
//       stage 1   4096 / D keys, as many values      a key is a row of D / 8 chunks; chunk c lies at c ^ key % 8
// Bytes
//   q, out 4 * S * N * H * D each, keys, values 2 * S * KH * D * context_len each, query_starts 4 * (S + 1),
//   context_lens 4 * S, page_tables 4 a page. Every 64 rows read the keys again, mostly from the L2 cache.
//   Example: least_bytes(S=1, H=28, KH=4, D=128, query_len=2048, context_len=2048) totals 62,915,084 bytes:
//   13.1 us at the 4.8 TB/s of an H200
// Numerics
//   Scores, softmax and sums are float32; queries (scaled by a power of two, so that fp16 cannot overflow) and weights
//   are rounded to elements for the tensor cores. Order of a sum: keys from first to last.
// Preconditions
//   arrays contiguous, H a multiple of KH, 1 <= N <= context_lens[s], the pages of every context in the cache
// Why this way
//   Scores never leave the registers: what the first product leaves in a lane is what the second wants from it. The
//   exclusive or spreads the chunks that one load_matrix_x4 reads over all banks. Tiles whose keys no row of the block
//   may see are not loaded: half of the work of a causal prompt. The last rows, which see most, start first.
// Source
//   Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning", 2023

static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "HEAD_SIZE is 64 or 128");

#define D HEAD_SIZE
#define CHUNKS (D / 8)     // of a key
#define WARPS 4
#define ROWS (WARPS * 16)
#define TILE (4096 / D)    // keys

// Where a chunk of a key lies in a stage, counted in chunks.
__device__ __forceinline__ int place(int key, int chunk) { return key * CHUNKS + (chunk ^ key % 8); }

// A row of q into this lane's fragments of the D / 16 products over its columns; returns the inverse of its scale.
__device__ __forceinline__ float load_query(u32 a[D / 16][4], const float* row, bool exists, int set, int member) {
    float2 x[D / 8];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        x[i] = exists ? *reinterpret_cast<const float2*>(row + 8 * i + 2 * member) : make_float2(0.0f, 0.0f);
        largest = fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
    }
    float scale = scale_for_elements(warp_max<4>(largest));
#pragma unroll
    for (int i = 0; i < D / 8; i++) a[i / 2][set + i % 2 * 2] = pack_pair(x[i].x * scale, x[i].y * scale);
    return 1.0f / scale;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) paged_attention_prefill(
    const float* __restrict__ q,           // (T, H, D)
    const element_t* __restrict__ keys,    // (P, page_size, KH, D)
    const element_t* __restrict__ values,  // (P, page_size, KH, D)
    const int* __restrict__ query_starts,  // (S + 1,)
    const int* __restrict__ context_lens,  // (S,)
    const int* __restrict__ page_tables,   // (S, max_pages)
    float* __restrict__ out,               // (T, H * D)
    int H, int KH, int page_size, int max_pages, int window, float score_scale) {
    __shared__ uint4 stages[2][2][TILE * CHUNKS];  // [stage][0: keys, 1: values]

    // 1 locate
    int kh = blockIdx.y, s = blockIdx.z, G = H / KH, query_start = query_starts[s];
    int query_len = query_starts[s + 1] - query_start, rows = query_len * G;
    int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS, last_row = min(first_row + ROWS, rows) - 1;
    if (first_row >= rows) return;  // the longest chunk decides the grid
    int cached = context_lens[s] - query_len;  // tokens before the chunk: query n is at position cached + n
    int first_key = window > 0 ? max(cached + first_row / G - window + 1, 0) : 0;
    int end_key = cached + last_row / G + 1;
    int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, group = lane / 4, member = lane % 4;
    const int* page_table = page_tables + (long long)s * max_pages;

    // 2 load the queries
    u32 a[D / 16][4];
    float factor[2], largest[2], sum[2] = {};
    int position[2], at[2];  // at: which row of D columns of q and out
    for (int set = 0; set < 2; set++) {
        int row = first_row + warp * 16 + 8 * set + group, known = min(row, last_row);
        at[set] = (query_start + known / G) * H + kh * G + known % G;
        position[set] = cached + known / G;
        factor[set] = score_scale * load_query(a, q + (long long)at[set] * D, row <= last_row, set, member);
        largest[set] = NEGATIVE_INFINITY;
    }

    // 3 a tile of keys and values into a stage: each thread the same chunk of every (128 / CHUNKS)-th key
    auto fill = [&](int stage, int tile) {
        int chunk = threadIdx.x % CHUNKS;
#pragma unroll
        for (int n = threadIdx.x / CHUNKS; n < TILE; n += WARPS * WARP_SIZE / CHUNKS) {
            int key = tile + n;
            bool seen = key >= first_key && key < end_key;
            long long slot = seen ? (long long)page_table[key / page_size] * page_size + key % page_size : 0;
            long long offset = (slot * KH + kh) * D + chunk * 8;
            copy_async_16(&stages[stage][0][place(n, chunk)], keys + offset, seen);
            copy_async_16(&stages[stage][1][place(n, chunk)], values + offset, seen);
        }
        copy_async_commit();
    };

    // 4 attend, a tile at a time
    float o[D / 8][4] = {};
    int first_tile = first_key / TILE * TILE;
    fill(0, first_tile);
    for (int tile = first_tile, stage = 0; tile < end_key; tile += TILE, stage ^= 1) {
        fill(stage ^ 1, tile + TILE);  // past the end: zeros, nothing is read
        copy_async_wait<1>();
        __syncthreads();

        float score[TILE / 8][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
#pragma unroll
            for (int n = 0; n < TILE / 16; n++) {
                u32 b[4];
                load_matrix_x4(b, &stages[stage][0][place(16 * n + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2)]);
                mma_16x8x16(score[2 * n], a[i], b);
                mma_16x8x16(score[2 * n + 1], a[i], b + 2);
            }
        }

        float shrink[2], p[2][TILE / 4];  // the lane's rows group and group + 8
#pragma unroll
        for (int set = 0; set < 2; set++) {
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) {
                int key = tile + i / 2 * 8 + 2 * member + i % 2;
                bool seen = key <= position[set] && (window <= 0 || key > position[set] - window);
                p[set][i] = seen ? score[i / 2][2 * set + i % 2] * factor[set] : NEGATIVE_INFINITY;
            }
            shrink[set] = softmax_step<TILE / 4>(p[set], largest[set], sum[set]);
        }
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            for (int c = 0; c < 4; c++) o[i][c] *= shrink[c / 2];
        }

#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
            u32 weights[4];
            for (int i = 0; i < 4; i++) {
                const float* pair = p[i % 2] + 4 * n + i / 2 * 2;
                weights[i] = pack_pair(pair[0], pair[1]);
            }
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                u32 b[4];
                load_matrix_x4_transposed(b, &stages[stage][1][place(16 * n + lane % 16, 2 * i + lane / 16)]);
                mma_16x8x16(o[2 * i], weights, b);
                mma_16x8x16(o[2 * i + 1], weights, b + 2);
            }
        }
        __syncthreads();  // the stage is filled again in the next round
    }

    // 5 store
    for (int set = 0; set < 2; set++) {
        float inverse = 1.0f / warp_sum<4>(sum[set]);
        if (first_row + warp * 16 + 8 * set + group > last_row) continue;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            float2 x = make_float2(o[i][2 * set] * inverse, o[i][2 * set + 1] * inverse);
            *reinterpret_cast<float2*>(out + (long long)at[set] * D + 8 * i + 2 * member) = x;
        }
    }
}
