// The recurrence, backward. What a group does (see recurrent.h) in terms of its folded keys, queries and pairs:
//   p_i = S^T k_i + sum_{j < i} A_ij u_j     u_i = beta_i (v_i - p_i)     o_i = S^T q_i + sum_{j <= i} B_ij u_j
//   S' = keep S + sum_j w_j u_j^T            (w: keys decayed to the group's end)
// and so, last token first,
//   du_i = dS'^T w_i + sum_{j >= i} B_ji do_j + sum_{j > i} A_ji dp_j,   dp_i = -beta_i du_i,   dv_i = beta_i du_i
//   dS = keep dS' + sum_i k_i dp_i^T + q_i do_i^T
//   dk_i = S dp_i,  dq_i = S do_i,  dw_j = dS' u_j,  dA_ij = dp_i . u_j,  dB_ij = do_i . u_j,  dkeep = rows of dS' S
// The products along rows read S and dS' mirrored, so that they too run over whole registers. The states
// between groups are made again from the one before the chunk, a strip of columns at a time, to stay in cache.
#pragma once

#include "recurrent.h"

namespace reassoc::REASSOC_ISA {

template <class T>
struct TokensGradient {
    const T *d_o, *d_den;  // like o and den; d_den null without z
    T *dS, *dz;            // in: of the state after the chunk; out: of the state before it
    T *dq, *dk, *dv;       // [P][CHUNK][R], [n][R], [n][E]: written
    T* dbeta;              // [n], or null
    T* dlog;               // of the logarithm of keep: [n][keep_width], or null (without keep, always)
};

constexpr index GROUPS = CHUNK / GROUP;

// Columns of a strip: the states of all groups take at most a quarter of a common L2 cache of 1 MiB.
template <class T>
REASSOC_INLINE index strip_width(index R, index E) {
    index width = BLOCK<T>;
    while (width > LANES<T> && GROUPS * R * width * index(sizeof(T)) > (1 << 18)) width /= 2;
    return width < E ? width : E;
}

// Where everything of one chunk is kept.
template <class T>
struct Workspace {
    T* scratch;  // null: only `used` is wanted
    index R, P, width, ld, used = 0;
    bool gated;
    T *groups, *gradients;           // GROUPS of each
    T *mirrored, *d_mirrored;        // [GROUPS][width], [width], ld apart: S before each group, and dS'
    T *S, *u, *error, *terms, *du;   // [R], [CHUNK], [CHUNK], [1 + P][GROUP], [GROUP], all of `width`
    T* z;                            // [GROUPS + 1], ld apart

