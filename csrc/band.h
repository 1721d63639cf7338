// Products of a chunk of queries with a chunk of keys of which each query sees a part: the weights written out,
//   A = (q k^T) o rows o columns within the band     o += A v     den += A 1
// and the same backward.
#pragma once

#include "additive_backward.h"

namespace reassoc::REASSOC_ISA {

// Which key a query sees: key j of a chunk that begins at position `first`, query i of one that begins at `place`,
// if place + i - window < first + j <= place + i.
struct Band {
    index place, queries, first, keys, window;

    index low(index i) const {  // the first key that query i sees
        const index j = place + i - window + 1 - first;
        return j > 0 ? j : 0;
    }
    index high(index i) const {  // and the one after its last
        const index j = place + i - first + 1;
        return j < keys ? j : keys;
    }
    index first_query(index j) const {
        const index i = first + j - place;
        return i > 0 ? i : 0;
    }
    index end_query(index j) const {
        const index i = (j < keys ? j : keys - 1) + first - place + window;
        return i < queries ? i : queries;
    }
};

// Factors of the weights, each null or [CHUNK], [CHUNK] and [CHUNK][CHUNK].
template <class T>
struct Factors {
    const T *row, *column, *between;
};

// Weights of the ROWS queries from i on: a (ROWS x CHUNK), columns low(i) to high(i + ROWS - 1) and the rest of the
// registers or tiles that these begin and end in; zero outside of the band.
template <class T>
REASSOC_INLINE void band_rows(const Band& b, index i, const T* left, index depth, const T* right, const T* add,
                              const Factors<T>& f, T* a) {
    constexpr int L = LANES<T>;
    using I = typename Bits<T>::type;
    const index begin = b.low(i) / PAD<T> * PAD<T>, end = (b.high(i + ROWS - 1) + PAD<T> - 1) / PAD<T> * PAD<T>;
    Ints<T> lane;
    for (int l = 0; l < L; ++l) lane[l] = l;
    const bool whole = b.low(i + ROWS - 1) <= begin && b.high(i) >= end;
    stretches<T>(end - begin, [&](index at, auto count) {
        constexpr int N = decltype(count)::value;
        Vec<T> acc[ROWS][N];
        for (int m = 0; m < ROWS; ++m)
            for (int n = 0; n < N; ++n) acc[m][n] = add ? splat(add[m]) : Vec<T>{};
        tile<T, ROWS, N>(acc, depth, left, depth, 1, right + begin + at, CHUNK);
        for (int m = 0; m < ROWS; ++m)
            for (int n = 0; n < N; ++n) {
                const index column = begin + at + n * L;
                Vec<T> x = acc[m][n];
                if (f.row) x *= splat(f.row[i + m]);
                if (f.column) x *= load(f.column + column);
                if (f.between) x *= load(f.between + (i + m) * CHUNK + column);
                if (!whole) {  // chosen, not multiplied by zero: a key that is out of sight may be infinite
                    const Ints<T> j = lane + I(column);
                    x = (j >= I(b.low(i + m))) & (j < I(b.high(i + m))) ? x : Vec<T>{};
                }
                store(a + m * CHUNK + column, x);
            }
    });
}

// q [queries][R], kt [R][CHUNK], v [keys][E]; o [queries][E] and den, which may be null, are added to.
template <class T>
inline void add_band(const Band& b, const T* q, const T* kt, index R, const T* v, index ldv, index E,
                     const Factors<T>& f, T* o, T* den, T* A) {
    constexpr int L = LANES<T>;
    index rows = 0;  // later queries see none of these keys
    while (rows < b.queries && b.low(rows) < b.keys) rows += ROWS;
    for (index i = 0; i < rows; i += ROWS) {
        band_rows(b, i, q + i * R, R, kt, (const T*)nullptr, f, A + i * CHUNK);
        const index begin = b.low(i) / PAD<T> * PAD<T>, end = b.high(i + ROWS - 1);
        for (int m = 0; den && m < ROWS; ++m) {
            Vec<T> dot{};
            for (index j = begin; j < end; j += L) dot += load(A + (i + m) * CHUNK + j);
            den[i + m] += sum<T>(dot);
        }
    }
    stretches<T>(E, [&](index at, auto count) {
        constexpr int N = decltype(count)::value;
        for (index i = 0; i < rows; i += ROWS) {
            T* to = o + i * E + at;
            Vec<T> acc[ROWS][N];
            for (int m = 0; m < ROWS; ++m)
                for (int n = 0; n < N; ++n) acc[m][n] = load(to + m * E + n * L);
            const index begin = b.low(i), end = b.high(i + ROWS - 1);
            tile<T, ROWS, N>(acc, end - begin, A + i * CHUNK + begin, CHUNK, 1, v + begin * ldv + at, ldv);
            for (int m = 0; m < ROWS; ++m)
                for (int n = 0; n < N; ++n) store(to + m * E + n * L, acc[m][n]);
        }
    });
}

// Adds to dq [queries][R], dk [keys][R] and dv [keys][E]; vt is [E][CHUNK], d_den null without z; A and dA are
// scratch, CHUNK x CHUNK each.
template <class T>
inline void band_backward(const Band& b, const T* q, const T* k, const T* kt, index R, const T* vt, index E,
                          const Factors<T>& f, const T* d_o, const T* d_den, T* dq, T* dk, T* dv, T* A, T* dA) {
    const Operand<T> none{nullptr, 0, 0, 0, nullptr, 0};
    for (index i = 0; i < b.queries && b.low(i) < b.keys; i += ROWS) {
        band_rows(b, i, q + i * R, R, kt, (const T*)nullptr, f, A + i * CHUNK);
        band_rows(b, i, d_o + i * E, E, vt, d_den ? d_den + i : nullptr, f, dA + i * CHUNK);
        const index begin = b.low(i), end = b.high(i + ROWS - 1);
        product<T>(dq + i * R, R, R, true, none, nullptr, nullptr, nullptr,
                   {dA + i * CHUNK + begin, CHUNK, 1, end - begin, k + begin * R, R});
    }
    for (index j = 0; j < b.keys; j += ROWS) {
        const index begin = b.first_query(j), end = b.end_query(j + ROWS - 1);
        if (begin >= end) continue;
        // Columns of the weights as rows: element (m, i) of the transposed is A[i][j + m].
        product<T>(dk + j * R, R, R, true, none, nullptr, nullptr, nullptr,
                   {dA + begin * CHUNK + j, 1, CHUNK, end - begin, q + begin * R, R});
        product<T>(dv + j * E, E, E, true, none, nullptr, nullptr, nullptr,
                   {A + begin * CHUNK + j, 1, CHUNK, end - begin, d_o + begin * E, E});
    }
}

}  // namespace reassoc::REASSOC_ISA
