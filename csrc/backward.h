// The whole call, backward. States at the start of every chunk are computed again and kept (N / 64 of them per
// thread); then the chunks are walked from the last to the first with the gradient of the state.
//
// The gradient of a log decay is that of everything it scales: with x_t = q_t . dq_t - k_t . dk_t (per feature
// for decays per feature) and the state after the chunk S', it is S' . dS' plus the sum of x from t on.
#pragma once

#include "additive_backward.h"
#include "forward.h"
#include "recurrent_backward.h"

namespace reassoc::REASSOC_ISA {

template <class T>
class Reverse {
public:
    Reverse(const Call& c, index longest)
        : call(c),
          walk(c),
          R(walk.R),
          E(padded<T>(c.columns)),
          P(c.share),
          size(State<T>::size(R, E)),
          chunks((longest + CHUNK - 1) / CHUNK),
          arena(std::size_t(bytes())) {
        states = arena.take<T>((chunks + 1) * size);
        gradient = State<T>::at(arena.take<T>(size), R, E);
        origin = State<T>::at(arena.take<T>(size), R, E);
        d_o = arena.take<T>(P * CHUNK * E), d_den = arena.take<T>(P * CHUNK), dq = arena.take<T>(P * CHUNK * R);
        dk = arena.take<T>(CHUNK * R), dv = arena.take<T>(CHUNK * E), d_beta = arena.take<T>(CHUNK);
        d_gate = arena.take<T>(CHUNK * R), line = arena.take<T>(CHUNK * (R > E ? R : E));
        base = arena.take<T>(R), scratch = arena.take<T>(scratch_size());
    }

    void run(const Item& item) {
        const index count = (item.keys + CHUNK - 1) / CHUNK;
        auto state = [&](index c) { return State<T>::at(states + c * size, R, E); };
        walk.begin(item);
        walk.open(item, state(0));
        for (index c = 0; c < count; ++c) {
            std::memcpy(state(c + 1).S, state(c).S, sizeof(T) * size);
            advance(walk, item, state(c + 1), c * CHUNK, end_of(item, c), false);
        }
        open_gradient(item);
        if (!call.causal) queries(item, state(count));
        for (index c = count - 1; c >= 0; --c) keys(item, c, state(c), state(c + 1));
        // `close` writes a z only where there is one; a scale has no gradient.
        walk.close(item, gradient, call.d_memory, nullptr);
    }

protected:  // a window needs the same incoming and outgoing gradients
    const Call& call;
    Walk<T> walk;
    const index R, E, P, size, chunks;
    Arena arena;
    T *states, *d_o, *d_den, *dq, *dk, *dv, *d_beta, *d_gate, *line, *base, *scratch;
    State<T> gradient, origin;

    index scratch_size() const {
        const index a = backward_scratch<T>(R, E), b = recur_backward_scratch<T>(R, E, P);
        return a > b ? a : b;
    }
    index bytes() const {
        return index(sizeof(T)) * ((chunks + 3) * size + CHUNK * (P * E + P + P * R + 2 * R + E + 1 + (R > E ? R : E)) + R +
                                   scratch_size()) + 64 * 20;
    }
    static index end_of(const Item& item, index c) {
        return (c + 1) * CHUNK < item.keys ? (c + 1) * CHUNK : item.keys;
    }

    void open_gradient(const Item& item) {
        std::memset(gradient.S, 0, sizeof(T) * size);
        if (call.d_memory_out) walk.fill(item, call.d_memory_out, gradient);
    }

