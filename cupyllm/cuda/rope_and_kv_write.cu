// Purpose
//   Between the product that makes q, k and v and the attention: turn queries and keys by their positions, and put
//   keys and values into their slots of the cache. Qwen3 norms every head of q and k first.
// Computes
//   for every head of q and k, with the halves (a, b) of its columns and the table's (cos, sin) of the position:
//   (a, b) -> (a * cos - b * sin, b * cos + a * sin); with HAS_NORM (a, b) is first normed over D and weighted
//   q[t, h] = rotated;  keys[slots[t], kh] = rotated;  values[slots[t], kh] = v as it is
//   Twin: ReferenceOps.rope_and_kv_write
// Arrays
//   qkv          (T, (H + 2 * KH) * D)   float32        read      heads of q, then k, then v
//   rope_table   (positions, D)          float32        read      D / 2 cosines, then D / 2 sines
//   positions    (T,)                    int32          read
//   slots        (T,)                    int32          read      page * page_size + offset; -1: nothing is cached
//   q_norm       (D,)                    float32        read      with HAS_NORM
//   k_norm       (D,)                    float32        read      with HAS_NORM
//   q            (T, H, D)               float32        written
//   keys         (P, page_size, KH, D)   fp16 or bf16   written
//   values       (P, page_size, KH, D)   fp16 or bf16   written
// Constants
//   ELEMENT_BF16   0 or 1: the type of the cache
//   HEAD_SIZE      64 or 128: D
//   HAS_NORM       0 or 1
// Launch
//   grid (T, ceil((H + 2 * KH) * D / 8 / 128)), block 128, no shared memory
//   block owns some heads of one token; warp owns 256 / D neighbouring heads; lane owns four columns of a head's first
//   half and the four that turn with them in the second half.
//       lane              0         1        2     ...     7          8
//       D = 64   head 0: 0 .. 3   4 .. 7   8 .. 11       28 .. 31    head 1: 0 .. 3
//                       32 .. 35 36 .. 39 40 .. 43       60 .. 63           32 .. 35
// Bytes
//   qkv 4 * T * (H + 2 * KH) * D, rope_table 4 * T * D, positions and slots 4 * T each, q 4 * T * H * D, keys and
//   values 2 * T * KH * D each, the norms 4 * D each
//   Example: least_bytes(T=64, H=28, KH=4, D=128) totals 2,261,504 bytes: 0.47 us at the 4.8 TB/s of an H200
// Numerics
//   float32 until the cache. In an fp16 cache a finite key or value beyond 65504 becomes 65504 (with its sign): as
//   infinity it would turn every later answer into NaN. Infinity and NaN stay what they are, so that a broken
//   activation is not hidden. bf16 has float32's range.
// Preconditions
//   arrays contiguous; 0 <= positions < rows of rope_table; slots below P * page_size, each at most once
// Why this way
//   A column and its partner half a head away sit in one lane, so that the rotation needs no exchange; a head is a
//   power of two of lanes, so that its norm is a few shuffles. v takes the same path, unrotated: one launch for all.
// Source
//   Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.4; halves are paired,
//   as in GPT-NeoX and Hugging Face's Qwen2

static_assert(HEAD_SIZE == 64 || HEAD_SIZE == 128, "HEAD_SIZE is 64 or 128");
static_assert(HAS_NORM == 0 || HAS_NORM == 1, "HAS_NORM is 0 or 1");

#define D HEAD_SIZE
#define HALF (D / 2)
#define HEAD_LANES (D / 8)

// A finite number beyond the range of fp16 becomes the largest of its sign.
__device__ __forceinline__ float saturate(float x) {
#if !ELEMENT_BF16
    if (fabsf(x) > 65504.0f && fabsf(x) < -NEGATIVE_INFINITY) return copysignf(65504.0f, x);
#endif
    return x;
}

__device__ __forceinline__ void store_elements(element_t* to, float4 x) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_pair(saturate(x.x), saturate(x.y)), pack_pair(saturate(x.z), saturate(x.w)));
}

// a * b + c * d, each column on its own.
__device__ __forceinline__ float4 sum_of_two(float4 a, float4 b, float4 c, float4 d) {
    return make_float4(a.x * b.x + c.x * d.x, a.y * b.y + c.y * d.y, a.z * b.z + c.z * d.z, a.w * b.w + c.w * d.w);
}

extern "C" __global__ void __launch_bounds__(128) rope_and_kv_write(
    const float* __restrict__ qkv,         // (T, (H + 2 * KH) * D)
    const float* __restrict__ rope_table,  // (positions, D)
    const int* __restrict__ positions,     // (T,)
    const int* __restrict__ slots,         // (T,)
    const float* __restrict__ q_norm,      // (D,)
    const float* __restrict__ k_norm,      // (D,)
    float* __restrict__ q,                 // (T, H, D)
    element_t* __restrict__ keys,          // (P, page_size, KH, D)
    element_t* __restrict__ values,        // (P, page_size, KH, D)
    int H, int KH, float q_eps, float k_eps) {
    // 1 locate
    long long t = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    int num_heads = H + 2 * KH, head = i / HEAD_LANES, c = i % HEAD_LANES * 4;
    bool is_q = head < H, is_v = head >= H + KH;
    bool exists = head < num_heads;  // threads past the last head stay for their warp's shuffles

    // 2 load
    float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f), second = first;
    if (exists) {
        const float* from = qkv + (t * num_heads + head) * D + c;  // qkv[t, head * D + c]
        first = *reinterpret_cast<const float4*>(from);
        second = *reinterpret_cast<const float4*>(from + HALF);
    }

    // 3 norm
    if (HAS_NORM) {
        float squares = warp_sum<HEAD_LANES>(sum_of_products(first, first) + sum_of_products(second, second));
        if (!is_v) {
            float inverse_rms = rsqrtf(squares / D + (is_q ? q_eps : k_eps));
            const float* weight = (is_q ? q_norm : k_norm) + c;
            first = product(product(first, inverse_rms), *reinterpret_cast<const float4*>(weight));
            second = product(product(second, inverse_rms), *reinterpret_cast<const float4*>(weight + HALF));
        }
    }
    if (!exists) return;

    // 4 rotate
    if (!is_v) {
        const float* row = rope_table + (long long)positions[t] * D + c;
        float4 cosine = __ldg(reinterpret_cast<const float4*>(row));
        float4 sine = __ldg(reinterpret_cast<const float4*>(row + HALF));
        float4 unrotated = first;
        first = sum_of_two(first, cosine, product(second, -1.0f), sine);
        second = sum_of_two(second, cosine, unrotated, sine);
    }

    // 5 store
    if (is_q) {
        float* to = q + (t * H + head) * D + c;  // q[t, head, c]
        *reinterpret_cast<float4*>(to) = first;
        *reinterpret_cast<float4*>(to + HALF) = second;
        return;
    }
    long long slot = slots[t];
    if (slot < 0) return;
    element_t* cache = is_v ? values + (slot * KH + head - H - KH) * D : keys + (slot * KH + head - H) * D;
    store_elements(cache + c, first);
    store_elements(cache + c + HALF, second);
}
