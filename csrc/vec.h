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

// In front of every loop over an array of registers: the compiler keeps such an array in memory unless all of its
// indices are constants early on.
#define REASSOC_UNROLL _Pragma("GCC unroll 16")

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
// Asks for the line of memory at `from`.
REASSOC_INLINE void prefetch(const void* from) {
    __builtin_prefetch(from, 0, 2);
    asm volatile("");  // else calls of a function that does nothing but this are removed as having no effect
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
    REASSOC_UNROLL
    for (int step = LANES<T> / 2; step; step /= 2) {
        Ints<T> other{};
        REASSOC_UNROLL
        for (int l = 0; l < LANES<T>; ++l) other[l] = l ^ step;
        x += __builtin_shuffle(x, other);
    }
    return x[0];
}
template <class T>
REASSOC_INLINE T largest(Vec<T> x) {
    REASSOC_UNROLL
    for (int step = LANES<T> / 2; step; step /= 2) {
        Ints<T> other{};
        REASSOC_UNROLL
        for (int l = 0; l < LANES<T>; ++l) other[l] = l ^ step;
        x = larger<T>(x, __builtin_shuffle(x, other));
    }
    return x[0];
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

// The reduction of exp: x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite). Adding 1.5 * 2^digits rounds to an
// integer, which then stands in the lowest bits; with the bias of an exponent added too, n is shifted into place.
// exp(r) is a minimax polynomial (Remez exchange on the relative error, in 40 digits) whose first coefficients
// are exact: it is off by 3.1e-9 for float (degree 6, c0 = c1 = 1) and by 7.5e-20 for double (degree 12, also
// c2 = 1/2), both far below the half unit in the last place that rounding costs.
template <class T>
struct Reduced {
    Vec<T> value;  // exp(r)
    Ints<T> n;     // + the bias; above the lowest bits stands what the rounding left there
};
REASSOC_INLINE Reduced<float> reduced(Vec<float> x) {
    const Vec<float> magic = splat(12582912.0f + Range<float>::bias);
    const Vec<float> shifted = x * 1.44269504088896341f + magic, whole = shifted - magic;
    Vec<float> r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682030941723212e-6f;
    Vec<float> p = r * 1.3814598646664034e-3f + 8.3687168797281399e-3f;
    p = p * r + 4.1668388045313997e-2f;
    p = p * r + 1.6666520631709497e-1f;
    p = p * r + 4.9999993447796487e-1f;
    p = p * r + 1.0f;
    return {p * r + 1.0f, (Ints<float>)shifted};
}
REASSOC_INLINE Reduced<double> reduced(Vec<double> x) {
    const Vec<double> magic = splat(6755399441055744.0 + Range<double>::bias);
    const Vec<double> shifted = x * 1.4426950408889634074 + magic, whole = shifted - magic;
    Vec<double> r = x - whole * 6.93147180369123816490e-01;
    r = r - whole * 1.90821492927058770002e-10;
    Vec<double> p = r * 2.1014270319908300e-09 + 2.5115290575113491e-08;
    p = p * r + 2.7556978849878364e-07;
    p = p * r + 2.7557225273821688e-06;
    p = p * r + 2.4801587629865201e-05;
    p = p * r + 1.9841269906225917e-04;
    p = p * r + 1.3888888888757124e-03;
    p = p * r + 8.3333333333129683e-03;
    p = p * r + 4.1666666666666842e-02;
    p = p * r + 1.6666666666666689e-01;
    p = p * r + 0.5;
    p = p * r + 1.0;
    return {p * r + 1.0, (Ints<double>)shifted};
}

// exp of x <= 0, to about one unit in the last place; zero below the smallest normal number, NaN for NaN.
template <class V>
REASSOC_INLINE V decaying(V x) {
    using T = __typeof__(x[0] + 0);
    const Reduced<T> y = reduced(x);  // nonsense where x is too low
    return x < Range<T>::low ? Vec<T>{} : y.value * (Vec<T>)(y.n << Range<T>::digits);
}

// 1 - exp(x) for x <= 0, near zero by its series: the difference would lose the digits that matter there.
template <class V>
REASSOC_INLINE V losing(V x) {
    using T = __typeof__(x[0] + 0);
    Vec<T> series = splat(T(1)) + x / T(9);
    for (int n = 8; n > 1; --n) series = series * x / T(n) + T(1);
    return x > T(-0.05) ? -x * series : T(1) - decaying(x);
}

// exp of any x: also infinity above the largest number.
template <class V>
REASSOC_INLINE V exponential(V x) {
    using T = __typeof__(x[0] + 0);
    const Reduced<T> y = reduced(x > Range<T>::high ? splat(Range<T>::high) : x);
    const Ints<T> large = x > T(0);  // -1 there: half of the number first, for 2^128 on its own is none
    const Vec<T> part = y.value * (Vec<T>)((y.n + large) << Range<T>::digits);
    const Vec<T> inside = x < Range<T>::low ? Vec<T>{} : large ? part + part : part;
    return x > Range<T>::high ? splat(T(__builtin_inf())) : inside;
}

// Pairs of interleaved registers: the first of each pair takes the lower halves, the second the upper ones.
template <class T>
struct Interleaving {
    Ints<T> low{}, high{};
    REASSOC_INLINE Interleaving() {
        constexpr int L = LANES<T>;
        REASSOC_UNROLL
        for (int i = 0; i < L; ++i) {
            low[i] = (i & 1) * L + i / 2;
            high[i] = (i & 1) * L + L / 2 + i / 2;
        }
    }
};

// A square block of one register per row, mirrored at its diagonal: row i is interleaved with row i + L/2, and
// that log2(L) times over.
template <class T>
REASSOC_INLINE void mirror(Vec<T> (&rows)[LANES<T>]) {
    constexpr int L = LANES<T>;
    const Interleaving<T> of;
    REASSOC_UNROLL
    for (int round = L; round > 1; round /= 2) {
        Vec<T> next[L];
        REASSOC_UNROLL
        for (int i = 0; i < L / 2; ++i) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + L / 2], of.low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + L / 2], of.high);
        }
        REASSOC_UNROLL
        for (int i = 0; i < L; ++i) rows[i] = next[i];
    }
}

// Lane i of the answer is the sum of rows[i]: adding while interleaving.
template <class T>
REASSOC_INLINE Vec<T> sums(Vec<T> (&rows)[LANES<T>]) {
    const Interleaving<T> of;
    REASSOC_UNROLL
    for (int half = LANES<T> / 2; half; half /= 2)
        REASSOC_UNROLL
        for (int i = 0; i < half; ++i)
            rows[i] = __builtin_shuffle(rows[i], rows[i + half], of.low) +
                      __builtin_shuffle(rows[i], rows[i + half], of.high);
    return rows[0];
}

}  // namespace reassoc::REASSOC_ISA
