// Purpose
//   Attention of a decode step: one query a sequence, over all keys and values in its pages. At long contexts it reads
//   more than the weights do, so it is built to read every key and value once, with many blocks at a time.
// Computes
//   out[s, h] = sum over k of p[k] * values[k, h / G],  p = softmax over k of q[s, h] . keys[k, h / G] / sqrt(D)
//   with G = H / KH, and k over the last `window` of the context_lens[s] tokens of sequence s (window 0: over all)
//   Twin: ReferenceOps.paged_attention
// Arrays
//   q              (S, H, D)               float32        read
//   keys           (P, page_size, KH, D)   fp16 or bf16   read
//   values         (P, page_size, KH, D)   fp16 or bf16   read
//   context_lens   (S,)                    int32          read      0: nothing is read, and out is zero
//   page_tables    (S, max_pages)          int32          read      entries past the context are not looked at
//   parts          (S, H, splits, D + 4)   float32        written   and read by the block that adds the splits up
//   tickets        (S, KH)                 uint32         written   zero before the launch, and zero again after it
//   out            (S, H * D)              float32        written
// Constants
//   ELEMENT_BF16   0 or 1: the type of the cache
//   HEAD_SIZE      64 or 128: D
//   WIDE_GROUP     0: up to 8 query heads share a KV head; 1: up to 16
// Launch
//   grid (splits, KH, S), block 32 * 512 / D, no dynamic shared memory
//   block owns a split of one sequence's context, for one KV head and its G query heads; warp owns every WARPS-th run
//   of 16 keys of the split (a run lies in one page); lane owns, with group = lane / 4 and member = lane % 4:
//       of keys group and 8 + group, columns 8 * member .. + 7, and every 32 further   4 lanes read 64 bytes in a row
//       of values 2 * member, + 1, + 8, + 9, columns 8 * group .. + 7 (and + 64)       8 lanes read 128 bytes in a row
// Bytes
//   keys, values 2 * S * KH * D * context_len each, q, out 4 * S * H * D each, context_lens 4 * S, page_tables 4 a page
//   Example: least_bytes(S=64, H=28, KH=4, D=128, context_len=2048) totals 270,303,488 bytes:
//   56.3 us at the 4.8 TB/s of an H200
// Numerics
//   Scores, softmax and sums are float32. Queries (scaled by a power of two, so that fp16 cannot overflow) and weights
//   p become tensor-core operands, each as a high and a low element with about float32's digits together: rows 0 to 7
//   of a fragment hold the high, rows 8 to 15 the low ones. With WIDE_GROUP there is no room for the low ones, and both
//   are rounded. Order of a sum: a warp's runs, then warps, then splits.
// Preconditions
//   arrays contiguous, page_size a multiple of 16, G at most 8 or 16, the pages of every context in the cache
// Why this way
//   A product may take columns, or keys, in any order that both operands share. So a lane loads 16 bytes as they lie,
//   and they are its part of the tensor-core fragment: nothing passes through shared memory. Tensor cores, because G
//   heads times two products for each element would keep the other units busier than the memory.
//   The last block of a KV head to finish (a ticket counts them) adds the splits up. A kernel of its own for that would
//   be a seventh launch in every layer, about 1 us, to read what is at most 4096 / D parts of each head. The sum does
//   not depend on which block comes last: the parts are added in the order of the splits.
// Source
//   Dao et al., "Flash-Decoding for long-context inference", 2023; CUDA C++ Programming Guide, "Memory fence functions"

static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "HEAD_SIZE is 64 or 128");
static_assert(WIDE_GROUP == 0 || WIDE_GROUP == 1, "WIDE_GROUP is 0 or 1");

#define D HEAD_SIZE
#define RUN 16                 // keys
#define WARPS (512 / D)
#define SETS (1 + WIDE_GROUP)  // query heads of a lane: group, and with WIDE_GROUP group + 8
#define PART (D + 4)           // D sums, the largest score, the sum of weights, and two unused: rows of 16-byte pieces

