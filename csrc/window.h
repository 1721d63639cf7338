// Calls with a window, forward: query i sees the keys i - window < j <= i. No state goes in or out.
//
// Keys are cut where queries are, so that a chunk of C queries sees of its own chunk of keys a triangle; of the
// `whole` = window / C - 1 chunks before that everything; and of one or two chunks before those a band. Counted in
// multiply-adds, a pair of chunks costs P C^2 (r + e). The whole ones can also be read as one state (sliding.h):
// P C r e to read it and C r e to write each chunk, however many there are, and the compositions. `plan` takes
// what is less. With r = e = 64 that is pairs up to a window of 191, states from there on.
//
// Exponential features: every part of a row has a scale of its own, the largest logarithm that this row sees there,
// and o and den are brought to the larger scale as parts are added. A part has one origin per feature (the largest
// key of the chunk) for both factors of the product, unless a row sees its own largest key more than SPREAD below;
// then the pairs of that part are computed one by one, in logarithms.
#pragma once

#include "sliding.h"
#include "window_plan.h"

namespace reassoc::REASSOC_ISA {

// A chunk of keys prepared for the products of pairs, and, for graded features, for its summary.
template <class T>
struct Prepared {
    index chunk;            // its number, or -1
    T *k, *kt, *v, *vt;     // weighted where graded; vt for backward
    T *top, *col, *origin;  // exponential: largest logarithm from j on, own logarithm, largest; decayed to the end
    T *decay, *to_end;      // of the whole chunk, [R] or [1]; scalar: factors from after j to the end
    const T* values;
    index n, ldv;
};

template <class T>
class Window {
public:
    Walk<T>& walk;
    const Call& call;
    const Plan plan;
    const index R, P, E;
    Sliding<T> sliding;
    Run<T> middle;
    T *raw_q, *raw_log, *weighted, *weight, *factor, *A;  // see `open` and `weigh`; [CHUNK][CHUNK]

    Window(Walk<T>& w, const Plan& p, bool backward_)
        : walk(w), call(w.call), plan(p), R(w.R), P(w.P), E(padded<T>(w.call.columns)),
          sliding(w, R, E, p.states ? p.whole : 0), backward(backward_), arena(std::size_t(bytes())) {
        middle = Run<T>::at(arena.take<T>(Run<T>::size(R, E)), R, E);
        raw_q = arena.take<T>(P * CHUNK * R), raw_log = arena.take<T>(P * CHUNK * R);
        weighted = arena.take<T>(CHUNK * R), weight = arena.take<T>(CHUNK * R), raw_k = arena.take<T>(CHUNK * R);
        since = arena.take<T>(CHUNK * R), factor = arena.take<T>(CHUNK), A = arena.take<T>(CHUNK * CHUNK);
        between = arena.take<T>(R), nothing = arena.take<T>(R);
        for (index f = 0; f < R; ++f) nothing[f] = walk.logarithmic ? -T(__builtin_inf()) : T(0);
        for (index i = 0; i <= plan.kept; ++i) {
            Prepared<T>& s = kept[i];
            s.k = arena.take<T>(CHUNK * R), s.kt = arena.take<T>(CHUNK * R), s.v = arena.take<T>(CHUNK * E);
            s.vt = backward ? arena.take<T>(CHUNK * E) : nullptr;
            s.origin = arena.take<T>(R), s.decay = arena.take<T>(R), s.to_end = arena.take<T>(CHUNK);
            s.top = walk.graded ? arena.take<T>(CHUNK * R) : nullptr;
            s.col = walk.graded ? arena.take<T>(CHUNK * R) : nullptr;
        }
    }

    void begin(const Span& span) {
        walk.begin(span.item);
        sliding.clear();
        for (index i = 0; i <= plan.kept; ++i) kept[i].chunk = -1;
    }

