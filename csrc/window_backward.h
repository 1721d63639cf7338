// Calls with a window, backward. First the queries, from first to last: what they read is computed again, which
// gives their own gradients and, pair by pair, those of the keys in their triangle and bands; for the whole chunks
// before them only the gradient of that state, which is kept. Then the keys, from last to first: the gradients of
// the states that a chunk is a whole part of slide over it as the states themselves did over the queries.
//
// Gradients are taken of the bare features (weights of graded.h undone), so that all parts of one key add up. The
// gradient of a log decay is the sum, from its position on, of q . dq - k . dk, added in double.
#pragma once


#include "backward.h"
#include "window.h"

namespace reassoc::REASSOC_ISA {

template <class T>
class WindowReverse : Reverse<T> {
    using Base = Reverse<T>;
    using Base::call, Base::walk, Base::R, Base::E, Base::P, Base::size, Base::states, Base::gradient, Base::d_o,
        Base::d_den, Base::dq, Base::dk, Base::dv, Base::d_gate, Base::scratch;

public:
    WindowReverse(const Call& c, const Plan& p, index longest)
        : Base(c, p.states ? longest : 0),
          plan(p),
          window(walk, p, true),
          width(walk.graded ? R : 1),
          gated(bool(c.log_decay)),
          arena(Arena::bytes<T>((longest + CHUNK) * (R + E + width) + CHUNK * (R + CHUNK) + R) +
                Arena::bytes<double>(width) + 64 * 7) {
        const index rows = longest + CHUNK;
        all_k = arena.take<T>(rows * R), all_v = arena.take<T>(rows * E), gain = arena.take<T>(rows * width);
        part = arena.take<T>(CHUNK * R), dA = arena.take<T>(CHUNK * CHUNK), decay = arena.take<T>(R);
        running = arena.take<double>(width);
    }

    void run(const Span& span) {
        const index count = span.item.keys;
        std::memset(all_k, 0, sizeof(T) * count * R);
        std::memset(all_v, 0, sizeof(T) * count * E);
        std::memset(gain, 0, sizeof(T) * count * width);
        window.begin(span);
        window.warm_up(span, span.lead);
        for (index m = span.lead; m < span.chunks(); ++m) queries(span, m);
        window.sliding.clear();
        std::memset(running, 0, sizeof(double) * width);
        for (index m = span.chunks() - 1; m >= 0; --m) keys(span, m);
    }

private:
    const Plan plan;
    Window<T> window;
    const index width;
    const bool gated;
    Arena arena;
    // Of all keys: gradients, [keys][R] and [keys][E]; q . dq less k . dk at their positions, [keys][width].
    T *all_k, *all_v, *gain;
    T *part, *dA, *decay;
    double* running;  // [width]

    State<T> kept(const Span& span, index m) const { return State<T>::at(states + (m - span.lead) * size, R, E); }

    void queries(const Span& span, index m) {
        const index n = span.count(m), start = span.query(m);
        window.open(span, m);
        if (walk.logarithmic) to_final_scale(span, n, start);
        this->load_gradients(span.item, start, n);
        own(span, m);
        window.slide(span, m, false);
        window.older(span, m, [&](Prepared<T>& s, const Band& b) { older(span, s, b); });
        window.slide(span, m, true);
        if (walk.graded) {
            const index all = P * CHUNK * R;
            for (index i = 0; i < all; ++i) walk.q[i] = call.query ? window.raw_q[i] : T(1), walk.q_weight[i] = 1;
        }
        if (gated) add_products(walk.q, P, dq, n, T(1), gain + span.first(m) * width);
        this->give_queries(span.item, start, n);
    }

    // Rows as the forward call scaled them at last, all parts together.
    void to_final_scale(const Span& span, index n, index start) {
        for (index p = 0; p < P; ++p) {
            const index head = span.item.g * P + p;
            const index flat = (span.item.b * call.groups * P + head) * call.queries + start;
            const T* rows = static_cast<const T*>(call.log_row) + flat;
            for (index t = 0; t < n; ++t) {
                T& row = walk.row[p * CHUNK + t];
                const Vec<T> factor = row == -T(__builtin_inf()) ? splat(T(0)) : exponential(splat(row - rows[t]));
                for (index r = (p * CHUNK + t) * R; r < (p * CHUNK + t + 1) * R; r += LANES<T>) {
                    store(walk.q + r, load(walk.q + r) * factor);
                    if (call.query) store(walk.q_weight + r, load(walk.q_weight + r) * factor);
                }
                row = rows[t];
            }
        }
    }

