// The whole call, forward: work split over heads, over columns (delta rules) or over the sequence (additive).
#pragma once

#include "parallel.h"
#include "walk.h"

namespace reassoc::REASSOC_ISA {

REASSOC_INLINE Item item_of(const Call& c, index number) {
    Item item{};
    item.g = number % c.groups;
    item.state = number / c.groups;
    if (c.boundaries) {
        item.start = c.boundaries[item.state];
        item.queries = item.keys = c.boundaries[item.state + 1] - item.start;
    } else {
        item.b = item.state;
        item.queries = c.queries, item.keys = c.keys;
    }
    item.columns = c.columns;
    return item;
}

// Where the reads of head p go. The quotient is taken on the way, straight into the caller's tensor, if that holds
// numbers of our type and no denominator needs care; else the reads go to scratch.
template <class T>
inline Target<T> place(const Walk<T>& walk, const Item& item, index start, index n, index p) {
    constexpr int L = LANES<T>;
    const Call& call = walk.call;
    const View& out = call.out;
    bool direct = out.kind == Walk<T>::kind() && item.columns == walk.E && n % ROWS == 0;
    if (call.divide) {
        T* den = walk.den + p * CHUNK;
        for (index t = n; t % L; ++t) den[t] = 1;
        Ints<T> tame = Vec<T>{} == Vec<T>{};
        for (index t = 0; t < n; t += L) {
            const Vec<T> inverse = T(1) / (load(den + t) + T(call.eps));
            store<T>(walk.factor + t, inverse);
            tame &= inverse - inverse == T(0);
        }
        for (int l = 0; l < L; ++l) direct &= tame[l] != 0;
    } else if (call.sum_normalize && !call.normalizer) {
        for (index t = 0; t < n; ++t) direct &= walk.totals_q[p * CHUNK + t] != T(0);
    }
    if (!direct) return walk.scratch(p);
    const index at = item.b * out.batch + (item.g * walk.P + p) * out.head + start * out.position;
    return {static_cast<T*>(out.data) + at + item.first_column, out.position, call.divide ? walk.factor : nullptr};
}

// The rest for head p, whose reads are in `target`: quotients, if they are in scratch, and denominators.
template <class T>
inline void finish(const Walk<T>& walk, const Item& item, index start, index n, index p, const Target<T>& target) {
    const Call& call = walk.call;
    const index E = walk.E, head = item.g * walk.P + p;
    const T fill = T(call.fill);
    T *o = walk.scratch(p).to, *den = walk.den + p * CHUNK;
    for (index t = 0; call.divide && t < n; ++t) den[t] += T(call.eps);
    if (target.to == o) {
        if (call.divide)
            for (index t = 0; t < n; ++t) {
                T* line = o + t * E;
                const T d = den[t], inverse = T(1) / d;
                if (d == T(0)) {
                    for (index c = 0; c < E; c += LANES<T>) store(line + c, splat(fill));
                    continue;
                }
                const bool tame = inverse - inverse == T(0);  // else the quotient itself may still be finite
                for (index c = 0; c < E; c += LANES<T>)
                    store(line + c, tame ? load(line + c) * splat(inverse) : load(line + c) / splat(d));
            }
        else if (call.sum_normalize && !call.normalizer)
            for (index t = 0; t < n; ++t)
                if (walk.totals_q[p * CHUNK + t] == T(0))
                    for (index c = 0; c < E; c += LANES<T>) store(o + t * E + c, splat(fill));
        View out = call.out;
        out.data = static_cast<char*>(out.data) + item.first_column * Walk<T>::element(out.kind);
        out.width = item.columns;
        give<T>(out, item.b, head, start, n, E, o);
    }
    if (item.first_column != 0) return;
    if (call.normalizer && !call.divide) {
        View last = call.out;
        last.data = static_cast<char*>(last.data) + call.columns * Walk<T>::element(last.kind);
        last.width = 1;
        give<T>(last, item.b, head, start, n, 1, den);
    }
    const index flat = (item.b * call.groups * walk.P + head) * call.queries + start;
    if (call.normalizer && call.denominator)
        std::memcpy(static_cast<T*>(call.denominator) + flat, den, sizeof(T) * n);
    if (walk.logarithmic && call.log_row)
        std::memcpy(static_cast<T*>(call.log_row) + flat, walk.row + p * CHUNK, sizeof(T) * n);
}

// For all heads, whose reads are in scratch.
template <class T>
inline void finish(const Walk<T>& walk, const Item& item, index start, index n) {
    for (index p = 0; p < walk.P; ++p) finish(walk, item, start, n, p, walk.scratch(p));
}

// Reads of the loaded queries from a state and, if causal, the loaded keys; `end` is where the item ends.
template <class T>
inline void read_heads(const Walk<T>& walk, const Item& item, State<T> s, index start, index n, index end, bool causal) {
    for (index p = 0; p < walk.P; ++p) {
        const index head = item.g * walk.P + p, next = start + CHUNK;
        weigh_chunk(walk.chunk, p, walk.call.normalizer ? s.z : nullptr, walk.den + p * CHUNK, walk.weights, causal,
                    [&](index from, index to) {
                        walk.soon(walk.call.out, item.b, head, start + from, start + to, end);
                        if (causal && p == 0) walk.soon_keys(item, next + from, next + to, end);
                    });
        const Target<T> target = place(walk, item, start, n, p);
        read_chunk(walk.chunk, p, s.S, walk.weights, causal, target,
                   [&](index from, index to) { walk.soon_queries(item, head, next + from, next + to, end); });
        finish(walk, item, start, n, p, target);
    }
}

// Walks keys from..to of an item; causal positions read on the way.
template <class T>
inline void advance(Walk<T>& walk, const Item& item, State<T> s, index from, index to, bool reads) {
    for (index at = from; at < to; at += CHUNK) {
        const index n = to - at < CHUNK ? to - at : CHUNK, start = item.start + at;
        const index end = item.start + item.keys;
        walk.load_keys(item, start, n, s.scale, walk.call.causal);
        if (reads) walk.load_queries(item, start, n);
        auto soon = [&](index i, index j) { walk.soon_values(item, start + CHUNK + i, start + CHUNK + j, end); };
        if (reads && walk.way != Way::token) {
            walk.enter(s);
            read_heads(walk, item, s, start, n, end, true);
            walk.write(s, soon);
            walk.leave(s);
            continue;
        }
        walk.move(s, reads, [&](index i, index j) {
            soon(i, j);
            walk.soon_keys(item, start + CHUNK + i, start + CHUNK + j, end);
            for (index head = item.g * walk.P; reads && head < (item.g + 1) * walk.P; ++head) {
                walk.soon_queries(item, head, start + CHUNK + i, start + CHUNK + j, end);
                walk.soon(walk.call.out, item.b, head, start + i, start + j, end);
            }
        });
        if (reads) finish(walk, item, start, n);
    }
}

// Queries from..to of an item that all read one state.
template <class T>
inline void read_all(Walk<T>& walk, const Item& item, State<T> s, index from, index to) {
    walk.at_end(s.scale);
    for (index at = from; at < to; at += CHUNK) {
        const index n = to - at < CHUNK ? to - at : CHUNK, start = item.start + at;
        walk.load_queries(item, start, n);
        walk.chunk = {n, walk.R, walk.E, walk.P, walk.q, walk.k, walk.kt, walk.v, walk.E, nullptr, nullptr, nullptr, T(1)};
        read_heads(walk, item, s, start, n, item.start + item.queries, false);
    }
}

template <class T>
inline void whole(Walk<T>& walk, const Item& item, State<T> s) {
    walk.begin(item);
    walk.open(item, s);
    advance(walk, item, s, 0, item.keys, walk.call.causal);
    if (!walk.call.causal) read_all(walk, item, s, 0, item.queries);
    walk.close(item, s, walk.call.memory_out, walk.call.scale_out);
}

// s = the run `later` after the run s: both are states, `later` starting from nothing.
template <class T>
inline void append(const Walk<T>& walk, State<T> s, State<T> later, double log_total, const T* feature_total) {
    constexpr int L = LANES<T>;
    const index R = walk.R;
    alignas(64) T past[L], now[L];
    for (index r = 0; r < R; r += L) {
        Vec<T> keep = splat(T(log_total)), fresh{};
        if (walk.graded) keep = load(feature_total + r);
        if (walk.logarithmic) {
            keep += load(s.scale + r);
            const Vec<T> scale = larger<T>(keep, load(later.scale + r)), origin = or_zero<T>(scale);
            fresh = load(later.scale + r) - origin;
            keep -= origin;
            store(s.scale + r, scale);
        }
        store(past, decaying(keep));
        store(now, decaying(fresh));
        for (int l = 0; l < L; ++l) {
            s.z[r + l] = past[l] * s.z[r + l] + now[l] * later.z[r + l];
            blocks<T>(s.S, R, walk.E, [&](index from, index width, T* block) {
                const T* other = later.S + R * from + (r + l) * width;
                T* mine = block + (r + l) * width;
                for (index c = 0; c < width; c += L)
                    store(mine + c, load(mine + c) * splat(past[l]) + load(other + c) * splat(now[l]));
            });
        }
    }
}

// One long sequence for several threads, in two passes. First the runs before the last span are summarized,
// in pieces small enough that every thread has the same share; then every thread reads a span of its own,
// from the state before it.
template <class T>
inline void split(const Call& call, const Item& item, int threads) {
    const index R = padded<T>(call.features), E = padded<T>(call.columns), size = State<T>::size(R, E);
    const index pieces = call.causal ? index(threads) * (threads - 1) : threads;
    const index parts = call.causal ? index(threads) * threads : threads;
    const index length = (item.keys + parts * CHUNK - 1) / (parts * CHUNK) * CHUNK;
    Arena arena(Arena::bytes<T>((pieces + threads + 1) * (size + R)));
    T* states = arena.take<T>((pieces + threads + 1) * (size + R));
    auto state = [&](index piece) { return State<T>::at(states + piece * size, R, E); };
    T* totals = states + (pieces + threads + 1) * size;
    auto limit = [&](index piece) { return piece * length < item.keys ? piece * length : item.keys; };
    Arena logs_arena(Arena::bytes<double>(pieces));
    double* logs = logs_arena.take<double>(pieces);
    parallel_for(pieces, threads, [&](index piece, int) {
        Walk<T> walk(call);
        walk.begin(item);
        State<T> s = state(piece);
        walk.blank(s);
        advance(walk, item, s, limit(piece), limit(piece + 1), false);
        logs[piece] = walk.log_total;
        if (walk.graded) std::memcpy(totals + piece * R, walk.feature_total, sizeof(T) * R);
    });
    Walk<T> walk(call);
    walk.begin(item);
    State<T> s = state(pieces + threads);
    walk.open(item, s);
    for (index piece = 0; piece < pieces; ++piece) {
        // A span starts where `threads` pieces end.
        if (call.causal && piece % threads == 0)
            std::memcpy(state(pieces + piece / threads).S, s.S, sizeof(T) * size);
        append(walk, s, state(piece), logs[piece], totals + piece * R);
    }
    if (call.causal) std::memcpy(state(pieces + threads - 1).S, s.S, sizeof(T) * size);
    parallel_for(threads, threads, [&](index span, int) {
        Walk<T> own(call);
        own.begin(item);
        if (call.causal) {
            State<T> mine = state(pieces + span);
            const index from = limit(span * threads), to = span + 1 == threads ? item.keys : limit((span + 1) * threads);
            advance(own, item, mine, from, to, true);
            if (span + 1 == threads) own.close(item, mine, call.memory_out, call.scale_out);
        } else {
            const index each = (item.queries + threads * CHUNK - 1) / (threads * CHUNK) * CHUNK;
            const index from = span * each, to = from + each < item.queries ? from + each : item.queries;
            read_all(own, item, s, from, to);
            if (span == 0) own.close(item, s, call.memory_out, call.scale_out);
        }
    });
}

template <class T>
inline void forward(const Call& call) {
    const index items = call.sequences * call.groups, threads = call.threads;
    const index R = padded<T>(call.features);
    if (!call.delta && items < threads) {
        // Every piece costs a state: no more threads than keep those smaller than what is read.
        const index size = State<T>::size(R, padded<T>(call.columns)), room = call.keys * (R + padded<T>(call.columns));
        index team = threads;
        while (team > 1 && (call.keys < 8 * CHUNK * team || team * (team + 1) * size > room)) --team;
        if (team > 1 && team > items) {
            for (index number = 0; number < items; ++number) split<T>(call, item_of(call, number), int(team));
            return;
        }
    }
    // A delta rule treats every column of the values on its own.
    const index registers = padded<T>(call.columns) / LANES<T>;
    index parts = call.delta && items && items < threads ? (threads + items - 1) / items : 1;
    if (parts > registers) parts = registers;
    if (parts < 1) parts = 1;
    const index width = (registers + parts - 1) / parts * LANES<T>;
    const int team = int(threads < items * parts ? threads : items * parts);
    if (team < 1) return;
    parallel_for(team, team, [&](index member, int) {
        Walk<T> walk(call);
        const index size = State<T>::size(R, padded<T>(call.columns));
        Arena arena(Arena::bytes<T>(size));
        T* memory = arena.take<T>(size);
        for (index job = member; job < items * parts; job += team) {
            Item item = item_of(call, job / parts);
            item.first_column = job % parts * width;
            item.columns = call.columns - item.first_column < width ? call.columns - item.first_column : width;
            if (parts > 1 && item.columns <= 0) continue;
            whole(walk, item, State<T>::at(memory, R, padded<T>(item.columns)));
        }
    });
}

}  // namespace reassoc::REASSOC_ISA
