// A walk along one sequence of one key head, chunk by chunk: loads a chunk into scratch, chooses how to
// compute it, and moves the state.
#pragma once

#include <cstdlib>
#include <new>

#include "projected.h"
#include "recurrent.h"

namespace reassoc::REASSOC_ISA {

// Aligned scratch, taken once per thread and call.
class Arena {
public:
    explicit Arena(std::size_t bytes)
        : base_(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64))), at_(base_) {
        if (!base_) throw std::bad_alloc();
    }
    ~Arena() { std::free(base_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    template <class T>
    T* take(index count) {
        T* found = reinterpret_cast<T*>(at_);
        at_ += bytes<T>(count);
        return found;
    }
    template <class T>
    static std::size_t bytes(index count) {
        return (std::size_t(count) * sizeof(T) + 63) / 64 * 64;
    }

private:
    char *base_, *at_;
};

// What a head's tokens have left behind: S in blocks, z, and the scale of exponential features.
template <class T>
struct State {
    T *S, *z, *scale;

    static index size(index R, index E) { return R * E + 2 * R; }
    static State at(T* memory, index R, index E) { return {memory, memory + R * E, memory + R * E + R}; }
};

// One sequence of one key head, and the value columns that this walk is responsible for.
struct Item {
    index b, g, state;             // batch row, key head, row of the states
    index start, queries, keys;    // first position, and how many
    index first_column, columns;
};

enum class Way { plain, steady, token };  // see graded.h for the last two

template <class T>
class Walk {
public:
    const Call& call;
    const index R, P;
    index E = 0;
    const bool logarithmic, per_feature, scalar, graded;
    Chunk<T> chunk{};
    Way way = Way::plain;
    T *q, *k, *kt, *v, *faded, *o, *den, *factor, *row, *zk, *beta, *keep, *from_start, *to_end, *between, *weights;
    T *gate, *log, *level, *suffix, *after, *shrink, *q_log, *q_weight, *k_weight, *totals_q, *totals_k;
    double log_total = 0;  // scalar decay over everything walked
    T* feature_total;      // the same per feature

private:
    Arena arena_;

public:
    Projection<T> key_projection, query_projection;

    explicit Walk(const Call& c)
        : call(c),
          R(padded<T>(c.features)),
          P(c.share),
          logarithmic(bool(c.key_log)),
          per_feature(!c.delta && bool(c.log_decay) && c.log_decay.width > 1),
          scalar(!c.delta && bool(c.log_decay) && !bool(c.key_log) && c.log_decay.width == 1),
          graded(!c.delta && (logarithmic || per_feature)),
          arena_(std::size_t(bytes(c))),
          key_projection(c.key_matrix, R, arena_.take<T>(Projection<T>::elements(c.key_matrix, R))),
          query_projection(c.query_matrix, R, arena_.take<T>(Projection<T>::elements(c.query_matrix, R))) {
        const index all = padded<T>(c.columns);
        q = arena_.take<T>(P * CHUNK * R), k = arena_.take<T>(CHUNK * R), kt = arena_.take<T>(CHUNK * R);
        v = arena_.take<T>(CHUNK * all), faded = arena_.take<T>(CHUNK * all), o = arena_.take<T>(P * CHUNK * all);
        den = arena_.take<T>(P * CHUNK), factor = arena_.take<T>(CHUNK), row = arena_.take<T>(P * CHUNK), zk = arena_.take<T>(R);
        beta = arena_.take<T>(CHUNK), keep = arena_.take<T>(CHUNK * R), from_start = arena_.take<T>(CHUNK);
        to_end = arena_.take<T>(CHUNK), between = arena_.take<T>(CHUNK * CHUNK);
        weights = arena_.take<T>(CHUNK * CHUNK);
        recurring_ = arena_.take<T>(recur_scratch<T>(R, P));
        gate = arena_.take<T>(CHUNK * R), totals_q = arena_.take<T>(P * CHUNK), totals_k = arena_.take<T>(CHUNK);
        if (!graded) return;
        log = arena_.take<T>(CHUNK * R), level = arena_.take<T>(CHUNK * R), suffix = arena_.take<T>(CHUNK * R);
        after = arena_.take<T>(R), shrink = arena_.take<T>(R), q_log = arena_.take<T>(CHUNK * R);
        q_weight = arena_.take<T>(P * CHUNK * R), k_weight = arena_.take<T>(CHUNK * R);
        feature_total = arena_.take<T>(R);
    }

    void begin(const Item& item) {
        E = padded<T>(item.columns);
        log_total = 0;
        key_projection.use(item.g);
        query_projection.use(item.g);
        if (graded) std::memset(feature_total, 0, sizeof(T) * R);
    }

    // A state that holds nothing.
    void blank(State<T> s) const {
        std::memset(s.S, 0, sizeof(T) * State<T>::size(R, E));
        for (index f = 0; logarithmic && f < R; ++f) s.scale[f] = -T(__builtin_inf());
    }

    // The state before the first token.
    void open(const Item& item, State<T> s) const {
        blank(s);
        if (!call.memory) return;
        fill(item, call.memory, s);
        const index r = call.features, at = (item.state * call.groups + item.g) * r;
        if (logarithmic) std::memcpy(s.scale, static_cast<const T*>(call.scale) + at, sizeof(T) * r);
    }

    // S and z, or their gradients, from the caller's layout.
    void fill(const Item& item, const void* from_memory, State<T> s) const {
        const index r = call.features, wide = call.columns + call.normalizer;
        const T* memory = static_cast<const T*>(from_memory) + (item.state * call.groups + item.g) * r * wide;
        for (index f = 0; f < r; ++f) {
            blocks<T>(s.S, R, E, [&](index from, index width, T* block) {
                for (index c = 0; c < width && from + c < item.columns; ++c)
                    block[f * width + c] = memory[f * wide + item.first_column + from + c];
            });
            if (call.normalizer) s.z[f] = memory[f * wide + wide - 1];
        }
    }

    // The state, or its gradient, into the caller's layout.
    void close(const Item& item, State<T> s, void* memory_out, void* scale_out) const {
        const index r = call.features, wide = call.columns + call.normalizer;
        const index at = item.state * call.groups + item.g;
        if (memory_out) {
            T* memory = static_cast<T*>(memory_out) + at * r * wide;
            for (index f = 0; f < r; ++f) {
                blocks<T>(s.S, R, E, [&](index from, index width, T* block) {
                    for (index c = 0; c < width && from + c < item.columns; ++c)
                        memory[f * wide + item.first_column + from + c] = block[f * width + c];
                });
                if (call.normalizer && item.first_column == 0) memory[f * wide + wide - 1] = s.z[f];
            }
        }
        if (scale_out && logarithmic)
            std::memcpy(static_cast<T*>(scale_out) + at * r, s.scale, sizeof(T) * r);
    }

    const bool* mask(const Item& item, index start) const {
        return call.mask ? call.mask + item.b * call.keys + start : nullptr;
    }

    // Asks for rows from..to, as far as they lie within [0, end), so that they are near when their turn comes.
    static void soon(const View& view, index b, index h, index from, index to, index end) {
        if (!view) return;
        if (from < 0) from = 0;
        if (to > end) to = end;
        const index size = element(view.kind);
        for (index t = from; t < to; ++t) {
            const index at = (b * view.batch + h * view.head + t * view.position) * size;
            for (index line = 0; line < view.width * size; line += 64)
                reassoc::REASSOC_ISA::prefetch(static_cast<const char*>(view.data) + at + line);
        }
    }
    void soon_keys(const Item& item, index from, index to, index end) const {
        soon(call.key, item.b, item.g, from, to, end);
        soon(call.key_log, item.b, item.g, from, to, end);
    }
    void soon_values(const Item& item, index from, index to, index end) const {
        soon(call.value, item.b, item.g, from, to, end);
    }
    void soon_queries(const Item& item, index head, index from, index to, index end) const {
        soon(call.query, item.b, head, from, to, end);
        soon(call.query_log, item.b, head, from, to, end);
    }

    // Keys and values of positions start..start + n into scratch, and the way the chunk will be computed.
    void load_keys(const Item& item, index start, index n, const T* scale, bool causal, bool copy_values = false) {
        const bool* hidden = mask(item, start);
        if (call.key) {
            take<T>(call.key, item.b, item.g, start, n, R, hidden, call.map, k);
            if (call.sum_normalize) normalize_rows(k, n, R, totals_k);
        }
        View value = call.value;
        value.width = item.columns;
        const bool direct = !copy_values && !hidden && value.kind == kind() && item.columns > 0 && item.columns % PAD<T> == 0;
        const index offset = item.first_column;
        if (!direct) take_columns(value, item, start, n, hidden);
        const T* values = direct ? static_cast<const T*>(value.data) + item.b * value.batch + item.g * value.head +
                                       start * value.position + offset
                                 : v;
        chunk = {n, R, E, P, q, k, kt, values, direct ? value.position : E, nullptr, nullptr, nullptr, T(1)};
        way = Way::plain;
        if (call.beta) take_scalars(call.beta, item, start, n, hidden, T(0), beta);
        if (call.log_decay && call.log_decay.width == 1 && !graded) {
            take_scalars(call.log_decay, item, start, n, hidden, T(0), gate);
            if (call.delta) {
                for (index at = 0; at < n; at += LANES<T>) store(keep + at, decaying(load(gate + at)));
            } else {
                decay(n, causal);
            }
        } else if (call.log_decay) {
            take_logs<T>(call.log_decay, item.b, item.g, start, n, call.features, R, hidden, T(0), gate);
            if (call.delta)
                for (index at = 0; at < n * R; at += LANES<T>) store(keep + at, decaying(load(gate + at)));
        }
        if (call.delta) {
            way = Way::token;
            return;
        }
        if (graded) {
            const T low = -T(__builtin_inf());
            if (logarithmic)
                key_logs(item, start, n, hidden, low);
            else
                std::memset(log, 0, sizeof(T) * n * R);
            grades_ = {n, R, logarithmic, bool(call.log_decay), log, gate, level, suffix, const_cast<T*>(scale), after,
                       shrink, true};
            grade(grades_, hidden, causal);
            way = grades_.steady ? Way::steady : Way::token;
            weigh_keys(grades_, call.key ? k_weight : k);
            for (index at = 0; call.key && at < n * R; at += LANES<T>) store(k + at, load(k + at) * load(k_weight + at));
            if (hidden)  // a weight of a hidden key is exp(-inf) where keys are exponential, but one elsewhere
                for (index t = 0; t < n; ++t)
                    if (!hidden[t]) std::memset(k + t * R, 0, sizeof(T) * R);
            const index end = (n + ROWS - 1) / ROWS * ROWS;
            std::memset(k + n * R, 0, sizeof(T) * (end - n) * R);
            if (way == Way::token) keep_factors(grades_, keep);
            if (call.log_decay)
                for (index r = 0; r < R; r += LANES<T>)
                    store(feature_total + r, load(feature_total + r) + load(gate + r) + load(suffix + r));
        }
        if (way != Way::token) {
            // Columns beyond n are never chosen (see `triangle`), whatever they hold.
            transpose(k, R, kt, CHUNK, (n + LANES<T> - 1) / LANES<T> * LANES<T>, R);
        }
    }

    void key_logs(const Item& item, index start, index n, const bool* hidden, T blank) {
        if (key_projection)
            key_projection.logs(call.key_log, item.b, item.g, start, n, call.features, hidden, blank, log);
        else
            take_logs<T>(call.key_log, item.b, item.g, start, n, call.features, R, hidden, blank, log);
    }
    void query_logs(const Item& item, index head, index start, index n, T* to) {
        if (query_projection)
            query_projection.logs(call.query_log, item.b, head, start, n, call.features, nullptr, T(0), to);
        else
            take_logs<T>(call.query_log, item.b, head, start, n, call.features, R, nullptr, T(0), to);
    }

    // Queries of all heads that share the key head.
    void load_queries(const Item& item, index start, index n) {
        for (index p = 0; p < P; ++p) {
            T* to = q + p * CHUNK * R;
            const index head = item.g * P + p;
            if (call.query) {
                take<T>(call.query, item.b, head, start, n, R, nullptr, call.map, to);
                if (call.sum_normalize) normalize_rows(to, n, R, totals_q + p * CHUNK);
            }
            if (!graded) continue;
            T* weight = call.query ? q_weight + p * CHUNK * R : to;
            if (logarithmic) query_logs(item, head, start, n, q_log);
            weigh_queries(grades_, logarithmic ? q_log : nullptr, weight, row + p * CHUNK);
            for (index at = 0; call.query && at < n * R; at += LANES<T>) store(to + at, load(to + at) * load(weight + at));
            const index end = (n + ROWS - 1) / ROWS * ROWS;
            std::memset(to + n * R, 0, sizeof(T) * (end - n) * R);
        }
    }

    // For reads of a finished state: as if after a chunk without keys.
    void at_end(const T* scale) {
        if (!graded) return;
        std::memcpy(after, scale, sizeof(T) * R);
        std::memset(suffix, 0, sizeof(T) * CHUNK * R);
        grades_ = {CHUNK, R, logarithmic, false, log, gate, level, suffix, after, after, shrink, true};
    }

    Tokens<T> tokens() const {
        const index width = !call.log_decay && way == Way::token && !graded ? 0 : graded || call.log_decay.width > 1 ? R : 1;
        return {chunk.n, R, E, P, q, k, chunk.v, chunk.ldv, call.delta ? beta : nullptr,
                width ? keep : nullptr, width};
    }

    // Moves the state over the loaded chunk; with `reads`, o and den are what its positions read.
    template <class Ahead = Nothing>
    void move(State<T> s, bool reads, const Ahead& ahead = {}) {
        T* z = call.normalizer ? s.z : nullptr;
        if (way == Way::token) {
            Tokens<T> t = tokens();
            if (!reads) t.P = 0;
            recur(t, s.S, z, o, den, index(0), (E + BLOCK<T> - 1) / BLOCK<T>, recurring_,
                  ahead);
        } else {
            enter(s);
            if (reads) read_chunk(chunk, s.S, z, o, den, weights);
            write(s, ahead);
        }
        leave(s);
    }
    // Its parts, where a chunk is computed as a whole: the state is made ready to be read, ...
    void enter(State<T> s) const {
        if (way == Way::steady) scale_rows(s.S, call.normalizer ? s.z : nullptr);
    }
    // ... written, ...
    template <class Ahead = Nothing>
    void write(State<T> s, const Ahead& ahead = {}) {
        const T* w = fade_values();
        if (call.normalizer) add_keys();
        write_chunk(chunk, w, w == faded ? E : chunk.ldv, zk, s.S, call.normalizer ? s.z : nullptr, ahead);
    }
    // ... and left.
    void leave(State<T> s) {
        if (graded && logarithmic) std::memcpy(s.scale, after, sizeof(T) * R);
        if (scalar) log_total += log_chunk_;
    }

    Target<T> scratch(index p) const { return {o + p * CHUNK * E, E, nullptr}; }

    // S and z brought to the origin of a steady chunk.
    void scale_rows(T* S, T* z) const {
        blocks<T>(S, R, E, [&](index, index width, T* block) {
            for (index r = 0; r < R; ++r) {
                if (shrink[r] == T(1)) continue;
                for (index c = 0; c < width; c += LANES<T>)
                    store(block + r * width + c, load(block + r * width + c) * splat(shrink[r]));
            }
        });
        if (z)
            for (index r = 0; r < R; r += LANES<T>) store(z + r, load(z + r) * load(shrink + r));
    }

private:
    Grades<T> grades_{};
    T* recurring_;
    double log_chunk_ = 0;

    static index bytes(const Call& c) {
        const index r = padded<T>(c.features), e = padded<T>(c.columns), p = c.share;
        return index(sizeof(T)) * (Projection<T>::elements(c.key_matrix, r) + Projection<T>::elements(c.query_matrix, r) +
                                   recur_scratch<T>(r, p) + CHUNK * (3 * p * r + 9 * r + 2 * e + p * e + 2 * CHUNK + 4 * p + 16) + 16 * r) + 64 * 64;
    }

    void take_columns(View view, const Item& item, index start, index n, const bool* hidden) {
        view.data = static_cast<char*>(view.data) + item.first_column * element(view.kind);
        take<T>(view, item.b, item.g, start, n, E, hidden, Map::given, v);
    }

    void take_scalars(const View& view, const Item& item, index start, index n, const bool* hidden, T blank, T* to) {
        typed(view, item.b * view.batch + item.g * view.head + start * view.position, [&](auto* from) {
            for (index t = 0; t < n; ++t)
                to[t] = hidden && !hidden[t] ? blank : T(to_float(from[t * view.position]));
        });
        for (index t = n; t < CHUNK; ++t) to[t] = 0;
    }

    // Scalar decays of the chunk, from prefix sums in double: below exp(-1000) there is nothing in any type.
    void decay(index n, bool causal) {
        double prefix[CHUNK], sum_ = 0;
        for (index i = 0; i < CHUNK; ++i) {
            const double g = double(gate[i]);
            prefix[i] = sum_ += i >= n ? 0.0 : g < -1000.0 ? -1000.0 : g;
        }
        log_chunk_ = sum_;
        const index width = (n + LANES<T> - 1) / LANES<T> * LANES<T>;
        for (index i = 0; i < CHUNK; ++i) from_start[i] = T(prefix[i]), to_end[i] = T(sum_ - prefix[i]);
        for (index i = 0; i < width; i += LANES<T>) {
            store(from_start + i, decaying(load(from_start + i)));
            store(to_end + i, decaying(load(to_end + i)));
        }
        for (index i = 0; causal && i < n; ++i) {
            T* line = between + i * CHUNK;
            const index used = (i + ROWS + LANES<T> - 1) / LANES<T> * LANES<T>;
            for (index j = 0; j < used && j < CHUNK; ++j) line[j] = j <= i ? T(prefix[i] - prefix[j]) : T(0);
            for (index j = 0; j < used && j < CHUNK; j += LANES<T>) store(line + j, decaying(load(line + j)));
        }
        chunk.from_start = from_start, chunk.to_end = to_end, chunk.between = between;
        chunk.total = decaying(splat(T(sum_)))[0];
    }

    const T* fade_values() {
        if (!chunk.to_end) return chunk.v;
        for (index j = 0; j < chunk.n; ++j)
            for (index c = 0; c < E; c += LANES<T>)
                store(faded + j * E + c, load(chunk.v + j * chunk.ldv + c) * splat(to_end[j]));
        return faded;
    }

    void add_keys() {
        stretches<T>(R, [&](index at, auto count) {
            Vec<T> total[1][decltype(count)::value] = {};
            for (index j = 0; j < chunk.n; ++j)
                each<T>(total, [&](int, int i, Vec<T>& x) {
                    x += load(k + j * R + at + i * LANES<T>) * splat(chunk.to_end ? to_end[j] : T(1));
                });
            each<T>(total, [&](int, int i, Vec<T>& x) { store<T>(zk + at + i * LANES<T>, x); });
        });
    }

public:
    static constexpr Kind kind() { return sizeof(T) == 4 ? Kind::f32 : Kind::f64; }
    static index element(Kind kind) { return kind == Kind::f64 ? 8 : kind == Kind::f32 ? 4 : 2; }
};

}  // namespace reassoc::REASSOC_ISA
