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
REASSOC_INLINE index padded(index size) {  // never nothing: z goes along with columns of zeros too
    return size < 1 ? PAD<T> : (size + PAD<T> - 1) / PAD<T> * PAD<T>;
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

// Columns of the lower triangle in use by the tile of rows that row i is in.
template <class T>
REASSOC_INLINE index triangle_width(index i) {
    constexpr index L = LANES<T>;
    return (i / ROWS * ROWS + ROWS + L - 1) / L * L;
}

// Weights of ROWS queries from `i` on: a (ROWS x CHUNK) = tril(q k^T + add) * between.
template <class T>
REASSOC_INLINE void triangle(const T* left, index depth, const T* right, const T* add, const T* between, index i,
                             T* a) {
    constexpr int L = LANES<T>;
    using Int = typename Bits<T>::type;
    Ints<T> lane{};
    REASSOC_UNROLL
    for (int l = 0; l < L; ++l) lane[l] = l;
    stretches<T>(triangle_width<T>(i), [&](index at, auto count) {
        Vec<T> acc[ROWS][decltype(count)::value];
        each<T>(acc, [&](int m, int, Vec<T>& x) { x = add ? splat(add[m]) : Vec<T>{}; });
        tile<T>(acc, depth, left, depth, 1, right + at, CHUNK);
        each<T>(acc, [&](int m, int n, Vec<T>& x) {
            const index column = at + n * L;
            if (between) x *= load(between + (i + m) * CHUNK + column);
            // Chosen, not multiplied by zero: a later key may be infinite.
            if (column + L > i + m + 1) x = lane + Int(column) <= Int(i + m) ? x : Vec<T>{};
            store<T>(a + m * CHUNK + column, x);
        });
    });
}

// Products are the time to fetch what comes next: the functions below call ahead(from, to) now and then, in all
// once for every position of a chunk.
struct Nothing {
    template <class... Any>
    void operator()(Any...) const {}
};

// Weights of head p, a (CHUNK x CHUNK), and with z its denominators, den (CHUNK); z is that before the chunk.
// `causal` false: nothing of the chunk is read.
template <class T, class Ahead = Nothing>
inline void weigh_chunk(const Chunk<T>& c, index p, const T* z, T* den, T* a, bool causal, const Ahead& ahead = {}) {
    constexpr int L = LANES<T>;
    const T* q = c.q + p * CHUNK * c.R;
    for (index i = 0; i < c.n; i += ROWS) {
        ahead(i, i + ROWS);
        if (causal) triangle(q + i * c.R, c.R, c.kt, (const T*)nullptr, c.between, i, a + i * CHUNK);
    }
    // A register of rows at a time; those behind the last one hold anything, and so do their denominators.
    for (index i = 0; z && i < c.n; i += L) {
        Vec<T> dot[L] = {};
        for (index r = 0; r < c.R; r += L)
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) dot[m] += load(q + (i + m) * c.R + r) * load(z + r);
        if (c.from_start)
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) dot[m] *= splat(c.from_start[i + m]);
        for (index j = 0; causal && j < triangle_width<T>(i); j += L)
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) dot[m] += load(a + (i + m) * CHUNK + j);
        store<T>(den + i, sums<T>(dot));
    }
}

// Where the reads of a head go: rows `ld` apart, each times its factor (null: 1). Whole tiles are written.
template <class T>
struct Target {
    T* to;
    index ld;
    const T* factor;
};

// Reads of head p: a v + from_start (q S), with the weights above; S is that before the chunk.
template <class T, class Ahead = Nothing>
inline void read_chunk(const Chunk<T>& c, index p, const T* S, const T* a, bool causal, const Target<T>& target,
                       const Ahead& ahead = {}) {
    constexpr int L = LANES<T>;
    const T* q = c.q + p * CHUNK * c.R;
    blocks<T>(S, c.R, c.E, [&](index from, index size, const T* block) {
        stretches<T>(size, [&](index at, auto count) {
            for (index i = 0; i < c.n; i += ROWS) {
                if (from + at == 0) ahead(i, i + ROWS);
                Vec<T> acc[ROWS][decltype(count)::value];
                clear<T>(acc);
                tile<T>(acc, c.R, q + i * c.R, c.R, 1, block + at, size);
                if (c.from_start) each<T>(acc, [&](int m, int, Vec<T>& x) { x *= splat(c.from_start[i + m]); });
                const index seen = !causal ? 0 : i + ROWS < c.n ? i + ROWS : c.n;
                tile<T>(acc, seen, a + i * CHUNK, CHUNK, 1, c.v + from + at, c.ldv);
                if (target.factor) each<T>(acc, [&](int m, int, Vec<T>& x) { x *= splat(target.factor[i + m]); });
                T* to = target.to + i * target.ld + from + at;
                each<T>(acc, [&](int m, int n, Vec<T>& x) { store<T>(to + m * target.ld + n * L, x); });
            }
        });
    });
}

// Both for all heads: o (P x CHUNK x E) and, with z, den (P x CHUNK).
template <class T>
inline void read_chunk(const Chunk<T>& c, const T* S, const T* z, T* o, T* den, T* a, bool causal = true) {
    for (index p = 0; p < c.P; ++p) {
        weigh_chunk(c, p, z, den + p * CHUNK, a, causal);
        read_chunk(c, p, S, a, causal, Target<T>{o + p * CHUNK * c.E, c.E, nullptr});
    }
}

// Writes the chunk: S = total S + sum_j k_j w_j^T, z = total z + zk; w are the values, decayed to the end.
template <class T, class Ahead = Nothing>
inline void write_chunk(const Chunk<T>& c, const T* w, index ldw, const T* zk, T* S, T* z, const Ahead& ahead = {}) {
    constexpr int L = LANES<T>;
    const Vec<T> total = splat(c.total);
    blocks<T>(S, c.R, c.E, [&](index from, index size, T* block) {
        stretches<T>(size, [&](index at, auto count) {
            for (index r = 0; r < c.R; r += ROWS) {
                if (from + at == 0) ahead(r * CHUNK / c.R, (r + ROWS) * CHUNK / c.R);
                Vec<T> acc[ROWS][decltype(count)::value];
                T* to = block + r * size + at;
                each<T>(acc, [&](int m, int n, Vec<T>& x) { x = load(to + m * size + n * L) * total; });
                tile<T>(acc, c.n, c.kt + r * CHUNK, CHUNK, 1, w + from + at, ldw);
                each<T>(acc, [&](int m, int n, Vec<T>& x) { store<T>(to + m * size + n * L, x); });
            }
        });
    });
    if (z)
        for (index r = 0; r < c.R; r += L) store(z + r, load(z + r) * total + load(zk + r));
}

}  // namespace reassoc::REASSOC_ISA