// Four numbers of a query head into a fragment of A: as elements to the row of their set and, without WIDE_GROUP, what
// the rounding has left of them to the row 8 further down.
__device__ __forceinline__ void put_row(u32 a[4], int set, float4 x) {
    a[set] = pack_pair(x.x, x.y);
    a[set + 2] = pack_pair(x.z, x.w);
    if (!WIDE_GROUP) {
        a[1] = remainder_pair(a[0], x.x, x.y);
        a[3] = remainder_pair(a[2], x.z, x.w);
    }
}

// The sum of both: what a lane has of a row of its set in d, the result of a product, for column c of its two.
__device__ __forceinline__ float get_row(const float d[4], int set, int c) {
    return WIDE_GROUP ? d[2 * set + c] : d[c] + d[c + 2];
}

// A query head into the fragments of the D / 16 products over its columns; returns the inverse of its scale.
__device__ __forceinline__ float load_query(u32 a[D / 16][4], const float* row, bool exists, int set, int member) {
    float4 x[D / 16];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {  // columns 32 * (i / 2) + 8 * member + 4 * (i % 2) and the next three
        const float4* from = reinterpret_cast<const float4*>(row + 32 * (i / 2) + 8 * member + 4 * (i % 2));
        x[i] = exists ? __ldg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        largest = fmaxf(largest, largest_magnitude(x[i]));
    }
    float scale = scale_for_elements(warp_max<4>(largest));
#pragma unroll
    for (int i = 0; i < D / 16; i++) put_row(a[i], set, product(x[i], scale));
    return 1.0f / scale;
}

__device__ __forceinline__ void load_chunk(u32 chunk[4], const element_t* from, bool seen) {
    uint4 bits = seen ? load_8_elements(from) : make_uint4(0u, 0u, 0u, 0u);
    chunk[0] = bits.x, chunk[1] = bits.y, chunk[2] = bits.z, chunk[3] = bits.w;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP_SIZE) paged_attention_decode(
    const float* __restrict__ q,           // (S, H, D)
    const element_t* __restrict__ keys,    // (P, page_size, KH, D)
    const element_t* __restrict__ values,  // (P, page_size, KH, D)
    const int* __restrict__ context_lens,  // (S,)
    const int* __restrict__ page_tables,   // (S, max_pages)
    float* parts,                          // (S, H, splits, D + 4)
    u32* tickets,                          // (S, KH)
    float* __restrict__ out,               // (S, H * D)
    int H, int KH, int page_size, int max_pages, int window, float score_scale, int least_split_runs) {
    __shared__ __align__(16) float warp_parts[WARPS][8 * SETS][PART];
    __shared__ bool is_last;

    // 1 locate
    int split = blockIdx.x, splits = gridDim.x, kh = blockIdx.y, s = blockIdx.z, G = H / KH;
    int warp = threadIdx.x / WARP_SIZE, group = threadIdx.x % WARP_SIZE / 4, member = threadIdx.x % 4;
    int context_len = context_lens[s], first_key = window > 0 ? max(context_len - window, 0) : 0;
    int first_run = first_key / RUN, runs = CEIL_DIV(context_len, RUN) - first_run;
    int split_runs = CEIL_DIV(max(CEIL_DIV(runs, splits), least_split_runs), WARPS) * WARPS;
    int used_splits = max(CEIL_DIV(runs, split_runs), 1);
    if (split >= used_splits) return;  // a short context is shared by fewer blocks
    long long first_head = (long long)s * H + kh * G;
    auto seen = [=](int key) { return key >= first_key && key < context_len; };

    // 2 load the queries
    u32 a[D / 16][4];
    float factor[SETS], largest[SETS], sum[SETS] = {};
    for (int set = 0; set < SETS; set++) {
        int head = group + 8 * set;
        const float* row = q + (first_head + min(head, G - 1)) * D;  // q[s, kh * G + head, :]
        factor[set] = score_scale * load_query(a, row, head < G, set, member);
        largest[set] = NEGATIVE_INFINITY;
    }

    // 3 attend to the warp's runs: load 16 keys and values, score the keys, weigh them, add the values
    float o[D / 8][4] = {};  // o[8 * i + e]: columns 64 * i + 16 * member + e and + 8
    int end_run = first_run + min(runs, (split + 1) * split_runs);
    for (int run = first_run + split * split_runs + warp; run < end_run; run += WARPS) {
        int key = run * RUN;
        long long page = page_tables[(long long)s * max_pages + key / page_size];
        long long at = ((page * page_size + key % page_size) * KH + kh) * D;  // [page, key % page_size, kh, 0]
        u32 k[D / 16][4], v[D / 16][4];  // chunks: k[2 * j + i] of key i, v[4 * j + i] of value i
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            int k_key = 8 * (i % 2) + group, v_key = 8 * (i / 2 % 2) + 2 * member + i % 2;
            load_chunk(k[i], keys + at + k_key * KH * D + 32 * (i / 2) + 8 * member, seen(key + k_key));
            load_chunk(v[i], values + at + v_key * KH * D + 64 * (i / 4) + 8 * group, seen(key + v_key));
        }

        float score[2][4] = {};  // score[i]: of keys 8 * i + 2 * member and + 1
#pragma unroll
        for (int i = 0; i < D / 16; i++) {  // a chunk holds the columns of two products
            mma_16x8x16(score[0], a[i], k[i / 2 * 2] + i % 2 * 2);
            mma_16x8x16(score[1], a[i], k[i / 2 * 2 + 1] + i % 2 * 2);
        }

        u32 p[4];
        float shrink[SETS];
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float x[4];
            for (int i = 0; i < 4; i++) {
                bool is_seen = seen(key + 8 * (i / 2) + 2 * member + i % 2);
                x[i] = is_seen ? get_row(score[i / 2], set, i % 2) * factor[set] : NEGATIVE_INFINITY;
            }
            shrink[set] = softmax_step<4>(x, largest[set], sum[set]);
            put_row(p, set, make_float4(x[0], x[1], x[2], x[3]));
        }

