// What every kernel may use: the type of the weights, 16-byte loads, sums over a warp and a block, SiLU, and the
// tensor-core and copy instructions behind plain functions. The loader puts this text in front of each kernel's own.
//
// Constant ELEMENT_BF16 picks the type of weights, biases, KV cache and tensor-core operands:
//   0   fp16, float16 in Python
//   1   bf16, uint16 in Python (its bits)
//
// The instructions differ between GPU generations. The functions at the end hide that, so that a kernel is one text:
//                        sm_70            sm_75                           sm_80 and later
//   mma_16x8x16          FMA, shuffles    two m16n8k8 (bf16: as sm_70)    one m16n8k16
//   load_matrix_x4       plain loads      ldmatrix                        ldmatrix
//   copy_async_16        plain copy       plain copy                      cp.async
// On the CPU (CUDA_ON_CPU) the emulator stands in for them, and -DEMULATED_ARCH=700 or 750 takes an older column.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ELEMENT_BF16
#define ELEMENT_BF16 0
#endif
static_assert(ELEMENT_BF16 == 0 || ELEMENT_BF16 == 1, "ELEMENT_BF16 is 0 (fp16) or 1 (bf16)");

#if defined(CUDA_ON_CPU) && defined(EMULATED_ARCH)
#define ARCH EMULATED_ARCH
#elif defined(CUDA_ON_CPU) || !defined(__CUDA_ARCH__)
#define ARCH 800
#else
#define ARCH __CUDA_ARCH__
#endif

#if ELEMENT_BF16
typedef __nv_bfloat16 element_t;
#else
typedef __half element_t;
#endif

typedef unsigned int u32;  // also: a pair of elements, the lower index in the lower half

#define WARP_SIZE 32
#define FULL_MASK 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

// ---- Elements -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(element_t x) {
#if ELEMENT_BF16
    return __bfloat162float(x);
#else
    return __half2float(x);
#endif
}

__device__ __forceinline__ element_t to_element(float x) {  // rounds to nearest even
#if ELEMENT_BF16
    return __float2bfloat16_rn(x);
#else
    return __float2half_rn(x);
#endif
}

// The two elements of a pair as floats.
__device__ __forceinline__ float2 unpack_pair(u32 pair) {
#if ELEMENT_BF16
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#else
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}

// Two floats rounded to a pair of elements.
__device__ __forceinline__ u32 pack_pair(float low, float high) {
#if ELEMENT_BF16
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    return *reinterpret_cast<const u32*>(&pair);
}

// What is left of two floats after their rounding to a pair of elements, as a pair: the sum of both pairs has about twice
// the digits of one.
__device__ __forceinline__ u32 remainder_pair(u32 pair, float low, float high) {
    float2 rounded = unpack_pair(pair);
    return pack_pair(low - rounded.x, high - rounded.y);
}

// 16 bytes, eight elements, by one instruction and through the read-only path. p must be a multiple of 16 bytes.
__device__ __forceinline__ uint4 load_8_elements(const element_t* p) {
    return __ldg(reinterpret_cast<const uint4*>(p));
}

struct EightFloats {
    float4 first, second;
};

