// How a call with a window is cut into chunks, and which way is cheaper; see window.h for both.
#pragma once

#include "band.h"
#include "features.h"
#include "walk.h"

namespace reassoc::REASSOC_ISA {

constexpr index KEPT = 8;  // as much as stays in the second cache

struct Plan {
    index chunk, whole, kept;  // positions per chunk; chunks seen whole; key chunks kept in scratch
    bool states, shared;       // a chunk loaded once is kept until the last query that sees it
};

// One sequence of one key head: its queries are the last positions of its keys.
struct Span {
    Item item;
    index query_start, C, base, lead;  // chunk m begins at key base + m C; the first of queries is `lead`

    Span(const Call& c, const Plan& plan, index number) : item{}, C(plan.chunk) {
        item.g = number % c.groups;
        item.state = number / c.groups;
        if (c.boundaries) {
            const std::int64_t* of_queries = c.query_boundaries ? c.query_boundaries : c.boundaries;
            item.start = c.boundaries[item.state];
            item.keys = c.boundaries[item.state + 1] - item.start;
            query_start = of_queries[item.state];
            item.queries = of_queries[item.state + 1] - query_start;
        } else {
            item.b = item.state;
            item.queries = c.queries, item.keys = c.keys, query_start = 0;
        }
        item.columns = c.columns;
        const index offset = item.keys - item.queries;
        base = offset % C ? offset % C - C : 0;
        lead = (offset - base) / C;
    }
    index chunks() const { return (item.keys - base + C - 1) / C; }
    index first(index m) const { return base + m * C > 0 ? base + m * C : 0; }
    index count(index m) const {
        const index end = base + (m + 1) * C;
        return (end < item.keys ? end : item.keys) - first(m);
    }
    index query(index m) const { return query_start + first(m) - (item.keys - item.queries); }
    index oldest(index m, index window) const {  // the first chunk that the queries of chunk m see
        const index position = first(m) - window + 1;
        return position > 0 ? (position - base) / C : 0;
    }
    Band band(index m, index keys_of, index window) const {
        return {first(m), count(m), first(keys_of), count(keys_of), window};
    }
};

template <class T>
inline Plan plan_window(const Call& c) {
    const bool graded = c.key_log || (c.log_decay && c.log_decay.width > 1);
    index queries = c.queries, keys = c.keys;
    if (c.boundaries) {
        const std::int64_t* of_queries = c.query_boundaries ? c.query_boundaries : c.boundaries;
        queries = keys = 0;
        for (index s = 0; s < c.sequences; ++s) {
            const index q = of_queries[s + 1] - of_queries[s], k = c.boundaries[s + 1] - c.boundaries[s];
            queries = q > queries ? q : queries, keys = k > keys ? k : keys;
        }
    }
    Plan plan{CHUNK, 0, 0, false, false};
    // A band through the chunk itself has no place in graded.h: there a chunk is no longer than the window.
    while (graded && plan.chunk > c.window) plan.chunk /= 2;
    const index C = plan.chunk, chunks = (queries + C - 1) / C, all = (keys + C - 1) / C + 1;
    plan.whole = c.window / C - 1;
    if (plan.whole > all) plan.whole = all;
    if (plan.whole < 0) plan.whole = 0;
    const double r = double(padded<T>(c.features)), e = double(padded<T>(c.columns)), P = double(c.share);
    const double whole = double(plan.whole), exponentials = graded ? 8 * r : 0;
    const double pairs = P * double(queries) * whole * (double(C) * (r + e) + exponentials);
    const double states = double(chunks + plan.whole) * (double(C) * r * e + 24 * r * e) + P * double(queries) * r * e;
    plan.states = states < pairs;
    const index used = plan.whole + 3 < all ? plan.whole + 3 : all;
    plan.shared = used <= KEPT;
    plan.kept = plan.shared ? used : 2;
    return plan;
}

}  // namespace reassoc::REASSOC_ISA