    // Queries of chunks from..to.
    void run(const Span& span, index from, index to) {
        begin(span);
        warm_up(span, from);
        for (index m = from; m < to; ++m) {
            open(span, m);
            own(span, m);
            slide(span, m, false);
            older(span, m, [&](Prepared<T>& s, const Band& b) { add(span, s, b); });
            for (index p = 0; walk.logarithmic && p < P; ++p)
                for (index t = 0; t < span.count(m); ++t) walk.row[p * CHUNK + t] = finite(walk.row[p * CHUNK + t]);
            finish(walk, span.item, span.query(m), span.count(m));
            slide(span, m, true);
        }
    }

    // The state of the whole chunks before `from`.
    void warm_up(const Span& span, index from) {
        if (!plan.states) return;
        for (index m = from - plan.whole > 0 ? from - plan.whole : 0; m < from; ++m) {
            load_alone(span, m);
            summarize(home());
        }
    }

    // Loads chunk m of keys and queries, and what its queries see whole.
    void open(const Span& span, index m) {
        if (plan.states || walk.graded) sliding.whole(middle);
        any = sliding.count() > 0;
        const index n = span.count(m), start = span.query(m);
        // Graded keys are weighted for their own queries here, and at an origin of their own for others.
        const bool shared = !walk.graded && plan.shared;
        load_chunk(span, m, shared ? kept[m % plan.kept] : home(), walk.graded ? middle.state.scale : nothing, true);
        if (shared) record(kept[m % plan.kept], m);
        walk.load_queries(span.item, start, n);
        sum_gates(n);
        if (!walk.graded) return;
        const index blind = unseeing(span, m);
        for (index p = 0; p < P; ++p) {
            const index head = span.item.g * P + p;
            T* to = raw_q + p * CHUNK * R;
            if (call.query) {
                take<T>(call.query, span.item.b, head, start, n, R, nullptr, call.map, to);
                if (call.sum_normalize) normalize_rows(to, n, R, walk.totals_q + p * CHUNK);
            }
            if (!walk.logarithmic) continue;
            walk.query_logs(span.item, head, start, n, raw_log + p * CHUNK * R);
            for (index t = 0; t < n; ++t) {  // a row that sees nothing yet has no scale yet
                Vec<T> best{};
                for (index r = 0; r < R; r += LANES<T>)
                    best = larger<T>(best, load(query_weights() + (p * CHUNK + t) * R + r));
                if (t < blind || largest<T>(best) == T(0)) walk.row[p * CHUNK + t] = -T(__builtin_inf());
            }
        }
    }

    // Chunks before the whole ones, or all before its own, from the newest to the oldest.
    template <class Body>
    void older(const Span& span, index m, Body&& body) {
        index at = m - 1;
        std::memset(between, 0, sizeof(T) * R);
        if (plan.states) std::memcpy(between, middle.decay, sizeof(T) * R), at -= plan.whole;
        for (; at >= span.oldest(m, call.window); --at) {
            if (walk.scalar && between[0] < T(-1000)) break;  // nothing is left of what is older
            Prepared<T>& s = prepare(span, at);
            if (walk.scalar) {
                for (index i = 0; i < CHUNK; ++i) factor[i] = between[0] + prefix[i];
                for (index i = 0; i < CHUNK; i += LANES<T>) store(factor + i, decaying(load(factor + i)));
            }
            body(s, span.band(m, at, call.window));
            for (index r = 0; r < R; ++r) between[r] += s.decay[r];
        }
    }

    Factors<T> factors(const Prepared<T>& s) const {
        return walk.scalar ? Factors<T>{factor, s.to_end, nullptr} : Factors<T>{};
    }

    // Logarithms of the weights of row i of head p, without those of the keys.
    Vec<T> row_log(index p, index i, index r) const {
        Vec<T> x = load(between + r);
        if (call.log_decay) x += load(since + i * R + r);
        return walk.logarithmic ? x + load(raw_log + (p * CHUNK + i) * R + r) : x;
    }