// Eight elements as floats.
__device__ __forceinline__ EightFloats unpack_8(uint4 elements) {
    float2 a = unpack_pair(elements.x), b = unpack_pair(elements.y);
    float2 c = unpack_pair(elements.z), d = unpack_pair(elements.w);
    return {make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
}

// sum + the product of eight elements with eight floats, in the order of the elements.
__device__ __forceinline__ float dot_8(uint4 elements, float4 first, float4 second, float sum) {
    float2 pair = unpack_pair(elements.x);
    sum = fmaf(pair.x, first.x, sum);
    sum = fmaf(pair.y, first.y, sum);
    pair = unpack_pair(elements.y);
    sum = fmaf(pair.x, first.z, sum);
    sum = fmaf(pair.y, first.w, sum);
    pair = unpack_pair(elements.z);
    sum = fmaf(pair.x, second.x, sum);
    sum = fmaf(pair.y, second.y, sum);
    pair = unpack_pair(elements.w);
    sum = fmaf(pair.x, second.z, sum);
    return fmaf(pair.y, second.w, sum);
}

__device__ __forceinline__ float4 product(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ float sum_of_products(float4 a, float4 b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

__device__ __forceinline__ float4 product(float4 a, float scale) {
    return make_float4(a.x * scale, a.y * scale, a.z * scale, a.w * scale);
}

__device__ __forceinline__ float largest_magnitude(float4 a) {  // NaN is passed over
    return fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
}

// Eight floats rounded to elements: 16 bytes.
__device__ __forceinline__ uint4 pack_8(float4 a, float4 b) {
    return make_uint4(pack_pair(a.x, a.y), pack_pair(a.z, a.w), pack_pair(b.x, b.y), pack_pair(b.z, b.w));
}

// Four neighbours x[first] .. x[first + 3] of an array of `size` floats; -infinity stands for what lies past its end. By
// one 16-byte load where the array allows it, through the read-only path unless the kernel CHANGES the array. `first`
// must be a multiple of 4.
template <bool CHANGES = false>
__device__ __forceinline__ float4 load_4_floats(const float* x, int first, int size) {
    if (first + 4 <= size && reinterpret_cast<unsigned long long>(x) % 16 == 0) {
        const float4* x4 = reinterpret_cast<const float4*>(x + first);
        return CHANGES ? *x4 : __ldg(x4);
    }
    return make_float4(first < size ? x[first] : NEGATIVE_INFINITY, first + 1 < size ? x[first + 1] : NEGATIVE_INFINITY,
                       first + 2 < size ? x[first + 2] : NEGATIVE_INFINITY,
                       first + 3 < size ? x[first + 3] : NEGATIVE_INFINITY);
}

// An integer that orders as the float does (not for NaN); never 0, and the same for -0 and 0.
__device__ __forceinline__ u32 ordered_bits(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float silu(float x) {  // x / (1 + exp(-x)); a very negative x gives -0
    return __fdividef(x, 1.0f + __expf(-x));
}

// ---- A power of two that keeps fp16 from overflowing ----------------------------------------------------------------

// The power of two s for which largest * s lies in [2^14, 2^15), so that values up to `largest`, times s, round to
// finite fp16 with full precision. Its inverse is a power of two as well. bf16 has fp32's range: s is 1. A largest of
// 0, or one that is not finite, gives 1, so that NaN and infinity stay what they are.
__device__ __forceinline__ float scale_for_elements(float largest) {
#if ELEMENT_BF16
    return 1.0f;
#else
    int exponent = int((__float_as_uint(largest) >> 23) & 0xffu);  // biased by 127
    if (exponent < 20 || exponent == 255) return 1.0f;             // below 2^-107: too small to matter
    return __uint_as_float(u32(127 + 14 + 127 - exponent) << 23);
#endif
}

// ---- Sums in a fixed order ------------------------------------------------------------------------------------------

// The sum over every LANES neighbours (a power of two; all 32 unless said), in each of them. All 32 lanes must call it.
template <int LANES = WARP_SIZE>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_MASK, x, distance);
    return x;
}

// The largest value over every LANES neighbours, in each of them. All 32 lanes must call it.
template <int LANES = WARP_SIZE>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, distance));
    }
    return x;
}

// The sum over a block of WARPS warps, in every thread. `scratch` is WARPS floats of shared memory that nothing else
// uses; all threads must call it, and a second call needs a __syncthreads() or another scratch.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += scratch[warp];
    return sum;
}