    // Incoming gradients of the reads: of numerators and denominators, at the scale that the walk reads with.
    void load_gradients(const Item& item, index start, index n) {
        for (index p = 0; p < P; ++p) {
            const index head = item.g * P + p, flat = (item.b * call.groups * P + head) * call.queries + start;
            T *to = d_o + p * CHUNK * E, *denominators = d_den + p * CHUNK;
            View view = call.d_out;
            view.width = call.columns;
            take<T>(view, item.b, head, start, n, E, nullptr, Map::given, to);
            for (index t = n; t < CHUNK; ++t) denominators[t] = 0;
            if (call.divide) {
                view = call.out;
                view.width = call.columns;
                take<T>(view, item.b, head, start, n, E, nullptr, Map::given, line);
            } else if (call.normalizer) {
                view.data = static_cast<char*>(view.data) + call.columns * Walk<T>::element(view.kind);
                view.width = 1;
                typed(view, item.b * view.batch + head * view.head + start * view.position, [&](auto* from) {
                    for (index t = 0; t < n; ++t) denominators[t] = T(to_float(from[t * view.position]));
                });
            }
            for (index t = 0; t < n; ++t) {
                T factor = 1;
                if (walk.logarithmic)
                    factor = exponential(splat(walk.row[p * CHUNK + t] - static_cast<const T*>(call.log_row)[flat + t]))[0];
                if (call.divide) {
                    const T d = static_cast<const T*>(call.denominator)[flat + t];
                    Vec<T> inner{};
                    for (index c = 0; c < E; c += LANES<T>) inner += load(to + t * E + c) * load(line + t * E + c);
                    // An undefined row is a constant: it sends nothing back, whatever it holds.
                    denominators[t] = d == T(0) ? T(0) : -sum<T>(inner) / d * factor;
                    factor = d == T(0) ? T(0) : factor / d;
                } else {
                    denominators[t] *= factor;
                    if (call.sum_normalize && !call.normalizer && walk.totals_q[p * CHUNK + t] == T(0)) factor = 0;
                }
                for (index c = 0; c < E; c += LANES<T>)
                    store(to + t * E + c, factor == T(0) ? Vec<T>{} : load(to + t * E + c) * splat(factor));
            }
        }
    }

    // What all queries of a call that is not causal read: the last state.
    void queries(const Item& item, State<T> last) {
        walk.at_end(last.scale);
        T* transposed = scratch;
        mirror_state(last.S, R, E, transposed);
        for (index at = 0; at < item.queries; at += CHUNK) {
            const index n = item.queries - at < CHUNK ? item.queries - at : CHUNK, start = item.start + at;
            walk.load_queries(item, start, n);
            load_gradients(item, start, n);
            const Operand<T> none{nullptr, 0, 0, 0, nullptr, 0};
            for (index p = 0; p < P; ++p) {
                const T *q = walk.q + p * CHUNK * R, *from = d_o + p * CHUNK * E;
                for (index i = 0; i < n; i += ROWS)
                    product<T>(dq + (p * CHUNK + i) * R, R, R, false, {from + i * E, E, 1, E, transposed, R}, nullptr,
                               d_den + p * CHUNK + i, call.normalizer ? last.z : nullptr, none);
                blocks<T>(gradient.S, R, E, [&](index first, index width, T* block) {
                    for (index r = 0; r < R; r += ROWS)
                        product<T>(block + r * width, width, width, true, none, nullptr, nullptr, nullptr,
                                   {q + r, 1, R, n, from + first, E});
                });
                for (index i = 0; call.normalizer && i < n; ++i)
                    for (index r = 0; r < R; r += LANES<T>)
                        store(gradient.z + r, load(gradient.z + r) + splat(d_den[p * CHUNK + i]) * load(q + i * R + r));
            }
            give_queries(item, start, n);
        }
    }