    // Whether a common origin serves the products with this chunk.
    bool steady(const Prepared<T>& s, const Band& b) const {
        if (!walk.logarithmic) return true;  // only decays, and both sides decay away from where the chunks meet
        const T low = -T(__builtin_inf());
        Ints<T> wide{};
        for (index i = 0; i < b.queries && b.low(i) < b.keys; ++i) {
            if (b.low(i) == 0) continue;
            for (index r = 0; r < R; r += LANES<T>) {
                const Vec<T> top = load(s.top + b.low(i) * R + r);
                wide |= ~((load(s.origin + r) - top <= T(SPREAD)) | (top == low));  // NaN is wide
            }
        }
        bool any_wide = false;
        for (int l = 0; l < LANES<T>; ++l) any_wide |= wide[l] != 0;
        return !any_wide;
    }

    // The largest logarithm that row i of head p sees in a chunk.
    T level(const Prepared<T>& s, const Band& b, index p, index i) const {
        Vec<T> best = splat(-T(__builtin_inf()));
        for (index r = 0; r < R && b.low(i) < b.keys; r += LANES<T>)
            best = larger<T>(best, row_log(p, i, r) + load(s.top + b.low(i) * R + r));
        return largest<T>(best);
    }

    // weighted = q weight, weight = exp(row's logarithms + origin of the chunk - row).
    void weigh(const Prepared<T>& s, const Band& b, index p, const T* row) {
        for (index i = 0; i < b.queries; ++i) {
            const bool sees = b.low(i) < b.keys;
            for (index r = 0; r < R; r += LANES<T>) {
                Vec<T> w{};
                if (!walk.logarithmic) {
                    w = decaying(row_log(p, i, r));
                } else if (sees) {
                    const Vec<T> top = load(s.top + b.low(i) * R + r);
                    w = exponential(row_log(p, i, r) + load(s.origin + r) - splat(finite(row[i])));
                    w = top == -T(__builtin_inf()) ? Vec<T>{} : w;  // a feature of no key in sight
                }
                store(weight + i * R + r, w);
                store(weighted + i * R + r, call.query ? w * load(raw_q + (p * CHUNK + i) * R + r) : w);
            }
        }
        const index end = (b.queries + ROWS - 1) / ROWS * ROWS;
        std::memset(weighted + b.queries * R, 0, sizeof(T) * (end - b.queries) * R);
    }

    // Calls body(i, j, the exponent of their weight, to which row[i] is the origin) for all pairs of the band.
    template <class Body>
    void one_by_one(const Span& span, const Prepared<T>& s, const Band& b, Body&& body) {
        if (call.key) {
            const index start = span.item.start + b.first;
            take<T>(call.key, span.item.b, span.item.g, start, b.keys, R, walk.mask(span.item, start), call.map, raw_k);
            if (call.sum_normalize) normalize_rows(raw_k, b.keys, R, walk.totals_k);
        }
        for (index i = 0; i < b.queries; ++i)
            for (index j = b.low(i); j < b.high(i); ++j) body(i, j, s.col + j * R);
    }

    // Mantissas, and the exponential of the logarithms at the origin `row`.
    Vec<T> q_of(index p, index i, index r) const {
        return call.query ? load(raw_q + (p * CHUNK + i) * R + r) : splat(T(1));
    }
    Vec<T> k_of(index j, index r) const { return call.key ? load(raw_k + j * R + r) : splat(T(1)); }
    Vec<T> pair_weight(index p, index i, index r, const T* col, T row) const {
        return decaying(row_log(p, i, r) + load(col + r) - splat(finite(row)));
    }

    // Takes chunk m into the window of the next one. Keys weighted for their own queries are loaded again.
    void slide(const Span& span, index m, bool again) {
        if (!plan.states || again != walk.graded) return;
        if (again && !plan.shared) load_alone(span, m);
        if (plan.shared)
            summarize(again ? prepare(span, m) : kept[m % plan.kept]);
        else
            summarize(home());
        if (sliding.count() > plan.whole) sliding.pop();
    }

    // A chunk of keys as a summary of its own.
    void load_alone(const Span& span, index m) { load_chunk(span, m, home(), nothing, false); }

    // Weights of the features that the walk holds; where there are no mantissas they are all there is.
    T* query_weights() const { return call.query ? walk.q_weight : walk.q; }
    T* key_weights() const { return call.key ? walk.k_weight : walk.k; }

