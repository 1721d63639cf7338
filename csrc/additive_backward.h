// One chunk of the additive rules, backward. With A = tril(q k^T) o between:
//   o = from_start (q S) + A v          den = from_start (q z) + A 1
//   S' = total S + sum_j to_end_j k_j v_j^T
// Decay gradients follow from q . dq - k . dk (see attend_backward.h).
#pragma once

#include "additive.h"

namespace reassoc::REASSOC_ISA {

template <class T>
struct ChunkGradient {
    const T *d_o, *d_den;  // like o and den; d_den null without z
    T *dS, *dz;            // in: of the state after the chunk; out: of the state before it
    T *dq, *dk, *dv;       // [P][CHUNK][R], [n][R], [n][E]: written
    T* scratch;            // backward_scratch elements
};

template <class T>
constexpr index backward_scratch(index R, index E) {
    return 2 * CHUNK * CHUNK + 2 * R * E + 2 * CHUNK * E;
}

// rows (ROWS x width) = factor[m] * (rows0 + a b): one product of backward. `first` and `second` are pairs of
// (a, row, step, depth, b, ld); the factor applies to the first alone.
template <class T>
struct Operand {
    const T* a;
    index row, step, depth;
    const T* b;
    index ld;
};
template <class T>
REASSOC_INLINE void product(T* to, index ld, index width, bool add, const Operand<T>& x, const T* factor,
                            const T* outer, const T* vector, const Operand<T>& y) {
    constexpr int L = LANES<T>;
    stretches<T>(width, [&](index at, auto count) {
        Vec<T> acc[ROWS][decltype(count)::value];
        clear<T>(acc);
        tile<T>(acc, x.depth, x.a, x.row, x.step, x.b + at, x.ld);
        each<T>(acc, [&](int m, int n, Vec<T>& y) {
            if (vector) y += (outer ? splat(outer[m]) : splat(T(1))) * load(vector + at + n * L);
            if (factor) y *= splat(factor[m]);
            if (add) y += load(to + m * ld + at + n * L);
        });
        tile<T>(acc, y.depth, y.a, y.row, y.step, y.b + at, y.ld);
        each<T>(acc, [&](int m, int n, Vec<T>& x) { store<T>(to + m * ld + at + n * L, x); });
    });
}

// S (blocks of [R][width]) as [E][R].
template <class T>
inline void mirror_state(const T* S, index R, index E, T* to) {
    blocks<T>(S, R, E, [&](index from, index width, const T* block) {
        transpose(block, width, to + from * R, R, R, width);
    });
}

// `causal` false: no position reads here (c.P is ignored); only what the chunk wrote is differentiated.
// As in additive.h, ahead_queries(head, from, to) and ahead_keys(from, to) are called now and then.
template <class T, class AheadQueries = Nothing, class AheadKeys = Nothing>
inline void chunk_backward(const Chunk<T>& c, const T* S, const T* z, const ChunkGradient<T>& d, bool causal,
                           const AheadQueries& ahead_queries = {}, const AheadKeys& ahead_keys = {}) {
    constexpr int L = LANES<T>;
    const index R = c.R, E = c.E, n = c.n, P = causal ? c.P : 0;
    T *A = d.scratch, *dA = A + CHUNK * CHUNK, *St = dA + CHUNK * CHUNK, *dSt = St + R * E, *vt = dSt + R * E,
      *faded = vt + CHUNK * E;
    const index end = (n + ROWS - 1) / ROWS * ROWS;
    std::memset(d.dk, 0, sizeof(T) * end * R);
    std::memset(d.dv, 0, sizeof(T) * end * E);
    mirror_state(d.dS, R, E, dSt);
    if (P) {
        mirror_state(S, R, E, St);
        transpose(c.v, c.ldv, vt, CHUNK, CHUNK, E);
    }
    for (index p = 0; p < P; ++p) {
        const T *q = c.q + p * CHUNK * R, *d_o = d.d_o + p * CHUNK * E;
        const T* d_den = d.d_den ? d.d_den + p * CHUNK : nullptr;
        for (index i = 0; i < n; i += ROWS) {
            ahead_queries(p, i, i + ROWS);
            triangle(q + i * R, R, c.kt, (const T*)nullptr, c.between, i, A + i * CHUNK);
            triangle(d_o + i * E, E, (const T*)vt, d_den ? d_den + i : nullptr, c.between, i, dA + i * CHUNK);
            const index seen = i + ROWS < n ? i + ROWS : n;
            product<T>(d.dq + (p * CHUNK + i) * R, R, R, false, {d_o + i * E, E, 1, E, St, R},
                       c.from_start ? c.from_start + i : nullptr, d_den ? d_den + i : nullptr,
                       d_den ? z : nullptr, {dA + i * CHUNK, CHUNK, 1, seen, c.k, R});
        }
        for (index j = 0; j < n; j += ROWS) {
            // Columns of the triangles as rows: element (m, i) of the transposed is A[i][j + m].
            const Operand<T> none{nullptr, 0, 0, 0, nullptr, 0};
            product<T>(d.dk + j * R, R, R, true, none, nullptr, nullptr, nullptr,
                       {dA + j * CHUNK + j, 1, CHUNK, n - j, q + j * R, R});
            product<T>(d.dv + j * E, E, E, true, none, nullptr, nullptr, nullptr,
                       {A + j * CHUNK + j, 1, CHUNK, n - j, d_o + j * E, E});
        }
    }
    for (index j = 0; j < n; j += ROWS) {
        ahead_keys(j, j + ROWS);
        const T* fade = c.to_end ? c.to_end + j : nullptr;
        const Operand<T> none{nullptr, 0, 0, 0, nullptr, 0};
        product<T>(d.dk + j * R, R, R, true, {c.v + j * c.ldv, c.ldv, 1, E, dSt, R}, fade, nullptr, z ? d.dz : nullptr,
                   none);
        blocks<T>(d.dS, R, E, [&](index from, index width, const T* block) {
            product<T>(d.dv + j * E + from, E, width, true, {c.k + j * R, R, 1, R, block, width}, fade, nullptr,
                       nullptr, none);
        });
    }
    // Last, for dS is read above: the gradient of the state before the chunk.
    const Vec<T> total = splat(c.total);
    if (c.total != T(1)) {
        for (index at = 0; at < R * E; at += L) store(d.dS + at, load(d.dS + at) * total);
        if (z)
            for (index r = 0; r < R; r += L) store(d.dz + r, load(d.dz + r) * total);
    }
    for (index p = 0; p < P; ++p) {
        const T *q = c.q + p * CHUNK * R, *d_o = d.d_o + p * CHUNK * E;
        if (c.from_start) {
            for (index i = 0; i < n; ++i)
                for (index at = 0; at < E; at += L)
                    store(faded + i * E + at, load(d_o + i * E + at) * splat(c.from_start[i]));
            d_o = faded;
        }
        blocks<T>(d.dS, R, E, [&](index from, index width, T* block) {
            for (index r = 0; r < R; r += ROWS) {
                const Operand<T> none{nullptr, 0, 0, 0, nullptr, 0};
                product<T>(block + r * width, width, width, true, none, nullptr, nullptr, nullptr,
                           {q + r, 1, R, n, d_o + from, E});
            }
        });
        if (z)
            stretches<T>(R, [&](index at, auto count) {
                Vec<T> sum[1][decltype(count)::value];
                each<T>(sum, [&](int, int m, Vec<T>& x) { x = load(d.dz + at + m * L); });
                for (index i = 0; i < n; ++i) {
                    const T weight = d.d_den[p * CHUNK + i] * (c.from_start ? c.from_start[i] : T(1));
                    each<T>(sum, [&](int, int m, Vec<T>& x) { x += splat(weight) * load(q + i * R + at + m * L); });
                }
                each<T>(sum, [&](int, int m, Vec<T>& x) { store<T>(d.dz + at + m * L, x); });
            });
    }
}

}  // namespace reassoc::REASSOC_ISA
