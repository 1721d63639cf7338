// One token of one key head on a state that stays where the caller keeps it: decay, write, then read.
//
// memory is [R][C], row after row without padding; where z is kept it is the last column. What rounding takes
// from the state is kept in `lost`, of the same shape, and given back with the next token (Kahan 1965).
#pragma once

#include "vec.h"

namespace reassoc::REASSOC_ISA {

template <class T>
struct Step {
    index R, C, P;
    bool has_z;        // the last column gains k itself, under every rule
    const T *k, *v;    // [R], [C - has_z]
    const T* q;        // [P][R]
    const T* beta;     // one number, or null: an additive rule
    const T* keep;     // factors in [0, 1]: [keep_width], or null
    index keep_width;  // 1 or R
    T *memory, *lost;  // [R][C]; lost may be null: a plain sum
    T* out;            // [P][C]: reads, that of z included
    const T* fade = nullptr;  // 1 - keep to its own last digit, as long as keep; null: from keep itself
};

// W neighboring columns: a register, part of one, or a single number.
template <class T, int W>
struct Columns {
    typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T>
struct Columns<T, 1> {
    using type = T;
};
template <int WIDTH, int NUMBER>
struct Width {
    static constexpr int W = WIDTH, N = NUMBER;
};
template <class V, class T>
REASSOC_INLINE V get(const T* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// How a row decays. Near 1 the product keep * row would lose as much to rounding, token after token, as any sum;
// so there what fades joins what is added, whose rounding is kept. Further away rounding is forgotten within a
// few tokens, and a factor of 0 must leave nothing.
enum class Decay { plain, none, near, far };  // plain: without `lost`
template <Decay DECAY>
struct Form {
    static constexpr Decay value = DECAY;
};

// keep * memory + term, and what rounding takes from it.
template <Decay DECAY, class V, class T>
REASSOC_INLINE V renew(T* memory, T* lost, T keep, T fade, V term) {
    const V row = get<V>(memory);
    V total;
    if constexpr (DECAY == Decay::plain) {
        total = row * keep + term;
    } else {
        const V left = get<V>(lost), before = DECAY == Decay::far ? row * keep : row;
        term = DECAY == Decay::none ? term - left : term - left * keep;
        if (DECAY == Decay::near) term = term - row * fade;
        total = before + term;
        const V taken = (total - before) - term;
        std::memcpy(lost, &taken, sizeof taken);
    }
    std::memcpy(memory, &total, sizeof total);
    return total;
}

// Columns at.. of every row, N times W of them and, with Z, the one behind, that of z: written, then read with
// the first query if QUERY. All in one sweep, for the state may come from far away.
template <class T, int W, int N, bool Z, bool LOST, bool QUERY>
inline void write_columns(const Step<T>& s, index at, const typename Columns<T, W>::type (&u)[N]) {
    using V = typename Columns<T, W>::type;
    V read[N] = {};
    T read_z = 0;
    auto write = [&](auto decay, index r, T keep, T fade) {
        constexpr Decay DECAY = decltype(decay)::value;
        const T k = s.k[r], q = QUERY ? s.q[r] : T(0);
        T *memory = s.memory + r * s.C + at, *lost = LOST ? s.lost + r * s.C + at : nullptr;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const V row = renew<DECAY, V>(memory + n * W, lost + n * W, keep, fade, k * u[n]);
            if (QUERY) read[n] += q * row;
        }
        if (Z) {
            const T row = renew<DECAY, T>(memory + N * W, lost + N * W, keep, fade, k);
            if (QUERY) read_z += q * row;
        }
    };
    for (index r = 0; r < s.R; ++r) {
        const index own = s.keep_width > 1 ? r : 0;
        const T keep = s.keep ? s.keep[own] : T(1), fade = s.keep && s.fade ? s.fade[own] : T(1) - keep;
        if constexpr (!LOST)
            write(Form<Decay::plain>{}, r, keep, fade);
        else if (!s.keep)
            write(Form<Decay::none>{}, r, keep, fade);
        else if (keep >= T(0.5))
            write(Form<Decay::near>{}, r, keep, fade);
        else
            write(Form<Decay::far>{}, r, keep, fade);
    }
    if (!QUERY) return;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) std::memcpy(s.out + at + n * W, &read[n], sizeof(V));
    if (Z) s.out[at + N * W] = read_z;
}

// What those columns hold for the vector x, or for x * keep.
template <class T, int W, int N, bool Z>
inline void read_columns(const Step<T>& s, index at, const T* x, const T* keep, T* out) {
    using V = typename Columns<T, W>::type;
    V read[N] = {};
    T read_z = 0;
    for (index r = 0; r < s.R; ++r) {
        const T weight = keep ? x[r] * keep[s.keep_width > 1 ? r : 0] : x[r];
        const T* row = s.memory + r * s.C + at;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) read[n] += weight * get<V>(row + n * W);
        if (Z) read_z += weight * row[N * W];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) std::memcpy(out + n * W, &read[n], sizeof(V));
    if (Z) out[N * W] = read_z;
}

template <class T, int W, int N, bool Z>
inline void step_columns(const Step<T>& s, index at) {
    using V = typename Columns<T, W>::type;
    V u[N];
    std::memcpy(u, s.v + at, sizeof u);
    if (s.beta) {
        T held[N * W];
        read_columns<T, W, N, false>(s, at, s.k, s.keep, held);
        for (int n = 0; n < N; ++n) u[n] = *s.beta * (u[n] - get<V>(held + n * W));
    }
    if (s.lost)
        s.P ? write_columns<T, W, N, Z, true, true>(s, at, u) : write_columns<T, W, N, Z, true, false>(s, at, u);
    else
        s.P ? write_columns<T, W, N, Z, false, true>(s, at, u) : write_columns<T, W, N, Z, false, false>(s, at, u);
    for (index p = 1; p < s.P; ++p)
        read_columns<T, W, N, Z>(s, at, s.q + p * s.R, (const T*)nullptr, s.out + p * s.C + at);
}

template <class T>
inline void step(const Step<T>& s) {
    constexpr int L = LANES<T>, PART = 16 / int(sizeof(T));
    const index values = s.C - s.has_z;
    index at = 0;
    auto columns = [&](auto width) {
        constexpr int W = decltype(width)::W, N = decltype(width)::N;
        for (; at + N * W <= values; at += N * W)
            if (s.has_z && at + N * W == values)
                step_columns<T, W, N, true>(s, at);
            else
                step_columns<T, W, N, false>(s, at);
    };
    columns(Width<L, 4>{});
    columns(Width<L, 1>{});
    if (PART < L) columns(Width<PART, 1>{});
    columns(Width<1, 1>{});
}

}  // namespace reassoc::REASSOC_ISA