    // A chunk's own triangle, and the state of the whole chunks before it.
    void own(const Span& span, index m) {
        const State<T> before = window.middle.state;
        T* z = call.normalizer ? before.z : nullptr;
        T* dz = call.normalizer ? gradient.z : nullptr;
        std::memset(gradient.S, 0, sizeof(T) * size);
        if (walk.way == Way::token) {
            recur_backward<T>(walk.tokens(), before.S, z,
                              {d_o, z ? d_den : nullptr, gradient.S, dz, dq, dk, dv, nullptr, gated ? d_gate : nullptr},
                              scratch);
        } else if (window.has_middle()) {
            const bool steady = walk.way == Way::steady;
            if (steady) walk.scale_rows(before.S, z);
            chunk_backward<T>(walk.chunk, before.S, z,
                              {d_o, z ? d_den : nullptr, gradient.S, dz, dq, dk, dv, scratch}, true);
            if (steady) walk.scale_rows(gradient.S, dz);
        } else {
            std::memset(dq, 0, sizeof(T) * P * CHUNK * R);
            clear();
            T* vt = scratch;
            transpose(walk.chunk.v, walk.chunk.ldv, vt, CHUNK, CHUNK, E);
            const Band b = span.band(m, m, call.window);
            for (index p = 0; p < P; ++p)
                band_backward(b, walk.q + p * CHUNK * R, walk.k, walk.kt, R, vt, E,
                              {nullptr, nullptr, walk.chunk.between}, d_o + p * CHUNK * E,
                              z ? d_den + p * CHUNK : nullptr, dq + p * CHUNK * R, dk, dv, window.A, dA);
        }
        if (walk.graded)
            for (index i = 0; i < P * CHUNK * R; i += LANES<T>) store(dq + i, load(dq + i) * load(window.query_weights() + i));
        collect(span.first(m), span.count(m), walk.graded ? window.key_weights() : nullptr);
        if (!plan.states) return;
        const State<T> to = kept(span, m);
        std::memcpy(to.S, gradient.S, sizeof(T) * size);
        // Of a state exp(scale) S the gradient is exp(-scale) dS.
        const T low = -T(__builtin_inf());
        for (index r = 0; walk.logarithmic && r < R; ++r) to.scale[r] = before.scale[r] == low ? low : -before.scale[r];
    }

    void older(const Span& span, const Prepared<T>& s, const Band& b) {
        const bool common = window.steady(s, b);
        clear();
        for (index p = 0; p < P; ++p) {
            const T *from = d_o + p * CHUNK * E, *denominators = call.normalizer ? d_den + p * CHUNK : nullptr,
                    *row = walk.row + p * CHUNK;
            T* to = dq + p * CHUNK * R;
            if (!common) {
                window.one_by_one(span, s, b, [&](index i, index j, const T* col) {
                    pair(p, i, j, col, row[i], s.values + j * s.ldv, from + i * E,
                         denominators ? denominators[i] : T(0), to + i * R, all_k + (b.first + j) * R);
                });
            } else if (walk.graded) {
                std::memset(part, 0, sizeof(T) * CHUNK * R);
                window.weigh(s, b, p, row);
                band_backward(b, window.weighted, s.k, s.kt, R, s.vt, E, Factors<T>{}, from, denominators, part, dk,
                              dv, window.A, dA);
                for (index i = 0; i < b.queries * R; i += LANES<T>)
                    store(to + i, load(to + i) + load(part + i) * load(window.weight + i));
            } else {
                band_backward(b, walk.q + p * CHUNK * R, s.k, s.kt, R, s.vt, E, window.factors(s), from, denominators, to,
                              dk, dv, window.A, dA);
            }
        }
        if (walk.graded)  // the weights of these keys once more
            for (index j = 0; j < b.keys; ++j)
                for (index r = 0; r < R; r += LANES<T>)
                    store(part + j * R + r, decaying(load(s.col + j * R + r) - or_zero<T>(load(s.origin + r))));
        collect(b.first, b.keys, walk.graded ? part : nullptr);
    }

    // One query and one key in logarithms: their weight, and the gradients of their mantissas.
    void pair(index p, index i, index j, const T* col, T row, const T* v, const T* from, T denominator, T* to_q,
              T* to_k) {
        Vec<T> dot{}, inner{};
        for (index c = 0; c < E; c += LANES<T>) inner += load(from + c) * load(v + c);
        const Vec<T> da = splat(sum<T>(inner) + denominator);
        for (index r = 0; r < R; r += LANES<T>) {
            const Vec<T> w = window.pair_weight(p, i, r, col, row), q = window.q_of(p, i, r), k = window.k_of(j, r);
            dot += q * k * w;
            store(to_q + r, load(to_q + r) + da * k * w);
            store(to_k + r, load(to_k + r) + da * q * w);
        }
        const Vec<T> a = splat(sum<T>(dot));
        for (index c = 0; c < E; c += LANES<T>) store(dv + j * E + c, load(dv + j * E + c) + a * load(from + c));
    }