#pragma unroll
        for (int i = 0; i < D / 8; i++) {  // element i % 8 of each chunk: two keys' halves of a word make a pair
            for (int c = 0; c < 4; c++) o[i][c] *= shrink[c / 2 * WIDE_GROUP];
            int j = i / 8 * 4, word = i % 8 / 2, halves = i % 2 ? 0x7632 : 0x5410;
            u32 b[2];
            for (int c = 0; c < 2; c++) b[c] = __byte_perm(v[j + 2 * c][word], v[j + 2 * c + 1][word], halves);
            mma_16x8x16(o[i], p, b);
        }
    }

    // 4 put the warps' parts side by side
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        float* part = warp_parts[warp][group + 8 * set];
        sum[set] = warp_sum<4>(sum[set]);
        if (member == 0) part[D] = largest[set], part[D + 1] = sum[set];
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            float* columns = part + i / 8 * 64 + 16 * member + i % 8;
            columns[0] = get_row(o[i], set, 0);
            columns[8] = get_row(o[i], set, 1);
        }
    }
    __syncthreads();

    // 5 with several splits, leave their parts to the last block that comes here
    float best, weights;
    if (used_splits > 1) {
        for (int i = threadIdx.x; i < G * D / 4; i += blockDim.x) {
            int head = i / (D / 4), c = i % (D / 4) * 4;
            float* part = parts + ((first_head + head) * splits + split) * PART;  // parts[s, kh * G + head, split, :]
            *reinterpret_cast<float4*>(part + c) =
                add_softmax_parts<D>(warp_parts[0][head], WARPS, 8 * SETS * PART, c, best, weights);
            if (c == 0) part[D] = best, part[D + 1] = weights;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicInc(tickets + s * KH + kh, used_splits - 1) == used_splits - 1;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
    }

    // 6 add the parts up
    for (int i = threadIdx.x; i < G * D / 4; i += blockDim.x) {
        int head = i / (D / 4), c = i % (D / 4) * 4;
        const float* part = used_splits > 1 ? parts + (first_head + head) * splits * PART : warp_parts[0][head];
        int count = used_splits > 1 ? used_splits : WARPS, stride = used_splits > 1 ? PART : 8 * SETS * PART;
        float4 x = add_softmax_parts<D>(part, count, stride, c, best, weights);
        x = context_len > 0 ? product(x, 1.0f / weights) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *reinterpret_cast<float4*>(out + (first_head + head) * D + c) = x;  // out[s, (kh * G + head) * D + c]
    }
}
