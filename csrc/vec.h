// Vectors of one register, whatever the instruction set: the one place that knows its width.
//
// Every translation unit of the kernels is compiled once per instruction set, with REASSOC_ISA as its
// namespace, so that no symbol of a wide build can stand in for one of a narrow build. Written with
// compiler vectors: the compiler picks the instructions, and contracts a * b + c into one.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef REASSOC_ISA
#define REASSOC_ISA plain
#endif

#if defined(__AVX512F__)
#define REASSOC_BYTES 64
#define REASSOC_REGISTERS 32
#elif defined(__AVX2__)
#define REASSOC_BYTES 32
#define REASSOC_REGISTERS 16
#elif defined(__aarch64__)
#define REASSOC_BYTES 16
#define REASSOC_REGISTERS 32
#else
#define REASSOC_BYTES 16
#define REASSOC_REGISTERS 16
#endif

#define REASSOC_INLINE inline __attribute__((always_inline))

namespace reassoc::REASSOC_ISA {

using index = std::int64_t;

constexpr int BYTES = REASSOC_BYTES;
constexpr int REGISTERS = REASSOC_REGISTERS;

template <class T>
constexpr int LANES = BYTES / int(sizeof(T));

template <class T>
struct Register {
    typedef T type __attribute__((vector_size(BYTES)));
    typedef T loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vec = typename Register<T>::type;

template <class T>
struct Bits;  // the integer of the same size
template <>
struct Bits<float> {
    using type = std::int32_t;
};
template <>
struct Bits<double> {
    using type = std::int64_t;
};
template <class T>
using Ints = Vec<typename Bits<T>::type>;

template <class T>
REASSOC_INLINE Vec<T> load(const T* from) {
    return *reinterpret_cast<const typename Register<T>::loose*>(from);
}
template <class T>
REASSOC_INLINE void store(T* to, Vec<T> x) {
    *reinterpret_cast<typename Register<T>::loose*>(to) = x;
}
template <class T>
REASSOC_INLINE Vec<T> splat(T x) {
    return x - Vec<T>{};
}
template <class T>
REASSOC_INLINE Vec<T> select(Ints<T> where, Vec<T> yes, Vec<T> no) {
    return where ? yes : no;
}
template <class T>
REASSOC_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
    return a > b ? a : b;
}

template <class T>
REASSOC_INLINE T sum(Vec<T> x) {
    for (int step = LANES<T> / 2; step; step /= 2) {
        Ints<T> other;
        for (int l = 0; l < LANES<T>; ++l) other[l] = l ^ step;
        x += __builtin_shuffle(x, other);
    }
    return x[0];
}
template <class T>
REASSOC_INLINE T largest(Vec<T> x) {
    for (int step = LANES<T> / 2; step; step /= 2) {
        Ints<T> other;
        for (int l = 0; l < LANES<T>; ++l) other[l] = l ^ step;
        x = larger<T>(x, __builtin_shuffle(x, other));
    }
    return x[0];
}

// The reduction of exp: x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite), exp(r) by its Taylor polynomial, whose
// rest is below half a unit in the last place (r^8 / 8! and r^14 / 14!). Adding `magic` rounds to an integer,
// which then stands in the lowest bits.
REASSOC_INLINE Vec<float> reduced(Vec<float> x, Ints<float>& n) {
    using V = Vec<float>;
    const V magic = splat(12582912.0f);  // 1.5 * 2^23
    const V shifted = x * 1.44269504088896341f + magic, whole = shifted - magic;
    V r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682030941723212e-6f;
    V p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    n = (Ints<float>)shifted - (Ints<float>)magic;
    return p * r + 1.0f;
}
REASSOC_INLINE Vec<double> reduced(Vec<double> x, Ints<double>& n) {
    using V = Vec<double>;
    const V magic = splat(6755399441055744.0);  // 1.5 * 2^52
    const V shifted = x * 1.4426950408889634074 + magic, whole = shifted - magic;
    V r = x - whole * 6.93147180369123816490e-01;
    r = r - whole * 1.90821492927058770002e-10;
    V p = r * (1.0 / 6227020800.0) + (1.0 / 479001600.0);
    p = p * r + (1.0 / 39916800.0);
    p = p * r + (1.0 / 3628800.0);
    p = p * r + (1.0 / 362880.0);
    p = p * r + (1.0 / 40320.0);
    p = p * r + (1.0 / 5040.0);
    p = p * r + (1.0 / 720.0);
    p = p * r + (1.0 / 120.0);
    p = p * r + (1.0 / 24.0);
    p = p * r + (1.0 / 6.0);
    p = p * r + 0.5;
    p = p * r + 1.0;
    n = (Ints<double>)shifted - (Ints<double>)magic;
    return p * r + 1.0;
}

template <class T>
struct Range;  // where exp is a normal number, and the layout of one
template <>
struct Range<float> {
    static constexpr float low = -87.336f, high = 88.72283f;
    static constexpr int bias = 127, digits = 23;
};
template <>
struct Range<double> {
    static constexpr double low = -708.39, high = 709.782712893384;
    static constexpr int bias = 1023, digits = 52;
};
template <class T>
REASSOC_INLINE Vec<T> power(Ints<T> n) {
    return (Vec<T>)((n + Range<T>::bias) << Range<T>::digits);
}

// exp of x <= 0, to about one unit in the last place; zero below the smallest normal number, NaN for NaN.
template <class V>
REASSOC_INLINE V decaying(V x) {
    using T = __typeof__(x[0] + 0);
    Ints<T> n;
    const Vec<T> p = reduced(x < Range<T>::low ? splat(Range<T>::low) : x, n);
    return x < Range<T>::low ? Vec<T>{} : p * power<T>(n);
}

// exp of any x: also infinity above the largest number.
template <class V>
REASSOC_INLINE V exponential(V x) {
    using T = __typeof__(x[0] + 0);
    Vec<T> inside = x < Range<T>::low ? splat(Range<T>::low) : x;
    inside = inside > Range<T>::high ? splat(Range<T>::high) : inside;
    Ints<T> n;
    const Vec<T> p = reduced(inside, n);
    const Ints<T> half = n >> 1;  // two factors, since 2^128 on its own is no number
    Vec<T> y = p * power<T>(half) * power<T>(n - half);
    y = x < Range<T>::low ? Vec<T>{} : y;
    return x > Range<T>::high ? splat(T(__builtin_inf())) : y;
}

// A square block of one register per row, mirrored at its diagonal: log2(lanes) rounds of interleaving.
template <class T>
REASSOC_INLINE void mirror(Vec<T> (&rows)[LANES<T>]) {
    constexpr int L = LANES<T>;
    using I = Ints<T>;
    // Interleaving row i with row i + L/2, log2(L) times over, is the transposition.
    I low{}, high{};
    for (int i = 0; i < L; ++i) {
        low[i] = (i & 1) * L + i / 2;
        high[i] = (i & 1) * L + L / 2 + i / 2;
    }
    for (int round = L; round > 1; round /= 2) {
        Vec<T> next[L];
        for (int i = 0; i < L / 2; ++i) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + L / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + L / 2], high);
        }
        for (int i = 0; i < L; ++i) rows[i] = next[i];
    }
}

}  // namespace reassoc::REASSOC_ISA
