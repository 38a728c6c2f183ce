// Arithmetic intrinsics: integers, conversions, and the fast approximate math functions.
//
// The approximate functions (__expf, rsqrtf, __fdividef, ...) are computed with the C library, so they are more exact
// here than on a GPU, where they may be off by a few units in the last place. Results that depend on their last bits
// therefore differ; tests compare with a tolerance.
#pragma once

// The C library already declares some of these names, hence macros.
#define __expf(x)                   expf(x)
#define __exp10f(x)                 exp10f(x)
#define __logf(x)                   logf(x)
#define __log2f(x)                  log2f(x)
#define __log10f(x)                 log10f(x)
#define __powf(x, y)                powf(x, y)
#define __sinf(x)                   sinf(x)
#define __cosf(x)                   cosf(x)
#define __tanf(x)                   tanf(x)
#define __sincosf(x, s, c)          sincosf(x, s, c)
#define __builtin_assume(condition) ((void)0)

EMU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMU_INLINE float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __fdividef(float x, float y) { return x / y; }
EMU_INLINE float fdividef(float x, float y) { return x / y; }
EMU_INLINE float __fdiv_rn(float x, float y) { return x / y; }
EMU_INLINE float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
EMU_INLINE float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN becomes 0, as on a GPU

// These are never fused into a multiply-add; the empty asm keeps the compiler from doing so.
EMU_INLINE float emu_rounded(float x) {
    asm("" : "+m"(x));
    return x;
}
EMU_INLINE float __fadd_rn(float x, float y) { return emu_rounded(x + y); }
EMU_INLINE float __fsub_rn(float x, float y) { return emu_rounded(x - y); }
EMU_INLINE float __fmul_rn(float x, float y) { return emu_rounded(x * y); }

EMU_INLINE double emu_rounded(double x) {
    asm("" : "+m"(x));
    return x;
}
EMU_INLINE double __dadd_rn(double x, double y) { return emu_rounded(x + y); }
EMU_INLINE double __dsub_rn(double x, double y) { return emu_rounded(x - y); }
EMU_INLINE double __dmul_rn(double x, double y) { return emu_rounded(x * y); }

// Float to integer: out-of-range values saturate and NaN gives 0, as the GPU's conversion instructions do.
template <class Integer>
EMU_INLINE Integer emu_to_integer(double x) {
    const double lowest = (double)std::numeric_limits<Integer>::min(),
                 highest = (double)std::numeric_limits<Integer>::max();
    if (x != x) return 0;
    if (x <= lowest) return std::numeric_limits<Integer>::min();
    if (x >= highest) return std::numeric_limits<Integer>::max();
    return (Integer)x;
}
EMU_INLINE int __float2int_rn(float x) { return emu_to_integer<int>(nearbyintf(x)); }
EMU_INLINE int __float2int_rz(float x) { return emu_to_integer<int>(truncf(x)); }
EMU_INLINE int __float2int_rd(float x) { return emu_to_integer<int>(floorf(x)); }
EMU_INLINE int __float2int_ru(float x) { return emu_to_integer<int>(ceilf(x)); }
EMU_INLINE unsigned __float2uint_rn(float x) { return emu_to_integer<unsigned>(nearbyintf(x)); }
EMU_INLINE unsigned __float2uint_rz(float x) { return emu_to_integer<unsigned>(truncf(x)); }
EMU_INLINE unsigned __float2uint_rd(float x) { return emu_to_integer<unsigned>(floorf(x)); }
EMU_INLINE unsigned __float2uint_ru(float x) { return emu_to_integer<unsigned>(ceilf(x)); }
EMU_INLINE float __int2float_rn(int x) { return (float)x; }
EMU_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
EMU_INLINE float __ll2float_rn(long long x) { return (float)x; }
EMU_INLINE float __ull2float_rn(unsigned long long x) { return (float)x; }
EMU_INLINE float __double2float_rn(double x) { return (float)x; }

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_INLINE int __mulhi(int x, int y) { return (int)(((long long)x * y) >> 32); }
EMU_INLINE unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)(((unsigned long long)x * y) >> 32); }
EMU_INLINE unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)(((unsigned __int128)x * y) >> 64);
}
EMU_INLINE int __mul24(int x, int y) { return ((x << 8) >> 8) * ((y << 8) >> 8); }
EMU_INLINE unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffff) * (y & 0xffffff); }

EMU_INLINE unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= ((x >> i) & 1u) << (31 - i);
    return reversed;
}

EMU_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = selector >> (4 * i) & 7;
        result |= (unsigned)(bytes >> (8 * pick) & 0xff) << (8 * i);
    }
    return result;
}

EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

EMU_INLINE int __dp4a(int x, int y, int sum) {
    for (int i = 0; i < 4; i++) sum += (int)(int8_t)(x >> 8 * i) * (int)(int8_t)(y >> 8 * i);
    return sum;
}
EMU_INLINE unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (x >> 8 * i & 0xff) * (y >> 8 * i & 0xff);
    return sum;
}

#define EMU_MIN_MAX(T)                                   \
    EMU_INLINE T min(T a, T b) { return b < a ? b : a; } \
    EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