// `combine` over the values of all threads of a block of WARPS warps, in every thread, in a fixed order. `scratch` is
// WARPS values of shared memory, free again on return; all threads must call it.
template <int WARPS, class T, class Combine>
__device__ __forceinline__ T block_reduce(T x, T* scratch, Combine combine) {
#pragma unroll
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
        x = combine(x, __shfl_xor_sync(FULL_MASK, x, distance));
    }
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) x = combine(x, scratch[warp]);
    __syncthreads();
    return x;
}

// ---- A softmax over scores that come a few at a time ----------------------------------------------------------------

// Turn the next N scores of this lane into weights 2^(score - largest). The row of scores is spread over 4 neighbouring
// lanes. `largest` is the row's largest score so far (at first NEGATIVE_INFINITY), `sum` the sum of this lane's weights
// so far (at first 0); both are brought up to date. Returns what the results of earlier weights must be multiplied with.
// All 32 lanes must call it. Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
template <int N>
__device__ __forceinline__ float softmax_step(float scores[N], float& largest, float& sum) {
    float before = largest;
#pragma unroll
    for (int i = 0; i < N; i++) largest = fmaxf(largest, scores[i]);
    largest = warp_max<4>(largest);
    float base = largest == NEGATIVE_INFINITY ? 0.0f : largest;  // while no key of the row has been visible
    float shrink = exp2f(before - base);
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < N; i++) {
        scores[i] = exp2f(scores[i] - base);
        sum += scores[i];
    }
    return shrink;
}

// A part of a softmax-weighted sum, over some of the keys, is a row of floats: N weighted sums, then the largest score and
// the sum of the weights. This adds four columns of `count` parts up that lie `stride` floats apart, in their order, after
// bringing them to the same largest score.
template <int N>
__device__ __forceinline__ float4 add_softmax_parts(const float* part, int count, int stride, int column,
                                                    float& largest, float& sum) {
    largest = part[N];
    for (int i = 1; i < count; i++) largest = fmaxf(largest, part[i * stride + N]);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; i++, part += stride) {
        float weight = exp2f(part[N] - largest);
        float4 x = product(*reinterpret_cast<const float4*>(part + column), weight);
        total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
        sum += part[N + 1] * weight;
    }
    return total;
}

// ---- Tensor cores ---------------------------------------------------------------------------------------------------
//
// d (16, 8) += a (16, 16) * b (16, 8), spread over a warp. With group = lane / 4 and member = lane % 4:
//   a[0], a[1]   rows group and group + 8, columns 2 * member and + 1        a[2], a[3]   the same, columns + 8
//   b[0], b[1]   rows 2 * member and + 1 of column group                     b[1]         rows + 8
//   d[0], d[1]   row group, columns 2 * member and + 1                       d[2], d[3]   row group + 8
// a is row-major and b column-major: in both, a register holds two neighbours along the inner dimension.
// Source: PTX ISA, "Matrix fragments for mma.m16n8k16".

// The same product from shuffles and fused multiply-adds, for GPUs whose tensor cores do not know it.
__device__ __forceinline__ void fma_16x8x16(float d[4], const u32 a[4], const u32 b[2]) {
    int group = threadIdx.x % WARP_SIZE / 4, member = threadIdx.x % 4;
#pragma unroll 1
    for (int owner = 0; owner < 4; owner++) {  // the member that holds columns 2 * owner and + 1, and those + 8
#pragma unroll
        for (int high = 0; high < 2; high++) {
            float2 row = unpack_pair(__shfl_sync(FULL_MASK, a[2 * high], group * 4 + owner));
            float2 row_8 = unpack_pair(__shfl_sync(FULL_MASK, a[2 * high + 1], group * 4 + owner));
            float2 column = unpack_pair(__shfl_sync(FULL_MASK, b[high], 2 * member * 4 + owner));
            float2 column_1 = unpack_pair(__shfl_sync(FULL_MASK, b[high], (2 * member + 1) * 4 + owner));
            d[0] = fmaf(row.y, column.y, fmaf(row.x, column.x, d[0]));
            d[1] = fmaf(row.y, column_1.y, fmaf(row.x, column_1.x, d[1]));
            d[2] = fmaf(row_8.y, column.y, fmaf(row_8.x, column.x, d[2]));
            d[3] = fmaf(row_8.y, column_1.y, fmaf(row_8.x, column_1.x, d[3]));
        }
    }
}

