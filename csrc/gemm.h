// Products of small matrices held in cache: a few rows times a few registers at a time.
#pragma once

#include "vec.h"

namespace reassoc::REASSOC_ISA {

constexpr int ROWS = 4;                               // rows of a tile
constexpr int COLUMNS = REGISTERS == 32 ? 4 : 2;      // registers of a tile: ROWS * COLUMNS accumulate

// acc += a b, with a(m, k) = a[m * row + k * step], b(k, :) = b + k * ld.
template <class T, int M, int N>
REASSOC_INLINE void tile(Vec<T> (&acc)[M][N], index depth, const T* a, index row, index step, const T* b,
                         index ld) {
    for (index k = 0; k < depth; ++k) {
        Vec<T> right[N];
        REASSOC_UNROLL
        for (int n = 0; n < N; ++n) right[n] = load(b + k * ld + n * LANES<T>);
        REASSOC_UNROLL
        for (int m = 0; m < M; ++m) {
            const Vec<T> left = splat(a[m * row + k * step]);
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) acc[m][n] += left * right[n];
        }
    }
}

// Calls body(m, n, acc[m][n]) for every register of a tile.
template <class T, int M, int N, class Body>
REASSOC_INLINE void each(Vec<T> (&acc)[M][N], Body&& body) {
    REASSOC_UNROLL
    for (int m = 0; m < M; ++m)
        REASSOC_UNROLL
        for (int n = 0; n < N; ++n) body(m, n, acc[m][n]);
}

template <class T, int M, int N>
REASSOC_INLINE void clear(Vec<T> (&acc)[M][N]) {
    each<T>(acc, [](int, int, Vec<T>& x) { x = Vec<T>{}; });
}

// Calls body(first column, number of registers as a constant) for consecutive stretches of `width` columns,
// a multiple of the lanes.
template <int N>
struct Count {
    static constexpr int value = N;
};
template <class T, class Body>
REASSOC_INLINE void stretches(index width, Body&& body) {
    constexpr index FULL = COLUMNS * LANES<T>;
    index at = 0;
    for (; at + FULL <= width; at += FULL) body(at, Count<COLUMNS>{});
    switch ((width - at) / LANES<T>) {
        case 3:
            if constexpr (COLUMNS > 3) body(at, Count<3>{});
            break;
        case 2:
            if constexpr (COLUMNS > 2) body(at, Count<2>{});
            break;
        case 1: body(at, Count<1>{}); break;
        default: break;
    }
}

// `to` (width x height) = `from` (height x width) mirrored; both sizes multiples of the lanes.
template <class T>
inline void transpose(const T* from, index ld_from, T* to, index ld_to, index height, index width) {
    constexpr int L = LANES<T>;
    for (index i = 0; i < height; i += L)
        for (index j = 0; j < width; j += L) {
            Vec<T> block[L];
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) block[m] = load(from + (i + m) * ld_from + j);
            mirror<T>(block);
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) store(to + (j + m) * ld_to + i, block[m]);
        }
}

}  // namespace reassoc::REASSOC_ISA
