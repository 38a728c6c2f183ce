// __half and __nv_bfloat16, their pairs, and the conversion and arithmetic intrinsics over them.
//
// Conversions round to nearest even, as the _rn intrinsics do. Arithmetic is done in fp32 and rounded once, which is
// what the GPU's half units give for one operation. Not here: the _rz/_ru/_rd roundings and the half versions of exp,
// log and the like; kernels compute those in fp32.
#pragma once

#ifdef __aarch64__
typedef __fp16 emu_float16;  // g++ has _Float16 in C++ on aarch64 only since version 13
#else
typedef _Float16 emu_float16;
#endif

struct __align__(2) __half {
    unsigned short __x;  // CUDA's own name for the bits

    __half() = default;
    __half(float f) : __x(emu_bits<unsigned short>((emu_float16)f)) {}
    __half(double f) : __x(emu_bits<unsigned short>((emu_float16)f)) {}
    __half(int i) : __half((float)i) {}
    __half(unsigned i) : __half((float)i) {}
    operator float() const { return (float)emu_bits<emu_float16>(__x); }
};

struct __align__(2) __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        uint32_t bits = emu_bits<uint32_t>(f);
        uint32_t round = 0x7fff + ((bits >> 16) & 1);  // half of the last kept bit, ties to even
        __x = f != f ? 0x7fff : (unsigned short)((bits + round) >> 16);
    }
    __nv_bfloat16(double f) : __nv_bfloat16((float)f) {}
    __nv_bfloat16(int i) : __nv_bfloat16((float)i) {}
    __nv_bfloat16(unsigned i) : __nv_bfloat16((float)i) {}
    operator float() const { return emu_bits<float>((uint32_t)__x << 16); }
};

struct __align__(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
};

struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};

typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// Everything whose name does not depend on the type: operators and the __h... intrinsics.
#define EMU_HALF_ARITHMETIC(H, H2)                                                                       \
    EMU_INLINE H operator+(H a, H b) { return H(float(a) + float(b)); }                                  \
    EMU_INLINE H operator-(H a, H b) { return H(float(a) - float(b)); }                                  \
    EMU_INLINE H operator*(H a, H b) { return H(float(a) * float(b)); }                                  \
    EMU_INLINE H operator/(H a, H b) { return H(float(a) / float(b)); }                                  \
    EMU_INLINE H operator-(H a) { return H(-float(a)); }                                                 \
    EMU_INLINE H& operator+=(H& a, H b) { return a = a + b; }                                            \
    EMU_INLINE H& operator-=(H& a, H b) { return a = a - b; }                                            \
    EMU_INLINE H& operator*=(H& a, H b) { return a = a * b; }                                            \
    EMU_INLINE bool operator==(H a, H b) { return float(a) == float(b); }                                \
    EMU_INLINE bool operator!=(H a, H b) { return float(a) != float(b); }                                \
    EMU_INLINE bool operator<(H a, H b) { return float(a) < float(b); }                                  \
    EMU_INLINE bool operator>(H a, H b) { return float(a) > float(b); }                                  \
    EMU_INLINE bool operator<=(H a, H b) { return float(a) <= float(b); }                                \
    EMU_INLINE bool operator>=(H a, H b) { return float(a) >= float(b); }                                \
    EMU_INLINE H __hadd(H a, H b) { return a + b; }                                                      \
    EMU_INLINE H __hsub(H a, H b) { return a - b; }                                                      \
    EMU_INLINE H __hmul(H a, H b) { return a * b; }                                                      \
    EMU_INLINE H __hdiv(H a, H b) { return a / b; }                                                      \
    EMU_INLINE H __hfma(H a, H b, H c) { return H((float)((double)float(a) * float(b) + float(c))); }    \
    EMU_INLINE H __hneg(H a) { return -a; }                                                              \
    EMU_INLINE H __habs(H a) { return H(fabsf(a)); }                                                     \
    EMU_INLINE H __hmax(H a, H b) { return H(fmaxf(a, b)); }                                             \
    EMU_INLINE H __hmin(H a, H b) { return H(fminf(a, b)); }                                             \
    EMU_INLINE bool __heq(H a, H b) { return a == b; }                                                   \
    EMU_INLINE bool __hlt(H a, H b) { return a < b; }                                                    \
    EMU_INLINE bool __hgt(H a, H b) { return a > b; }                                                    \
    EMU_INLINE bool __hisnan(H a) { return float(a) != float(a); }                                       \
    EMU_INLINE H2 operator+(H2 a, H2 b) { return H2(a.x + b.x, a.y + b.y); }                             \
    EMU_INLINE H2 operator-(H2 a, H2 b) { return H2(a.x - b.x, a.y - b.y); }                             \
    EMU_INLINE H2 operator*(H2 a, H2 b) { return H2(a.x * b.x, a.y * b.y); }                             \
    EMU_INLINE H2 __hadd2(H2 a, H2 b) { return a + b; }                                                  \
    EMU_INLINE H2 __hsub2(H2 a, H2 b) { return a - b; }                                                  \
    EMU_INLINE H2 __hmul2(H2 a, H2 b) { return a * b; }                                                  \
    EMU_INLINE H2 __hfma2(H2 a, H2 b, H2 c) { return H2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); } \
    EMU_INLINE H2 __hmax2(H2 a, H2 b) { return H2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }                 \
    EMU_INLINE H2 __hmin2(H2 a, H2 b) { return H2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }                 \
    EMU_INLINE float __low2float(H2 v) { return v.x; }                                                   \
    EMU_INLINE float __high2float(H2 v) { return v.y; }

