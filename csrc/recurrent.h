// The recurrence itself, forward: what every rule does to the state of one key head, token by token.
//
//   S = keep S,  z = keep z,  u = beta (v - S^T k)  or v,  S = S + k u^T,  z = z + k,  o = S^T q,  den = z . q
//
// GROUP tokens at a time. With S and z those before the group, and everything decayed to where it is used,
//   o_i = S^T q_i + sum_{j <= i} (q_i . k_j) u_j      u_i = beta_i (v_i - S^T k_i - sum_{j < i} (k_i . k_j) u_j)
//   S' = keep S + sum_j k_j u_j^T
// which is the same recurrence solved for its u: the state is read and written once per group, each decay is a
// product of factors, and nothing is divided by one, so that a factor of zero is exact.
#pragma once

#include "additive.h"
#include "sweeps.h"

namespace reassoc::REASSOC_ISA {

// Up to CHUNK tokens of one key head and its P query heads; R and E are padded with zeros. A hidden token has
// k = 0, keep = 1 and any finite v.
template <class T>
struct Tokens {
    index n, R, E, P;
    const T* q;  // feature of head p at token t: q + (p * CHUNK + t) * R
    const T* k;  // [n][R]
    const T* v;  // [n][E], rows ldv apart
    index ldv;
    const T* beta;     // [n], or null: an additive rule, u = v
    const T* keep;     // factors in [0, 1]: [n][keep_width], or null
    index keep_width;  // 1 or R
};

constexpr int PAIRS = GROUP * (GROUP + 1) / 2;
constexpr int pair(int i, int j) { return i * (i + 1) / 2 + j; }  // of a later i and an earlier (or the same) j

// What a group does to any state; in backward also the gradient of that.
template <class T>
struct Group {
    T* rows;   // [1 + P][GROUP], ld apart: keys, then the queries of each head, decayed from the group's start
    T* write;  // [GROUP], ld apart: keys, decayed to the group's end
    T* kept;   // [R]: the factors of the whole group; null without decay, when `write` is the keys themselves
    T* pairs;  // [1 + P][PAIR_ROOM]: k_i . k_j, then q_i . k_j of each head, decayed in between
    index ld;
    static constexpr index PAIR_ROOM = (PAIRS + LANES<T> - 1) / LANES<T> * LANES<T>;

