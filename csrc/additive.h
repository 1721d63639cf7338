// One chunk of the additive rules, forward: S = decay S + sum_j k_j v_j^T, read causally by every position.
//
// Inside a chunk the weights are written out, lower triangle only; everything before it is read from S.
#pragma once

#include "gemm.h"

namespace reassoc::REASSOC_ISA {

constexpr index CHUNK = 64;  // positions: the triangle then costs as much as reading a state of 64 columns
constexpr index BLOCK_REGISTERS = 4;

// S is kept in blocks of columns, each [R][width] on its own, so that one block's rows are neighbors.
template <class T>
constexpr index BLOCK = BLOCK_REGISTERS * LANES<T>;

// Sizes are padded with zeros: whole registers, and whole tiles of rows.
template <class T>
constexpr index PAD = LANES<T> < ROWS ? ROWS : LANES<T>;
template <class T>
REASSOC_INLINE index padded(index size) {
    return (size + PAD<T> - 1) / PAD<T> * PAD<T>;
}

// Calls body(first column, width, the block) for every block of a state of E columns.
template <class T, class S, class Body>
REASSOC_INLINE void blocks(S* state, index R, index E, Body&& body) {
    for (index at = 0; at < E; at += BLOCK<T>) {
        const index width = E - at < BLOCK<T> ? E - at : BLOCK<T>;
        body(at, width, state + R * at);
    }
}

// A chunk of one key head whose P query heads share it; rows from n to the next multiple of ROWS are zero.
template <class T>
struct Chunk {
    index n, R, E, P;
    const T* q;  // feature of head p at position t: q + (p * CHUNK + t) * R
    const T* k;  // [n][R]
    const T* kt; // [R][CHUNK]
    const T* v;  // [n][E], rows ldv apart
    index ldv;
    // Scalar decay, or null: from the start of the chunk through i, from after j to its end, and between.
    const T *from_start, *to_end, *between;  // [n], [n], [n][CHUNK]
    T total;                                 // of the whole chunk, 1 without decay
};

// Weights of ROWS queries from `i` on: a (ROWS x CHUNK) = tril(q k^T) * between. Returns the columns in use.
template <class T>
REASSOC_INLINE index triangle(const T* left, index depth, const T* right, const T* add, const T* between,
                              index i, T* a) {
    constexpr int L = LANES<T>;
    const index width = (i + ROWS + L - 1) / L * L;
    Ints<T> lane;
    for (int l = 0; l < L; ++l) lane[l] = l;
    stretches<T>(width, [&](index at, auto count) {
        constexpr int N = decltype(count)::value;
        Vec<T> acc[ROWS][N];
        for (int m = 0; m < ROWS; ++m)
            for (int n = 0; n < N; ++n) acc[m][n] = add ? splat(add[m]) : Vec<T>{};
        tile<T, ROWS, N>(acc, depth, left, depth, 1, right + at, CHUNK);
        for (int m = 0; m < ROWS; ++m)
            for (int n = 0; n < N; ++n) {
                const index column = at + n * L;
                Vec<T> x = acc[m][n];
                if (between) x *= load(between + (i + m) * CHUNK + column);
                // Chosen, not multiplied by zero: a later key may be infinite.
                if (column + L > i + m + 1) x = lane + typename Bits<T>::type(column) <= typename Bits<T>::type(i + m) ? x : Vec<T>{};
                store(a + m * CHUNK + column, x);
            }
    });
    return width;
}

// Reads of all positions: o (P x CHUNK x E) and, with z, den (P x CHUNK). S and z are those before the chunk;
// a is scratch for the weights (CHUNK x CHUNK). One matrix at a time is walked by all rows, so that it stays in
// the nearest cache.
template <class T>
inline void read_chunk(const Chunk<T>& c, const T* S, const T* z, T* o, T* den, T* a, bool causal = true) {
    constexpr int L = LANES<T>;
    for (index p = 0; p < c.P; ++p) {
        const T* q = c.q + p * CHUNK * c.R;
        T* out = o + p * CHUNK * c.E;
        for (index i = 0; i < c.n; i += ROWS) {
            index width = 0;
            if (causal) width = triangle(q + i * c.R, c.R, c.kt, (const T*)nullptr, c.between, i, a + i * CHUNK);
            for (int m = 0; z && m < ROWS; ++m) {
                Vec<T> dot{};
                for (index r = 0; r < c.R; r += L) dot += load(q + (i + m) * c.R + r) * load(z + r);
                if (c.from_start) dot *= splat(c.from_start[i + m]);
                for (index j = 0; j < width; j += L) dot += load(a + (i + m) * CHUNK + j);
                den[p * CHUNK + i + m] = sum<T>(dot);
            }
        }
        blocks<T>(S, c.R, c.E, [&](index from, index size, const T* block) {
            stretches<T>(size, [&](index at, auto count) {
                constexpr int N = decltype(count)::value;
                for (index i = 0; i < c.n; i += ROWS) {
                    Vec<T> acc[ROWS][N];
                    clear<T>(acc);
                    tile<T, ROWS, N>(acc, c.R, q + i * c.R, c.R, 1, block + at, size);
                    for (int m = 0; m < ROWS; ++m)
                        for (int n = 0; n < N; ++n) {
                            if (c.from_start) acc[m][n] *= splat(c.from_start[i + m]);
                            store(out + (i + m) * c.E + from + at + n * L, acc[m][n]);
                        }
                }
                for (index i = 0; causal && i < c.n; i += ROWS) {
                    T* to = out + i * c.E + from + at;
                    Vec<T> acc[ROWS][N];
                    for (int m = 0; m < ROWS; ++m)
                        for (int n = 0; n < N; ++n) acc[m][n] = load(to + m * c.E + n * L);
                    const index seen = i + ROWS < c.n ? i + ROWS : c.n;
                    tile<T, ROWS, N>(acc, seen, a + i * CHUNK, CHUNK, 1, c.v + from + at, c.ldv);
                    for (int m = 0; m < ROWS; ++m)
                        for (int n = 0; n < N; ++n) store(to + m * c.E + n * L, acc[m][n]);
                }
            });
        });
    }
}

// Writes the chunk: S = total S + sum_j k_j w_j^T, z = total z + zk; w are the values, decayed to the end.
template <class T>
inline void write_chunk(const Chunk<T>& c, const T* w, index ldw, const T* zk, T* S, T* z) {
    constexpr int L = LANES<T>;
    const Vec<T> total = splat(c.total);
    blocks<T>(S, c.R, c.E, [&](index from, index size, T* block) {
        stretches<T>(size, [&](index at, auto count) {
            constexpr int N = decltype(count)::value;
            for (index r = 0; r < c.R; r += ROWS) {
                Vec<T> acc[ROWS][N];
                for (int m = 0; m < ROWS; ++m)
                    for (int n = 0; n < N; ++n) acc[m][n] = load(block + (r + m) * size + at + n * L) * total;
                tile<T, ROWS, N>(acc, c.n, c.kt + r * CHUNK, CHUNK, 1, w + from + at, ldw);
                for (int m = 0; m < ROWS; ++m)
                    for (int n = 0; n < N; ++n) store(block + (r + m) * size + at + n * L, acc[m][n]);
            }
        });
    });
    if (z)
        for (index r = 0; r < c.R; r += L) store(z + r, load(z + r) * total + load(zk + r));
}

}  // namespace reassoc::REASSOC_ISA