    bool has_middle() const { return any; }
    Prepared<T>& home() { return kept[plan.kept]; }

    // Chunk m at an origin of its own.
    Prepared<T>& prepare(const Span& span, index m) {
        Prepared<T>& s = kept[m % plan.kept];
        if (s.chunk != m) load_chunk(span, m, s, nothing, false), record(s, m);
        return s;
    }

private:
    const bool backward;
    Arena arena;
    Prepared<T> kept[KEPT + 1];
    T *raw_k, *since, *between, *nothing;
    double prefix[CHUNK];  // scalar: log decay from the chunk's start through each position
    bool any = false;

    index bytes() const {
        const index slot = CHUNK * (4 * R + 2 * E + 1) + 2 * R;
        const index own = Run<T>::size(R, E) + CHUNK * (2 * P * R + 4 * R + 1 + CHUNK) + 2 * R;
        return index(sizeof(T)) * ((plan.kept + 1) * slot + own) +
               64 * (16 + 10 * (plan.kept + 1));
    }

    void load_chunk(const Span& span, index m, Prepared<T>& s, const T* scale, bool causal) {
        walk.k = s.k, walk.kt = s.kt, walk.v = s.v;
        if (walk.graded) walk.log = s.top, walk.suffix = s.col, walk.after = s.origin;
        s.chunk = -1;
        walk.load_keys(span.item, span.item.start + span.first(m), span.count(m), scale, causal, backward);
        decay_of_chunk(s.decay);
    }

    static T finite(T x) { return x == -T(__builtin_inf()) ? T(0) : x; }

    void decay_of_chunk(T* to) const {
        const index n = walk.chunk.n;
        std::memset(to, 0, sizeof(T) * R);
        if (walk.graded && call.log_decay)
            for (index r = 0; r < R; ++r) to[r] = walk.gate[r] + walk.suffix[r];
        double total = 0;
        for (index t = 0; walk.scalar && t < n; ++t) total += walk.gate[t] < T(-1000) ? -1000.0 : double(walk.gate[t]);
        if (walk.scalar) to[0] = T(total);
    }

    void record(Prepared<T>& s, index m) {
        s.chunk = m, s.n = walk.chunk.n, s.values = walk.chunk.v, s.ldv = walk.chunk.ldv;
        if (walk.scalar) std::memcpy(s.to_end, walk.to_end, sizeof(T) * CHUNK);
        if (backward) transpose(s.values, s.ldv, s.vt, CHUNK, CHUNK, E);
        if (!walk.logarithmic) return;
        for (index r = 0; r < R; r += LANES<T>) {
            Vec<T> best = splat(-T(__builtin_inf()));
            for (index t = s.n - 1; t >= 0; --t) {
                const index at = t * R + r;
                const Vec<T> x = load(s.top + at) + load(s.col + at);  // the logarithm and its decay to the end
                store(s.col + at, x);
                best = larger<T>(best, x);
                store(s.top + at, best);
            }
        }
    }

    // Number of positions before the first real key of a chunk, if there is nothing before the chunk either.
    index unseeing(const Span& span, index m) const {
        for (index r = 0; r < R && walk.logarithmic; ++r)
            if (middle.state.scale[r] != -T(__builtin_inf())) return 0;
        const bool* mask = walk.mask(span.item, span.item.start + span.first(m));
        index t = 0;
        while (mask && t < span.count(m) && !mask[t]) ++t;
        return t;
    }

    // Decays from the start of the chunk of the queries.
    void sum_gates(index n) {
        if (walk.scalar) {
            double total = 0;
            for (index i = 0; i < CHUNK; ++i) {
                if (i < n) total += walk.gate[i] < T(-1000) ? -1000.0 : double(walk.gate[i]);
                prefix[i] = total;
            }
        }
        if (!walk.graded || !call.log_decay) return;
        for (index r = 0; r < R; r += LANES<T>) {
            double total[LANES<T>] = {};
            for (index t = 0; t < n; ++t)
                for (int l = 0; l < LANES<T>; ++l)
                    since[t * R + r + l] = T(total[l] += double(walk.gate[t * R + r + l]));
        }
    }