    // Rows are a register further apart than need be, lest those of a power of two share one set of the cache.
    static index apart(index R) { return R + LANES<T>; }
    static index size(index R, index P) { return (2 * GROUP + P * GROUP + 1) * apart(R) + (1 + P) * PAIR_ROOM; }
    Group(T* scratch, index R, index P, bool gated) : ld(apart(R)) {
        pairs = scratch;
        rows = pairs + (1 + P) * PAIR_ROOM;
        kept = gated ? rows + (1 + P) * GROUP * ld : nullptr;
        write = gated ? kept + ld : rows;
    }
};

template <class T>
REASSOC_INLINE index count_from(const Tokens<T>& c, index start) {
    return c.n - start < GROUP ? c.n - start : GROUP;
}

// Factors of R of the tokens of a group, LANES at a time; those past the end change nothing.
template <class T>
REASSOC_INLINE void load_factors(const Tokens<T>& c, index start, index r, Vec<T> (&factor)[GROUP]) {
    const index count = count_from(c, start);
    REASSOC_UNROLL
    for (int i = 0; i < GROUP; ++i) {
        factor[i] = splat(T(1));
        if (c.keep && i < count)
            factor[i] = c.keep_width == 1 ? splat(c.keep[start + i]) : load(c.keep + (start + i) * c.R + r);
    }
}

template <class T, bool GATED>
inline void fold_as(const Tokens<T>& c, index start, const Group<T>& g) {
    constexpr int L = LANES<T>;
    const index count = count_from(c, start);
    for (index s = 0; s <= c.P; ++s) {  // the keys, then each head
        const T *key = c.k + start * c.R, *row = s ? c.q + ((s - 1) * CHUNK + start) * c.R : key;
        T* to = g.rows + s * GROUP * g.ld;
        Vec<T> dot[PAIRS] = {};
        for (index r = 0; r < c.R; r += L) {
            Vec<T> factor[GROUP], faded[GROUP], kept = splat(T(1));  // faded: keys, decayed to token i
            if (GATED) load_factors(c, start, r, factor);
            REASSOC_UNROLL
            for (int i = 0; i < GROUP; ++i) {
                if (GATED) {
                    REASSOC_UNROLL
                    for (int j = 0; j < i; ++j) faded[j] *= factor[i];
                    kept *= factor[i];
                }
                const Vec<T> x = i < count ? load(row + i * c.R + r) : Vec<T>{};
                faded[i] = i < count ? load(key + i * c.R + r) : Vec<T>{};
                REASSOC_UNROLL
                for (int j = 0; j <= i; ++j) dot[pair(i, j)] += x * faded[j];
                store<T>(to + i * g.ld + r, GATED ? kept * x : x);
            }
            if (!GATED || s) continue;
            REASSOC_UNROLL
            for (int i = 0; i < GROUP; ++i) store<T>(g.write + i * g.ld + r, faded[i]);
            store<T>(g.kept + r, kept);
        }
        store_sums<T, PAIRS>(dot, g.pairs + s * Group<T>::PAIR_ROOM);
    }
}
template <class T>
inline void fold(const Tokens<T>& c, index start, const Group<T>& g) {
    if (c.keep)
        fold_as<T, true>(c, start, g);
    else
        fold_as<T, false>(c, start, g);
}

// u [GROUP][width] from the reads S^T k [GROUP][width] of a delta rule, for columns `from` on; v - S^T k (of the
// states in between) goes to `error`, unless null.
template <class T>
inline void solve(const Tokens<T>& c, index start, const Group<T>& g, index from, index width, const T* reads,
                  T* error, T* u) {
    constexpr int L = LANES<T>;
    const index count = count_from(c, start);
    for (index at = 0; at < width; at += L) {
        Vec<T> x[GROUP];
        REASSOC_UNROLL
        for (int i = 0; i < GROUP; ++i) {
            x[i] = i < count ? load(c.v + (start + i) * c.ldv + from + at) : Vec<T>{};
            if (c.beta) {
                x[i] -= load(reads + i * width + at);
                REASSOC_UNROLL
                for (int j = 0; j < i; ++j) x[i] -= splat(g.pairs[pair(i, j)]) * x[j];
                if (error) store<T>(error + i * width + at, x[i]);
                x[i] *= splat(i < count ? c.beta[start + i] : T(0));
            }
            store<T>(u + i * width + at, x[i]);
        }
    }
}

// z after the group.
template <class T>
inline void advance_normalizer(const Tokens<T>& c, const Group<T>& g, T* z) {
    for (index r = 0; r < c.R; r += LANES<T>) {
        Vec<T> x = load(z + r);
        if (g.kept) x *= load(g.kept + r);
        REASSOC_UNROLL
        for (int i = 0; i < GROUP; ++i) x += load(g.write + i * g.ld + r);
        store<T>(z + r, x);
    }
}

// den of the group's tokens, from z before it.
template <class T>
inline void read_normalizer(const Tokens<T>& c, index start, const Group<T>& g, const T* z, T* den) {
    for (index p = 0; p < c.P; ++p) {
        const T* row = g.rows + (1 + p) * GROUP * g.ld;
        Vec<T> dot[GROUP] = {};
        for (index r = 0; r < c.R; r += LANES<T>)
            REASSOC_UNROLL
            for (int i = 0; i < GROUP; ++i) dot[i] += load(row + i * g.ld + r) * load(z + r);
        T total[GROUP + LANES<T>];
        store_sums<T, GROUP>(dot, total);
        for (int i = 0; i < count_from(c, start); ++i) {
            REASSOC_UNROLL
            for (int j = 0; j <= i; ++j) total[i] += g.pairs[(1 + p) * Group<T>::PAIR_ROOM + pair(i, j)];
            den[p * CHUNK + start + i] = total[i];
        }
    }
}

// One group meets columns `from` to from + width of the state: S is advanced; with queries, o is written.
template <class T>
inline void advance(const Tokens<T>& c, index start, const Group<T>& g, index from, index width, T* S, T* o,
                    T* reads) {
    constexpr int L = LANES<T>;
    T* u = reads + (1 + c.P) * GROUP * width;
    const index skipped = c.beta ? 0 : GROUP;  // an additive rule does not read with its keys
    if (c.beta || c.P)
        read(g.rows + skipped * g.ld, g.ld, (1 + c.P) * GROUP - skipped, (const T*)S, width, c.R, width, false,
             reads + skipped * width, width);
    solve(c, start, g, from, width, reads, (T*)nullptr, u);
    for (index p = 0; p < c.P; ++p) {
        const T* weights = g.pairs + (1 + p) * Group<T>::PAIR_ROOM;
        for (index at = 0; at < width; at += L)
            for (int i = 0; i < count_from(c, start); ++i) {
                Vec<T> x = load(reads + ((1 + p) * GROUP + i) * width + at);
                REASSOC_UNROLL
                for (int j = 0; j <= i; ++j) x += splat(weights[pair(i, j)]) * load(u + j * width + at);
                store<T>(o + (p * CHUNK + start + i) * c.E + from + at, x);
            }
    }
    write((const T*)g.kept, (const T*)g.write, g.ld, GROUP, u, width, S, width, c.R, width);
}

template <class T>
inline index recur_scratch(index R, index P) {
    return Group<T>::size(R, P) + (2 + P) * GROUP * BLOCK<T>;
}

// Advances blocks [first, last) of S and writes the columns of o that belong to them: o (P x CHUNK x E), of
// which only tokens below n are touched. With z, whoever has block 0 advances z and writes den (P x CHUNK).
// `ahead` as in additive.h.
template <class T, class Ahead = Nothing>
inline void recur(const Tokens<T>& c, T* S, T* z, T* o, T* den, index first, index last, T* scratch,
                  const Ahead& ahead = {}) {
    if (first >= last) return;
    const Group<T> g(scratch, c.R, c.P, c.keep);
    T* reads = scratch + Group<T>::size(c.R, c.P);
    for (index start = 0; start < c.n; start += GROUP) {
        ahead(start, start + GROUP);
        fold(c, start, g);
        if (z && first == 0) {
            read_normalizer<T>(c, start, g, z, den);
            advance_normalizer(c, g, z);
        }
        for (index from = first * BLOCK<T>; from < last * BLOCK<T> && from < c.E; from += BLOCK<T>) {
            const index width = c.E - from < BLOCK<T> ? c.E - from : BLOCK<T>;
            advance(c, start, g, from, width, S + c.R * from, o, reads);
        }
    }
}

}  // namespace reassoc::REASSOC_ISA
