// Products of a few vectors with a state, one sweep over its rows each: what the recurrent core is made of.
//
// GROUP tokens meet the state at once, so that each of its registers is loaded for four or eight
// multiplications, not for one.
#pragma once

#include "gemm.h"

namespace reassoc::REASSOC_ISA {

constexpr index GROUP = 4;
// Vectors of a sweep: with two registers of columns, enough independent sums to hide the latency of a
// multiplication, and few enough to stay in registers.
constexpr index SWEEP = REGISTERS == 32 ? 8 : 4;

// Calls body(first vector, their number as a constant, first column, number of registers as a constant).
template <class T, class Body>
REASSOC_INLINE void sweeps(index vectors, index width, Body&& body) {
    constexpr index L = LANES<T>;
    auto rows = [&](index at, auto registers) {
        index i = 0;
        for (; i + SWEEP <= vectors; i += SWEEP) body(i, Count<SWEEP>{}, at, registers);
        for (; i < vectors; i += GROUP) body(i, Count<GROUP>{}, at, registers);
    };
    index at = 0;
    for (; at + L < width; at += 2 * L) rows(at, Count<2>{});
    if (at < width) rows(at, Count<1>{});
}

// out[i] (+)= S^T x[i] for `vectors` rows of x, a multiple of GROUP. S is [depth][width], rows lds apart.
template <class T>
inline void read(const T* x, index ldx, index vectors, const T* S, index lds, index depth, index width, bool add,
                 T* out, index ldo) {
    sweeps<T>(vectors, width, [&](index i, auto rows, index at, auto registers) {
        constexpr int M = decltype(rows)::value, N = decltype(registers)::value, L = LANES<T>;
        T* to = out + i * ldo + at;
        Vec<T> acc[M][N];
        REASSOC_UNROLL
        for (int m = 0; m < M; ++m)
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) acc[m][n] = add ? load(to + m * ldo + n * L) : Vec<T>{};
        tile<T, M, N>(acc, depth, x + i * ldx, ldx, 1, S + at, lds);
        REASSOC_UNROLL
        for (int m = 0; m < M; ++m)
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) store<T>(to + m * ldo + n * L, acc[m][n]);
    });
}

// S = keep S + sum_i x[i] u[i]^T; keep is [depth] or null.
template <class T>
inline void write(const T* keep, const T* x, index ldx, index vectors, const T* u, index ldu, T* S, index lds,
                  index depth, index width) {
    sweeps<T>(vectors, width, [&](index i, auto rows, index at, auto registers) {
        constexpr int M = decltype(rows)::value, N = decltype(registers)::value, L = LANES<T>;
        const T *from = x + i * ldx, *kept = i ? nullptr : keep;
        Vec<T> term[M][N];
        REASSOC_UNROLL
        for (int m = 0; m < M; ++m)
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) term[m][n] = load(u + (i + m) * ldu + at + n * L);
        for (index r = 0; r < depth; ++r) {
            T* to = S + r * lds + at;
            Vec<T> row[N];
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) row[n] = load(to + n * L);
            if (kept)
                REASSOC_UNROLL
                for (int n = 0; n < N; ++n) row[n] *= splat(kept[r]);
            REASSOC_UNROLL
            for (int m = 0; m < M; ++m) {
                const Vec<T> left = splat(from[m * ldx + r]);
                REASSOC_UNROLL
                for (int n = 0; n < N; ++n) row[n] += left * term[m][n];
            }
            REASSOC_UNROLL
            for (int n = 0; n < N; ++n) store<T>(to + n * L, row[n]);
        }
    });
}

// out[i] = sum of acc[i], for any number of accumulators; `out` has room for whole registers.
template <class T, int N>
REASSOC_INLINE void store_sums(const Vec<T> (&acc)[N], T* out) {
    constexpr int L = LANES<T>;
    for (int at = 0; at < N; at += L) {
        Vec<T> rows[L];
        REASSOC_UNROLL
        for (int i = 0; i < L; ++i) rows[i] = at + i < N ? acc[at + i] : Vec<T>{};
        store<T>(out + at, sums<T>(rows));
    }
}

}  // namespace reassoc::REASSOC_ISA