    void keys(const Item& item, index c, State<T> before, State<T> after) {
        const index at = c * CHUNK, start = item.start + at, n = end_of(item, c) - at;
        const bool reads = call.causal;
        walk.load_keys(item, start, n, before.scale, call.causal, true);
        if (reads) walk.load_queries(item, start, n), load_gradients(item, start, n);
        T* z = call.normalizer ? before.z : nullptr;
        T* dz = call.normalizer ? gradient.z : nullptr;
        const bool gated = bool(call.log_decay);
        if (walk.way == Way::token) {
            Tokens<T> tokens = walk.tokens();
            if (!reads) tokens.P = 0;
            recur_backward<T>(tokens, before.S, z,
                              {d_o, z ? d_den : nullptr, gradient.S, dz, dq, dk, dv, call.delta ? d_beta : nullptr,
                               gated ? d_gate : nullptr},
                              scratch, [&](index i, index j) {
                                  for (index p = 0; p < tokens.P; ++p) soon_queries(item, item.g * P + p, start, i, j);
                                  soon_keys(item, start, i, j);
                              });
        } else {
            if (gated) dot_rows(after);
            State<T> used = before;
            if (walk.way == Way::steady) {
                std::memcpy(origin.S, before.S, sizeof(T) * size);
                used = origin;
                walk.scale_rows(used.S, z ? used.z : nullptr);
            }
            chunk_backward<T>(walk.chunk, used.S, z ? used.z : nullptr,
                              {d_o, z ? d_den : nullptr, gradient.S, dz, dq, dk, dv, scratch}, reads,
                              [&](index p, index i, index j) { soon_queries(item, item.g * P + p, start, i, j); },
                              [&](index i, index j) { soon_keys(item, start, i, j); });
            if (walk.way == Way::steady) walk.scale_rows(gradient.S, dz);
            if (gated) gates(n, reads);
        }
        if (reads) give_queries(item, start, n);
        give_keys(item, start, n);
    }

    // Fetches rows that are written after this chunk, and those of the chunk before it.
    void soon_queries(const Item& item, index head, index start, index from, index to) const {
        const index end = item.start + item.queries, next = start - CHUNK;
        walk.soon(call.d_query, item.b, head, start + from, start + to, end);
        walk.soon_queries(item, head, next + from, next + to, end);
        walk.soon(call.d_out, item.b, head, next + from, next + to, end);
        if (call.divide) walk.soon(call.out, item.b, head, next + from, next + to, end);
    }
    void soon_keys(const Item& item, index start, index from, index to) const {
        const index end = item.start + item.keys, next = start - CHUNK;
        walk.soon(call.d_key, item.b, item.g, start + from, start + to, end);
        walk.soon(call.d_value, item.b, item.g, start + from, start + to, end);
        walk.soon_keys(item, next + from, next + to, end);
        walk.soon_values(item, next + from, next + to, end);
    }

    // base = S . dS, per feature, at the end of the chunk.
    void dot_rows(State<T> after) {
        for (index r = 0; r < R; ++r) base[r] = call.normalizer ? after.z[r] * gradient.z[r] : T(0);
        blocks<T>(after.S, R, E, [&](index from, index width, const T* block) {
            const T* other = gradient.S + R * from;
            for (index r = 0; r < R; ++r) {
                Vec<T> dot{};
                for (index c = 0; c < width; c += LANES<T>) dot += load(block + r * width + c) * load(other + r * width + c);
                base[r] += sum<T>(dot);
            }
        });
    }

    void gates(index n, bool reads) {
        const index width = walk.graded ? R : 1;
        double running[64];
        for (index r = 0; r < width; r += LANES<T>) {
            const index lanes = width == 1 ? 1 : LANES<T>;
            for (index l = 0; l < lanes; ++l) running[l] = base[r + l];
            if (width == 1)
                for (index f = 1; f < R; ++f) running[0] += base[f];
            for (index t = n - 1; t >= 0; --t) {
                Vec<T> x{};
                for (index f = r; f < (width == 1 ? R : r + 1); f += LANES<T>) {
                    for (index p = 0; reads && p < P; ++p) {
                        const index i = (p * CHUNK + t) * R + f;
                        x += load(walk.q + i) * load(dq + i);
                    }
                    x -= load(walk.k + t * R + f) * load(dk + t * R + f);
                }
                if (width == 1) {
                    running[0] += double(sum<T>(x));
                    d_gate[t] = T(running[0]);
                } else {
                    for (index l = 0; l < lanes; ++l) d_gate[t * R + r + l] = T(running[l] += double(x[l]));
                }
            }
        }
    }