    void keys(const Span& span, index m) {
        const index n = span.count(m), first = span.first(m), start = span.item.start + first;
        if (plan.states && m + 1 < span.chunks()) {
            const Run<T> run = window.sliding.next();
            if (m + 1 >= span.lead) std::memcpy(run.state.S, kept(span, m + 1).S, sizeof(T) * size);
            std::memcpy(run.decay, decay, sizeof(T) * R);
            window.sliding.push();
            if (window.sliding.count() > plan.whole) window.sliding.pop();
        }
        window.load_alone(span, m);
        std::memcpy(decay, window.home().decay, sizeof(T) * R);
        if (window.sliding.count()) whole(span, m);
        if (walk.graded) {
            for (index i = 0; i < CHUNK * R; ++i) walk.k[i] = walk.k_weight[i] = 1;
            if (call.key) {
                take<T>(call.key, span.item.b, span.item.g, start, n, R, walk.mask(span.item, start), call.map, walk.k);
                if (call.sum_normalize) normalize_rows(walk.k, n, R, walk.totals_k);
            }
        }
        std::memcpy(dk, all_k + first * R, sizeof(T) * n * R);
        std::memcpy(dv, all_v + first * E, sizeof(T) * n * E);
        if (gated) {
            T* own_gain = gain + first * width;
            add_products(walk.k, 1, dk, n, T(-1), own_gain);
            for (index t = n - 1; t >= 0; --t)
                for (index r = 0; r < width; ++r) d_gate[t * width + r] = T(running[r] += double(own_gain[t * width + r]));
        }
        this->give_keys(span.item, start, n);
    }

    // What a chunk of keys gets from the queries that see all of it.
    void whole(const Span& span, index m) {
        window.sliding.whole(window.middle);
        const State<T> s = window.middle.state;
        T* z = call.normalizer ? s.z : nullptr;
        if (walk.logarithmic) {
            const T low = -T(__builtin_inf()), *origin = window.home().origin;
            for (index r = 0; r < R; ++r)
                walk.shrink[r] =
                    s.scale[r] == low || origin[r] == low ? T(0) : exponential(splat(s.scale[r] + origin[r]))[0];
            walk.scale_rows(s.S, z);
        }
        chunk_backward<T>(walk.chunk, s.S, z, {nullptr, nullptr, s.S, z, nullptr, dk, dv, scratch}, false);
        collect(span.first(m), span.count(m), walk.graded ? window.key_weights() : nullptr);
    }

    void clear() {
        std::memset(dk, 0, sizeof(T) * CHUNK * R);
        std::memset(dv, 0, sizeof(T) * CHUNK * E);
    }
    void collect(index first, index n, const T* weight) {
        T *to_k = all_k + first * R, *to_v = all_v + first * E;
        for (index i = 0; i < n * R; i += LANES<T>)
            store(to_k + i, load(to_k + i) + (weight ? load(dk + i) * load(weight + i) : load(dk + i)));
        for (index i = 0; i < n * E; i += LANES<T>) store(to_v + i, load(to_v + i) + load(dv + i));
    }

    // to (n x width) += sign x . dx, per feature where width is R.
    void add_products(const T* x, index heads, const T* dx, index n, T sign, T* to) const {
        for (index t = 0; t < n; ++t) {
            Vec<T> total{};
            for (index r = 0; r < R; r += LANES<T>) {
                Vec<T> acc{};
                for (index p = 0; p < heads; ++p)
                    acc += load(x + (p * CHUNK + t) * R + r) * load(dx + (p * CHUNK + t) * R + r);
                total += acc;
                if (width > 1) store(to + t * R + r, load(to + t * R + r) + splat(sign) * acc);
            }
            if (width == 1) to[t] += sign * sum<T>(total);
        }
    }
};

template <class T>
inline void window_backward(const Call& call) {
    const Plan plan = plan_window<T>(call);
    const index items = call.sequences * call.groups;
    const int team = int(call.threads < items ? call.threads : items);
    if (team < 1) return;
    index longest = call.boundaries ? 0 : call.keys;
    for (index s = 0; call.boundaries && s < call.sequences; ++s) {
        const index length = call.boundaries[s + 1] - call.boundaries[s];
        longest = length > longest ? length : longest;
    }
    parallel_for(team, team, [&](index member, int) {
        WindowReverse<T> reverse(call, plan, longest);
        for (index number = member; number < items; number += team) reverse.run(Span(call, plan, number));
    });
}

}  // namespace reassoc::REASSOC_ISA