    // What a chunk reads of itself and of the whole chunks before it.
    void own(const Span& span, index m) {
        T* z = call.normalizer ? middle.state.z : nullptr;
        if (walk.way == Way::token) {
            walk.move(middle.state, true);
            return;
        }
        if (any) {
            if (walk.way == Way::steady) walk.scale_rows(middle.state.S, z);
            read_chunk(walk.chunk, middle.state.S, z, walk.o, walk.den, walk.weights);
            return;
        }
        const Band b = span.band(m, m, call.window);
        std::memset(walk.den, 0, sizeof(T) * P * CHUNK);
        for (index p = 0; p < P; ++p) {
            std::memset(walk.o + p * CHUNK * E, 0, sizeof(T) * CHUNK * E);
            add_band(b, walk.q + p * CHUNK * R, walk.kt, R, walk.chunk.v, walk.chunk.ldv, E,
                     {nullptr, nullptr, walk.chunk.between}, walk.o + p * CHUNK * E,
                     z ? walk.den + p * CHUNK : nullptr, A);
        }
    }

    void summarize(const Prepared<T>& s) {
        Run<T> run = sliding.next();
        walk.move(run.state, false);
        std::memcpy(run.decay, s.decay, sizeof(T) * R);
        sliding.push();
    }

    // A part of the rows, brought to the larger of its scale and theirs.
    void add(const Span& span, Prepared<T>& s, const Band& b) {
        const bool common = steady(s, b);
        for (index p = 0; p < P; ++p) {
            T *o = walk.o + p * CHUNK * E, *row = walk.row + p * CHUNK;
            T* den = call.normalizer ? walk.den + p * CHUNK : nullptr;
            for (index i = 0; walk.logarithmic && i < b.queries; ++i) raise(level(s, b, p, i), i, o, den, row);
            if (common) {
                if (walk.graded) weigh(s, b, p, row);
                const T* q = walk.graded ? weighted : walk.q + p * CHUNK * R;
                add_band(b, q, s.kt, R, s.values, s.ldv, E, factors(s), o, den, A);
                continue;
            }
            one_by_one(span, s, b, [&](index i, index j, const T* col) {
                Vec<T> dot{};
                for (index r = 0; r < R; r += LANES<T>)
                    dot += q_of(p, i, r) * k_of(j, r) * pair_weight(p, i, r, col, row[i]);
                const T a = sum<T>(dot);
                if (den) den[i] += a;
                for (index c = 0; c < E; c += LANES<T>)
                    store(o + i * E + c, load(o + i * E + c) + splat(a) * load(s.values + j * s.ldv + c));
            });
        }
    }
    void raise(T level, index i, T* o, T* den, T* row) const {
        if (!(level > row[i])) return;
        const Vec<T> factor_ = decaying(splat(row[i] - level));
        for (index c = 0; c < E; c += LANES<T>) store(o + i * E + c, load(o + i * E + c) * factor_);
        if (den) den[i] *= factor_[0];
        row[i] = level;
    }
};

template <class T>
inline void window_forward(const Call& call) {
    const Plan plan = plan_window<T>(call);
    const index items = call.sequences * call.groups;
    if (!items) return;
    // Queries do not depend on each other: where there are fewer heads than threads, sequences are cut.
    const index cuts = items < call.threads ? (call.threads + items - 1) / items : 1;
    const index jobs = items * cuts;
    const int team = int(call.threads < jobs ? call.threads : jobs);
    parallel_for(team, team, [&](index member, int) {
        Walk<T> walk(call);
        Window<T> window(walk, plan, false);
        for (index job = member; job < jobs; job += team) {
            const Span span(call, plan, job / cuts);
            const index count = span.chunks() - span.lead, each = (count + cuts - 1) / cuts;
            const index from = job % cuts * each, to = from + each < count ? from + each : count;
            if (from < to) window.run(span, span.lead + from, span.lead + to);
        }
    });
}

}  // namespace reassoc::REASSOC_ISA