__device__ __forceinline__ void mma_16x8x16(float d[4], const u32 a[4], const u32 b[2]) {
#if ARCH < 750 || (ARCH < 800 && ELEMENT_BF16)
    fma_16x8x16(d, a, b);
#elif defined(CUDA_ON_CPU) && ARCH >= 800 && ELEMENT_BF16
    emulated_mma_m16n8k16_bf16(d, a, b, d);
#elif defined(CUDA_ON_CPU) && ARCH >= 800
    emulated_mma_m16n8k16_f16(d, a, b, d);
#elif defined(CUDA_ON_CPU)
    emulated_mma_m16n8k8_f16(d, a, b, d);
    emulated_mma_m16n8k8_f16(d, a + 2, b + 1, d);
#elif ARCH >= 800 && ELEMENT_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif ARCH >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}

// The address that PTX wants for shared memory.
#ifndef CUDA_ON_CPU
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
#endif

// Four 8x8 matrices of elements from shared memory. Lane l gives the address of row l % 8 of matrix l / 8, 16 aligned
// bytes; r[m] is then row lane / 4, columns 2 * (lane % 4) and + 1 of matrix m: what mma_16x8x16 takes.
// Source: PTX ISA, "ldmatrix".
__device__ __forceinline__ void load_matrix_x4(u32 r[4], const void* row) {
#if ARCH < 750
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned long long address = __shfl_sync(FULL_MASK, (unsigned long long)row, matrix * 8 + lane / 4);
        r[matrix] = reinterpret_cast<const u32*>(address)[lane % 4];
    }
#elif defined(CUDA_ON_CPU)
    emulated_ldmatrix_x4(r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
#endif
}

// The same, each matrix transposed: r[m] is column lane / 4, rows 2 * (lane % 4) and + 1.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 r[4], const void* row) {
#if ARCH < 750
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int matrix = 0; matrix < 4; matrix++) {
        int first_row = matrix * 8 + 2 * (lane % 4);
        unsigned long long upper = __shfl_sync(FULL_MASK, (unsigned long long)row, first_row);
        unsigned long long lower = __shfl_sync(FULL_MASK, (unsigned long long)row, first_row + 1);
        u32 low = reinterpret_cast<const unsigned short*>(upper)[lane / 4];
        u32 high = reinterpret_cast<const unsigned short*>(lower)[lane / 4];
        r[matrix] = low | high << 16;
    }
#elif defined(CUDA_ON_CPU)
    emulated_ldmatrix_x4_trans(r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
#endif
}

// ---- Copies from global to shared memory that run while the kernel computes -----------------------------------------

// Copy 16 aligned bytes, or write 16 zero bytes where `valid` is false (the source is then not read). The copy has
// arrived after copy_async_commit() and copy_async_wait(), and is visible to the block after a __syncthreads().
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
#if ARCH < 800
    *reinterpret_cast<uint4*>(shared) =
        valid ? __ldg(reinterpret_cast<const uint4*>(global)) : make_uint4(0u, 0u, 0u, 0u);
#elif defined(CUDA_ON_CPU)
    emulated_cp_async_16_zfill(shared, global, valid ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
#endif
}

// Close a group of copies.
__device__ __forceinline__ void copy_async_commit() {
#if ARCH < 800
#elif defined(CUDA_ON_CPU)
    emulated_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `GROUPS_LEFT` of this thread's newest groups are still under way.
template <int GROUPS_LEFT>
__device__ __forceinline__ void copy_async_wait() {
#if ARCH < 800
#elif defined(CUDA_ON_CPU)
    emulated_cp_async_wait(GROUPS_LEFT);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS_LEFT) : "memory");
#endif
}