    Workspace(T* scratch, index R, index E, index P, bool gated)
        : scratch(scratch), R(R), P(P), width(strip_width<T>(R, E)), ld(Group<T>::apart(R)), gated(gated) {
        groups = take(GROUPS * Group<T>::size(R, P));
        gradients = take(GROUPS * Group<T>::size(R, P));
        mirrored = take(GROUPS * width * ld);
        d_mirrored = take(width * ld);
        S = take(R * width);
        u = take(CHUNK * width);
        error = take(CHUNK * width);
        terms = take((1 + P) * GROUP * width);
        du = take(GROUP * width);
        z = take((GROUPS + 1) * ld);
    }
    T* take(index count) { return used += count, scratch ? scratch + used - count : nullptr; }
    Group<T> group(index g) const { return {groups + g * Group<T>::size(R, P), R, P, gated}; }
    Group<T> gradient(index g) const { return {gradients + g * Group<T>::size(R, P), R, P, gated}; }
};

template <class T>
inline index recur_backward_scratch(index R, index E, index P) {
    return Workspace<T>(nullptr, R, E, P, true).used;
}

// den and z: like one more column of values, all 1, that no beta touches.
template <class T>
inline void normalizer_backward(const Tokens<T>& c, const T* z0, const TokensGradient<T>& d,
                                const Workspace<T>& w) {
    constexpr int L = LANES<T>;
    const index last = (c.n - 1) / GROUP;
    std::memcpy(w.z, z0, sizeof(T) * c.R);
    for (index g = 0; g < last; ++g) {
        std::memcpy(w.z + (g + 1) * w.ld, w.z + g * w.ld, sizeof(T) * c.R);
        advance_normalizer(c, w.group(g), w.z + (g + 1) * w.ld);
    }
    for (index g = last; g >= 0; --g) {
        const Group<T> group = w.group(g), grad = w.gradient(g);
        const index start = g * GROUP, count = count_from(c, start);
        for (index r = 0; r < c.R; r += L) {
            const Vec<T> z = load(w.z + g * w.ld + r), dz = load(d.dz + r);
            Vec<T> before = dz;
            if (c.keep) {
                before *= load(group.kept + r);
                store<T>(grad.kept + r, load(grad.kept + r) + dz * z);
            }
            for (int i = 0; i < count; ++i)
                store<T>(grad.write + i * w.ld + r, load(grad.write + i * w.ld + r) + dz);
            for (index p = 0; p < c.P; ++p)
                for (int i = 0; i < count; ++i) {
                    const index row = ((1 + p) * GROUP + i) * w.ld + r;
                    const Vec<T> d_den = splat(d.d_den[p * CHUNK + start + i]);
                    store<T>(grad.rows + row, load(grad.rows + row) + d_den * z);
                    before += d_den * load(group.rows + row);
                }
            store<T>(d.dz + r, before);
        }
        for (index p = 0; p < c.P; ++p)
            for (int i = 0; i < count; ++i)
                REASSOC_UNROLL
                for (int j = 0; j <= i; ++j)
                    grad.pairs[(1 + p) * Group<T>::PAIR_ROOM + pair(i, j)] += d.d_den[p * CHUNK + start + i];
    }
}

// The states before each group of a strip, mirrored, and what was written; S is columns `from` on, rows lds apart.
template <class T>
inline void replay(const Tokens<T>& c, index from, index width, const T* S, index lds, const Workspace<T>& w) {
    for (index r = 0; r < c.R; ++r) std::memcpy(w.S + r * width, S + r * lds, sizeof(T) * width);
    for (index start = 0; start < c.n; start += GROUP) {
        const Group<T> group = w.group(start / GROUP);
        T* u = w.u + start * width;
        transpose<T>(w.S, width, w.mirrored + start / GROUP * w.width * w.ld, w.ld, c.R, width);
        if (c.beta) read<T>(group.rows, w.ld, GROUP, w.S, width, c.R, width, false, w.du, width);
        solve<T>(c, start, group, from, width, w.du, w.error + start * width, u);
        write<T>(group.kept, group.write, w.ld, GROUP, u, width, w.S, width, c.R, width);
    }
}

// `terms` = dp and do of one group and strip, from du = dS'^T w; writes dv, adds to dbeta.
template <class T>
inline void solve_backward(const Tokens<T>& c, index start, const Group<T>& group, index from, index width,
                           const TokensGradient<T>& d, const Workspace<T>& w) {
    constexpr int L = LANES<T>;
    const index count = count_from(c, start);
    for (index p = 0; p < c.P; ++p)
        REASSOC_UNROLL
        for (int i = 0; i < GROUP; ++i) {
            T* to = w.terms + ((1 + p) * GROUP + i) * width;
            if (i < count)
                std::memcpy(to, d.d_o + (p * CHUNK + start + i) * c.E + from, sizeof(T) * width);
            else
                std::memset(to, 0, sizeof(T) * width);
        }
    Vec<T> d_beta[GROUP] = {};
    for (index at = 0; at < width; at += L) {
        Vec<T> du[GROUP], dp[GROUP] = {};
        REASSOC_UNROLL
        for (int i = 0; i < GROUP; ++i) du[i] = load(w.du + i * width + at);
        for (index p = 0; p < c.P; ++p) {
            const T* weights = group.pairs + (1 + p) * Group<T>::PAIR_ROOM;
            REASSOC_UNROLL
            for (int j = 0; j < GROUP; ++j) {
                const Vec<T> d_o = load(w.terms + ((1 + p) * GROUP + j) * width + at);
                REASSOC_UNROLL
                for (int i = 0; i <= j; ++i) du[i] += splat(weights[pair(j, i)]) * d_o;
            }
        }
        REASSOC_UNROLL
        for (int i = GROUP - 1; i >= 0; --i) {
            Vec<T> dv = du[i];
            if (c.beta) {
                REASSOC_UNROLL
                for (int j = i + 1; j < GROUP; ++j) dv += splat(group.pairs[pair(j, i)]) * dp[j];
                d_beta[i] += dv * load(w.error + (start + i) * width + at);
                dv *= splat(i < count ? c.beta[start + i] : T(0));
                dp[i] = -dv;
            }
            store<T>(w.terms + i * width + at, dp[i]);
            if (i < count) store<T>(d.dv + (start + i) * c.E + from + at, dv);
        }
    }
    if (!c.beta || !d.dbeta) return;
    T total[GROUP + L];
    store_sums<T, GROUP>(d_beta, total);
    for (int i = 0; i < count; ++i) d.dbeta[start + i] += total[i];
}

// One strip of columns through all groups, last first; dS is columns `from` on, rows lds apart. The first strip
// calls `ahead`, see additive.h.
template <class T, class Ahead>
inline void strip_backward(const Tokens<T>& c, index from, index width, const TokensGradient<T>& d, T* dS,
                           index lds, const Workspace<T>& w, const Ahead& ahead) {
    constexpr int L = LANES<T>;
    // An additive rule does not read with its keys: their terms are zero, and only decay what has no queries.
    const index skipped = c.beta || c.P == 0 ? 0 : GROUP, vectors = (1 + c.P) * GROUP - skipped;
    for (index g = (c.n - 1) / GROUP; g >= 0; --g) {
        if (from == 0) ahead(g * GROUP, (g + 1) * GROUP);
        const Group<T> group = w.group(g), grad = w.gradient(g);
        const T *S = w.mirrored + g * w.width * w.ld, *u = w.u + g * GROUP * width;
        transpose<T>(dS, lds, w.d_mirrored, w.ld, c.R, width);
        read<T>(u, width, GROUP, w.d_mirrored, w.ld, width, c.R, true, grad.write, w.ld);
        if (d.dlog)
            for (index r = 0; r < c.R; r += L) {
                Vec<T> x = load(grad.kept + r);
                for (index e = 0; e < width; ++e) x += load(w.d_mirrored + e * w.ld + r) * load(S + e * w.ld + r);
                store<T>(grad.kept + r, x);
            }
        read<T>(group.write, w.ld, GROUP, dS, lds, c.R, width, false, w.du, width);
        solve_backward(c, g * GROUP, group, from, width, d, w);
        for (index s = skipped / GROUP; s <= c.P; ++s) {
            Vec<T> dot[PAIRS] = {};
            for (index at = 0; at < width; at += L)
                REASSOC_UNROLL
                for (int i = 0; i < GROUP; ++i) {
                    const Vec<T> term = load(w.terms + (s * GROUP + i) * width + at);
                    REASSOC_UNROLL
                    for (int j = 0; j <= i; ++j) dot[pair(i, j)] += term * load(u + j * width + at);
                }
            T total[Group<T>::PAIR_ROOM], *to = grad.pairs + s * Group<T>::PAIR_ROOM;
            store_sums<T, PAIRS>(dot, total);
            for (int i = 0; i < PAIRS; ++i) to[i] += total[i];
        }
        const T* terms = w.terms + skipped * width;
        read<T>(terms, width, vectors, S, w.ld, width, c.R, true, grad.rows + skipped * w.ld, w.ld);
        write<T>(group.kept, group.rows + skipped * w.ld, w.ld, vectors, terms, width, dS, lds, c.R, width);
    }
}

// From the gradient of a folded group to that of its tokens. A product of factors has, with respect to the
// logarithm of each, its own value as derivative: no division, and zero where a factor is zero.
template <class T>
inline void unfold(const Tokens<T>& c, index start, const Group<T>& group, const Group<T>& grad,
                   const TokensGradient<T>& d) {
    constexpr int L = LANES<T>;
    constexpr index ROOM = Group<T>::PAIR_ROOM;
    const index count = count_from(c, start), ld = group.ld;
    Vec<T> d_scalar[GROUP] = {};
    for (index r = 0; r < c.R; r += L) {
        Vec<T> factor[GROUP], key[GROUP], dk[GROUP], first[GROUP], between[PAIRS], faded[PAIRS], d_faded[PAIRS];
        // Folded rows times their gradients: what the decays behind a token get from it, and those ahead of it.
        Vec<T> from_start[GROUP], to_end[GROUP] = {};
        load_factors(c, start, r, factor);
        REASSOC_UNROLL
        for (int i = 0; i < GROUP; ++i) {
            key[i] = i < count ? load(c.k + (start + i) * c.R + r) : Vec<T>{};
            REASSOC_UNROLL
            for (int j = 0; j <= i; ++j) {
                between[pair(i, j)] = i == j ? splat(T(1)) : between[pair(i - 1, j)] * factor[i];
                faded[pair(i, j)] = between[pair(i, j)] * key[j];
                d_faded[pair(i, j)] = i == j ? Vec<T>{} : splat(grad.pairs[pair(i, j)]) * key[i];
            }
            first[i] = factor[0] * between[pair(i, 0)];
            const Vec<T> d_row = load(grad.rows + i * ld + r);
            dk[i] = first[i] * d_row;
            from_start[i] = d_row * load(group.rows + i * ld + r);
            REASSOC_UNROLL
            for (int j = 0; j < i; ++j) dk[i] += splat(grad.pairs[pair(i, j)]) * faded[pair(i, j)];
        }
        for (index p = 0; p < c.P; ++p)
            for (int i = 0; i < count; ++i) {
                const index at = (p * CHUNK + start + i) * c.R + r, row = ((1 + p) * GROUP + i) * ld + r;
                const Vec<T> d_row = load(grad.rows + row), q = load(c.q + at);
                Vec<T> dq = first[i] * d_row;
                from_start[i] += d_row * load(group.rows + row);
                REASSOC_UNROLL
                for (int j = 0; j <= i; ++j) {
                    const Vec<T> weight = splat(grad.pairs[(1 + p) * ROOM + pair(i, j)]);
                    dq += weight * faded[pair(i, j)];
                    d_faded[pair(i, j)] += weight * q;
                }
                store<T>(d.dq + at, dq);
            }
        REASSOC_UNROLL
        for (int j = 0; j < GROUP; ++j) {
            REASSOC_UNROLL
            for (int i = j; i < GROUP; ++i) dk[j] += between[pair(i, j)] * d_faded[pair(i, j)];
            if (c.keep) {  // else the gradient of `write` is that of `rows`: the same keys
                const Vec<T> d_row = load(grad.write + j * ld + r);
                dk[j] += between[pair(GROUP - 1, j)] * d_row;
                to_end[j] = d_row * load(group.write + j * ld + r);
            }
            if (j < count) store<T>(d.dk + (start + j) * c.R + r, dk[j]);
        }
        if (!d.dlog) continue;
        const Vec<T> whole = load(grad.kept + r) * load(group.kept + r);
        for (int l = 0; l < count; ++l) {
            Vec<T> x = whole;
            REASSOC_UNROLL
            for (int i = l; i < GROUP; ++i) {
                x += from_start[i];
                REASSOC_UNROLL
                for (int j = 0; j < l; ++j) x += faded[pair(i, j)] * d_faded[pair(i, j)];
            }
            REASSOC_UNROLL
            for (int j = 0; j < l; ++j) x += to_end[j];
            if (c.keep_width == 1)
                d_scalar[l] += x;
            else
                store<T>(d.dlog + (start + l) * c.R + r, x);
        }
    }
    if (!d.dlog || c.keep_width != 1) return;
    T total[GROUP + L];
    store_sums<T, GROUP>(d_scalar, total);
    for (int l = 0; l < count; ++l) d.dlog[start + l] = total[l];
}

// S and z are those before the chunk; z null if none is kept.
template <class T, class Ahead = Nothing>
inline void recur_backward(const Tokens<T>& c, const T* S, const T* z, const TokensGradient<T>& d, T* scratch,
                           const Ahead& ahead = {}) {
    if (c.n == 0) return;
    const Workspace<T> w(scratch, c.R, c.E, c.P, c.keep);
    for (index g = 0; g * GROUP < c.n; ++g) {
        fold(c, g * GROUP, w.group(g));
        std::memset(w.gradients + g * Group<T>::size(c.R, c.P), 0, sizeof(T) * Group<T>::size(c.R, c.P));
    }
    if (d.dbeta) std::memset(d.dbeta, 0, sizeof(T) * c.n);
    if (z) normalizer_backward(c, z, d, w);
    for (index block = 0; block < c.E; block += BLOCK<T>) {
        const index lds = c.E - block < BLOCK<T> ? c.E - block : BLOCK<T>;
        for (index at = 0; at < lds; at += w.width) {
            const index width = lds - at < w.width ? lds - at : w.width;
            replay(c, block + at, width, S + c.R * block + at, lds, w);
            strip_backward(c, block + at, width, d, d.dS + c.R * block + at, lds, w, ahead);
        }
    }
    for (index g = 0; g * GROUP < c.n; ++g) unfold(c, g * GROUP, w.group(g), w.gradient(g), d);
}

}  // namespace reassoc::REASSOC_ISA