    // Rows d of the weighted feature -> the caller's gradients of mantissa, logarithm, or mapped input.
    void give_features(const Item& item, index head, index start, index n, const View& input, const View& to,
                       const View& log_to, const View& log_in, Projection<T>& projection,
                       const T* phi, const T* weight, const T* totals, T* d) {
        if (walk.graded && walk.logarithmic && log_to) {
            for (index i = 0; i < n * R; i += LANES<T>) store(line + i, load(d + i) * load(phi + i));
            if (projection) {
                give<T>(log_to, item.b, head, start, n, projection.width(), projection.backward(line, n));
            } else if (log_in.width == 1) {
                for (index t = 0; t < n; ++t) {
                    Vec<T> acc{};
                    for (index r = 0; r < R; r += LANES<T>) acc += load(line + t * R + r);
                    line[t] = sum<T>(acc);  // row t was read already: t <= t * R
                }
                give<T>(log_to, item.b, head, start, n, 1, line);
            } else {
                give<T>(log_to, item.b, head, start, n, R, line);
            }
        }
        if (!to) return;
        if (call.sum_normalize)
            normalize_rows_backward(d, phi, weight, n, R, totals);
        else if (weight)
            for (index i = 0; i < n * R; i += LANES<T>) store(d + i, load(d + i) * load(weight + i));
        chain<T>(input, item.b, head, start, n, R, call.map, d);
        give<T>(to, item.b, head, start, n, R, d);
    }

    void give_queries(const Item& item, index start, index n) {
        for (index p = 0; p < P; ++p) {
            const index rows = p * CHUNK * R;
            give_features(item, item.g * P + p, start, n, call.query, call.d_query, call.d_query_log, call.query_log, walk.query_projection,
                          walk.q + rows, walk.graded ? walk.q_weight + rows : nullptr, walk.totals_q + p * CHUNK, dq + rows);
        }
    }

    void give_keys(const Item& item, index start, index n) {
        const bool* mask = walk.mask(item, start);
        if (call.d_log_decay) {
            const index width = call.log_decay.width == 1 ? 1 : R;
            const index stride = walk.graded || width > 1 ? R : 1;
            for (index t = 0; t < n; ++t)
                for (index r = 0; r < stride; ++r)
                    // At minus infinity the exponential is flat.
                    if ((mask && !mask[t]) || walk.gate[t * stride + r] == -T(__builtin_inf())) d_gate[t * stride + r] = 0;
            if (width == 1 && stride > 1)
                for (index t = 0; t < n; ++t) {
                    T total = 0;
                    for (index r = 0; r < call.features; ++r) total += d_gate[t * R + r];
                    d_gate[t] = total;
                }
            give<T>(call.d_log_decay, item.b, item.g, start, n, width, d_gate);
        }
        if (mask)
            for (index t = 0; t < n; ++t)
                if (!mask[t]) {
                    std::memset(dk + t * R, 0, sizeof(T) * R);
                    std::memset(dv + t * E, 0, sizeof(T) * E);
                    if (call.delta) d_beta[t] = 0;
                }
        if (call.d_beta) give<T>(call.d_beta, item.b, item.g, start, n, 1, d_beta);
        if (call.d_value) give<T>(call.d_value, item.b, item.g, start, n, E, dv);
        give_features(item, item.g, start, n, call.key, call.d_key, call.d_key_log, call.key_log, walk.key_projection, walk.k,
                      walk.graded ? walk.k_weight : nullptr, walk.totals_k, dk);
        if (mask && call.d_key)  // the input of a hidden key may be NaN, and zero times a slope of that is NaN
            for (index t = 0; t < n; ++t)
                if (!mask[t]) std::memset(line, 0, sizeof(T) * R), give<T>(call.d_key, item.b, item.g, start + t, 1, R, line);
    }
};

template <class T>
inline void backward(const Call& call) {
    const index items = call.sequences * call.groups;
    const int team = int(call.threads < items ? call.threads : items);
    index longest = call.keys;
    if (call.boundaries) {
        longest = 0;
        for (index s = 0; s < call.sequences; ++s) {
            const index length = call.boundaries[s + 1] - call.boundaries[s];
            longest = length > longest ? length : longest;
        }
    }
    if (team < 1) return;
    parallel_for(team, team, [&](index member, int) {
        Reverse<T> reverse(call, longest);
        for (index number = member; number < items; number += team) reverse.run(item_of(call, number));
    });
}

}  // namespace reassoc::REASSOC_ISA