EMU_HALF_ARITHMETIC(__half, __half2)
EMU_HALF_ARITHMETIC(__nv_bfloat16, __nv_bfloat162)
#undef EMU_HALF_ARITHMETIC

EMU_INLINE float __half2float(__half h) { return h; }
EMU_INLINE __half __float2half(float f) { return __half(f); }
EMU_INLINE __half __float2half_rn(float f) { return __half(f); }
EMU_INLINE __half __double2half(double f) { return __half(f); }
EMU_INLINE __half __int2half_rn(int i) { return __half(i); }
EMU_INLINE float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
EMU_INLINE __half2 __floats2half2_rn(float x, float y) { return __half2(__half(x), __half(y)); }
EMU_INLINE __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
EMU_INLINE __half2 __float2half2_rn(float f) { return __floats2half2_rn(f, f); }
EMU_INLINE __half2 __halves2half2(__half x, __half y) { return __half2(x, y); }
EMU_INLINE __half2 __half2half2(__half h) { return __half2(h, h); }
EMU_INLINE __half2 make_half2(__half x, __half y) { return __half2(x, y); }
EMU_INLINE __half __low2half(__half2 v) { return v.x; }
EMU_INLINE __half __high2half(__half2 v) { return v.y; }
EMU_INLINE __half __ushort_as_half(unsigned short bits) { return emu_bits<__half>(bits); }
EMU_INLINE __half __short_as_half(short bits) { return emu_bits<__half>(bits); }
EMU_INLINE unsigned short __half_as_ushort(__half h) { return h.__x; }
EMU_INLINE short __half_as_short(__half h) { return (short)h.__x; }

EMU_INLINE float __bfloat162float(__nv_bfloat16 h) { return h; }
EMU_INLINE __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
EMU_INLINE __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
EMU_INLINE __nv_bfloat16 __double2bfloat16(double f) { return __nv_bfloat16(f); }
EMU_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
EMU_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return __nv_bfloat162(__nv_bfloat16(x), __nv_bfloat16(y));
}
EMU_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
EMU_INLINE __nv_bfloat162 __float2bfloat162_rn(float f) { return __floats2bfloat162_rn(f, f); }
EMU_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
EMU_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 h) { return __nv_bfloat162(h, h); }
EMU_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
EMU_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
EMU_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
EMU_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return emu_bits<__nv_bfloat16>(bits); }
EMU_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.__x; }
