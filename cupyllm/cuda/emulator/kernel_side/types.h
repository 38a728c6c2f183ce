// The CUDA vector types (float4, uint2, ...), dim3, and bit casts between floats and integers.
//
// Sizes and alignments are CUDA's: a two-vector is aligned to its size, a four-vector to its size but at most 16 bytes,
// a three-vector to one element. Check mode reports a vector access at a less aligned address.
#pragma once

#define EMU_VECTOR(T, NAME)                                                              \
    struct NAME##1 { T x; };                                                             \
    struct __align__(2 * sizeof(T)) NAME##2 { T x, y; };                                 \
    struct NAME##3 { T x, y, z; };                                                       \
    struct __align__(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) NAME##4 { T x, y, z, w; }; \
    EMU_INLINE NAME##1 make_##NAME##1(T x) { return {x}; }                               \
    EMU_INLINE NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                       \
    EMU_INLINE NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }               \
    EMU_INLINE NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned int, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(unsigned long long, ulonglong)
#undef EMU_VECTOR

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

template <class To, class From>
EMU_INLINE To emu_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

EMU_INLINE int __float_as_int(float x) { return emu_bits<int>(x); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
EMU_INLINE float __int_as_float(int x) { return emu_bits<float>(x); }
EMU_INLINE float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
EMU_INLINE long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
EMU_INLINE double __longlong_as_double(long long x) { return emu_bits<double>(x); }
