// Features that span many powers of ten: exponential ones (a mantissa times the exponential of a logarithm),
// and decays per feature. A chunk is brought to one origin per feature where that is safe, else the tokens
// are walked one by one.
//
// The state is kept as exp(scale) S with one scale per feature, the running maximum of what was written
// (decayed as the state is). A later key of any size must not push earlier ones below the smallest number:
// so a chunk has a common origin only while no position sees its own maximum SPREAD below that origin.
#pragma once

#include "features.h"

namespace reassoc::REASSOC_ISA {

constexpr double SPREAD = 40;  // e^40 squared still fits a float with room for sums

template <class T>
REASSOC_INLINE Vec<T> or_zero(Vec<T> log) {  // minus infinity as an origin: nothing there, any origin does
    return log == -T(__builtin_inf()) ? Vec<T>{} : log;
}

// Rows of logarithms: of width R, or one per row for all features; hidden rows are minus infinity.
template <class T>
inline void take_logs(const View& view, index b, index h, index start, index n, index r, index R, const bool* mask,
                      T hidden, T* to) {
    const Vec<T> blank = splat(hidden);
    typed(view, b * view.batch + h * view.head + start * view.position, [&](auto* from) {
        for (index t = 0; t < n; ++t, from += view.position) {
            T* row_t = to + t * R;
            if (mask && !mask[t]) {
                for (index at = 0; at < R; at += LANES<T>) store(row_t + at, blank);
            } else if (view.width == 1) {
                const Vec<T> x = splat(T(to_float(*from)));
                for (index at = 0; at < R; at += LANES<T>) store(row_t + at, x);
            } else {
                row<T>(from, view.width, R, row_t, [](Vec<T> x) { return x; });
            }
            // The padding holds features that nothing ever writes.
            if (!(mask && !mask[t]))
                for (index f = r; f < R; ++f) row_t[f] = hidden;
        }
    });
}

template <class T>
struct Grades {
    index n, R;
    bool exponential, gated;
    T *log, *gate;       // [n][R]: of the keys, zero where they are not exponential; log decays
    T *level, *suffix;   // [n][R]: scale after each position; decay from after it to the end
    T *before, *after;   // [R]: scale before and after the chunk
    T* shrink;           // [R]: exp(before + decay - after), what the old state is multiplied by
    bool steady;         // one origin serves the whole chunk
};

// Fills level, suffix, after, shrink and steady. `causal` false: only the end is read, which is always steady.
template <class T>
inline void grade(Grades<T>& g, const bool* mask, bool causal) {
    constexpr int L = LANES<T>;
    const T low = -T(__builtin_inf());
    std::memcpy(g.after, g.before, sizeof(T) * g.R);
    if (g.gated) {
        // Suffix sums in double: their differences decide about weights near one.
        double total[64];
        for (index r = 0; r < g.R; r += L) {
            for (int l = 0; l < L; ++l) total[l] = 0;
            for (index t = g.n - 1; t >= 0; --t)
                for (int l = 0; l < L; ++l) {
                    g.suffix[t * g.R + r + l] = T(total[l]);
                    total[l] += double(g.gate[t * g.R + r + l]);
                }
            for (int l = 0; l < L; ++l) g.shrink[r + l] = T(total[l]);
        }
    } else {
        std::memset(g.suffix, 0, sizeof(T) * g.n * g.R);
        std::memset(g.shrink, 0, sizeof(T) * g.R);
    }
    // A hidden position sees what the last real one saw. Before the first real one that is the old state; where
    // this is empty too there is nothing to read.
    bool steady = true, empty = g.exponential;
    for (index r = 0; r < g.R; ++r) empty &= g.before[r] == low;
    for (index r = 0; r < g.R; r += L) {
        Vec<T> m = load(g.before + r);
        if (g.exponential) {
            for (index t = 0; t < g.n; ++t) {
                if (g.gated) m += load(g.gate + t * g.R + r);
                m = larger<T>(m, load(g.log + t * g.R + r));
                store(g.level + t * g.R + r, m);
            }
            store(g.after + r, m);
        } else {
            for (index t = 0; t < g.n; ++t) store(g.level + t * g.R + r, Vec<T>{});
        }
        Ints<T> wide{};
        bool covered = empty;
        for (index t = 0; causal && t < g.n; ++t) {
            if (covered && mask && !mask[t]) {
                wide |= ~(load(g.suffix + t * g.R + r) >= -T(SPREAD));  // reads nothing, but must stay finite
                continue;
            }
            covered |= !mask || mask[t];
            const Vec<T> seen = load(g.level + t * g.R + r);
            const Vec<T> origin = m * T(g.exponential) - load(g.suffix + t * g.R + r);
            // Nothing at all in this feature, ever: no spread. Comparisons with NaN count as wide.
            wide |= ~((origin - seen <= T(SPREAD)) | (g.exponential ? m == low : Ints<T>{}));
        }
        for (int l = 0; l < L; ++l) steady &= wide[l] == 0;
        const Vec<T> factor = decaying(load(g.before + r) + load(g.shrink + r) - or_zero<T>(load(g.after + r)));
        store(g.shrink + r, factor);
    }
    g.steady = steady;
}

// weight (n x R) = exp(log - origin) for the keys; where `steady` all at the scale after the chunk.
template <class T>
inline void weigh_keys(const Grades<T>& g, T* weight) {
    for (index t = 0; t < g.n; ++t)
        for (index r = 0; r < g.R; r += LANES<T>) {
            const index at = t * g.R + r;
            const Vec<T> origin = or_zero<T>(load(g.steady ? g.after + r : g.level + at));
            store(weight + at, decaying(load(g.log + at) + (g.steady ? load(g.suffix + at) : Vec<T>{}) - origin));
        }
}

// weight (n x R) = exp(log + origin - row) for queries; row[t] is their largest exponent, 0 where there is none.
template <class T>
inline void weigh_queries(const Grades<T>& g, const T* log, T* weight, T* row) {
    for (index t = 0; t < g.n; ++t) {
        Vec<T> best = splat(-T(__builtin_inf()));
        for (index r = 0; r < g.R; r += LANES<T>) {
            const index at = t * g.R + r;
            const Vec<T> after = load(g.after + r);  // minus infinity whatever the decay: nothing is there
            Vec<T> x = load(g.level + at);
            if (g.steady) x = select<T>(after == -T(__builtin_inf()), after, after - load(g.suffix + at));
            if (log) x += load(log + at);
            store(weight + at, x);
            best = larger<T>(best, x);
        }
        T level = g.exponential ? largest<T>(best) : T(0);
        if (level == -T(__builtin_inf())) level = 0;
        row[t] = level;
        for (index r = 0; r < g.R; r += LANES<T>)
            store(weight + t * g.R + r, decaying(load(weight + t * g.R + r) - splat(level)));
    }
}

// Factors by which the state decays at each position, and is brought to the new scale (where not steady).
template <class T>
inline void keep_factors(const Grades<T>& g, T* keep) {
    for (index r = 0; r < g.R; r += LANES<T>) {
        Vec<T> scale = load(g.before + r);
        for (index t = 0; t < g.n; ++t) {
            const Vec<T> now = load(g.level + t * g.R + r);
            if (g.gated) scale += load(g.gate + t * g.R + r);
            store(keep + t * g.R + r, decaying(scale - or_zero<T>(now)));
            scale = now;
        }
    }
}

}  // namespace reassoc::REASSOC_ISA
