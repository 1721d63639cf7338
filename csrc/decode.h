// A decode step of all heads: features, one token of each key head (see step.h), quotients.
#pragma once

#include "parallel.h"
#include "step.h"
#include "walk.h"

namespace reassoc::REASSOC_ISA {

constexpr index WORTH_THREADS = 1 << 18;  // numbers of state: below, waking a thread costs more than it gives

// One row of `width` numbers of the caller's type, mapped, as whole registers.
template <class T>
inline void take_row(const void* data, Kind kind, index offset, index width, index size, Map map, T* to) {
    View view;
    view.data = const_cast<void*>(data), view.kind = kind;
    typed(view, offset, [&](auto* from) {
        mapped<T>(map, [&](auto function) { row<T>(from, width, size, to, function); });
    });
}

template <class T>
REASSOC_INLINE T take_number(const void* data, Kind kind, index offset) {
    View view;
    view.data = const_cast<void*>(data), view.kind = kind;
    T found{};
    typed(view, offset, [&](auto* from) { found = T(to_float(*from)); });
    return found;
}

template <class T>
struct DecodeScratch {
    T *k, *q, *wide, *keep, *fade, *read, *values;
    explicit DecodeScratch(Arena& arena, const Decoder& d) {
        const index R = padded<T>(d.features);
        k = arena.take<T>(R), q = arena.take<T>(d.share * R), wide = arena.take<T>(R), keep = arena.take<T>(R);
        fade = arena.take<T>(R), read = arena.take<T>(d.share * (d.columns + 1)), values = arena.take<T>(padded<T>(d.columns));
    }
    static std::size_t bytes(const Decoder& d) {
        const index R = padded<T>(d.features);
        return Arena::bytes<T>(R * (4 + d.share) + d.share * (d.columns + 1) + padded<T>(d.columns)) + 7 * 64;
    }
};

template <class T>
inline void decode_head(const Decoder& d, const Token& t, index b, index g, const DecodeScratch<T>& s) {
    const index r = d.features, R = padded<T>(r), C = d.columns + d.normalizer, at = b * d.groups + g;
    const bool real = !t.mask || t.mask[b];
    const T low = -T(__builtin_inf());
    T beta = 0, total[1];
    take_row<T>(t.key, d.kind, at * r, r, R, d.map, s.wide);
    if (d.sum_normalize) normalize_rows(s.wide, 1, R, total);
    std::memcpy(s.k, s.wide, sizeof(T) * R);
    take_row<T>(t.value, d.kind, at * d.columns, d.columns, padded<T>(d.columns), Map::given, s.values);
    index keep_width = 0;
    if (t.log_decay) {
        keep_width = d.gate_width;
        View gate;
        gate.data = const_cast<void*>(t.log_decay), gate.kind = d.gate_kind;
        typed(gate, b * d.gate_batch + g * d.gate_head, [&](auto* from) {
            for (index f = 0; f < R; ++f) s.keep[f] = f < r && real ? T(to_float(from[keep_width == 1 ? 0 : f])) : T(0);
        });
    }
    if (t.beta && real) beta = take_number<T>(t.beta, d.beta_kind, at);
    T* scale = d.exponential ? static_cast<T*>(t.scale) + at * r : nullptr;
    if (scale) {  // the state moves to the scale of its largest logarithm, as in graded.h
        for (index f = 0; f < r; ++f) {
            // What rounding takes from the scale goes into the factor, else slow decays would be lost in it.
            const double kept = double(scale[f]) + double(keep_width ? s.keep[f] : T(0));
            const T log = real ? s.k[f] : low, now = kept > double(log) ? T(kept) : log, origin = now == low ? T(0) : now;
            s.keep[f] = T(kept - double(origin)), s.k[f] = log - origin, scale[f] = now;
        }
        for (index f = 0; f < R; f += LANES<T>) store(s.k + f, decaying(load(s.k + f)));
        keep_width = r;
    } else if (!real) {  // after the map, which may have met a NaN
        std::memset(s.k, 0, sizeof(T) * R);
    }
    if (!real) std::memset(s.values, 0, sizeof(T) * d.columns);
    if (keep_width)
        for (index f = 0; f < R; f += LANES<T>) {
            const Vec<T> log = load(s.keep + f);
            store(s.fade + f, losing(log)), store(s.keep + f, decaying(log));
        }
    for (index p = 0; p < d.share; ++p) {
        take_row<T>(t.query, d.kind, (at * d.share + p) * r, r, R, d.map, s.wide);
        if (d.sum_normalize) normalize_rows(s.wide, 1, R, total);
        if (scale) {
            T best = low;
            for (index f = 0; f < r; ++f) {
                s.wide[f] += scale[f];
                best = s.wide[f] > best || !(s.wide[f] == s.wide[f]) ? s.wide[f] : best;
            }
            if (best == low) best = 0;
            for (index f = 0; f < R; f += LANES<T>) store(s.wide + f, decaying(load(s.wide + f) - splat(best)));
        }
        std::memcpy(s.q + p * r, s.wide, sizeof(T) * r);
    }
    Step<T> step_{r, C, d.share, d.normalizer, s.k, s.values, s.q, t.beta ? &beta : nullptr, keep_width ? s.keep : nullptr,
                  keep_width, static_cast<T*>(t.memory) + at * r * C, t.lost && real ? static_cast<T*>(t.lost) + at * r * C : nullptr,
                  s.read, s.fade};
    step(step_);
    for (index p = 0; p < d.share; ++p) {
        T* read = s.read + p * C;
        bool bad = false;
        T factor = 1;
        if (d.divide) {
            factor = read[C - 1] + T(d.eps);
            bad = factor == T(0);
        } else if (d.sum_normalize) {
            bad = true;
            for (index f = 0; f < r; ++f) bad &= s.q[p * r + f] == T(0);
        }
        View out;
        out.data = t.out, out.kind = d.kind;
        typed(out, (at * d.share + p) * d.columns, [&](auto* to) {
            using Out = __typeof__(*to);
            for (index c = 0; c < d.columns; ++c) to[c] = narrow<Out>(bad ? T(d.fill) : d.divide ? read[c] / factor : read[c]);
        });
    }
}

template <class T>
inline void decode(const Decoder& d, const Token& t) {
    const index items = d.batch * d.groups, work = items * d.features * (d.columns + d.normalizer);
    const int team = work < WORTH_THREADS ? 1 : int(d.threads < items ? d.threads : items);
    if (items == 0) return;
    parallel_for(team, team, [&](index member, int) {
        Arena arena(DecodeScratch<T>::bytes(d));
        const DecodeScratch<T> scratch(arena, d);
        for (index item = member; item < items; item += team) decode_head<T>(d, t, item / d.groups, item % d.groups, scratch);
    });
    for (index b = 0; b < d.batch; ++b) t.length[b] += !t.mask || t.mask[b];
}

}  // namespace reassoc::REASSOC_ISA
