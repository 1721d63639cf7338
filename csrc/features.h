// From what the caller holds to features in scratch, and back again for gradients: types, strides, padding,
// hidden keys, and the maps that work on one coordinate at a time.
#pragma once

#include "additive.h"
#include "call.h"

namespace reassoc::REASSOC_ISA {

struct Half {  // bfloat16: the upper half of a float
    std::uint16_t bits;
};

REASSOC_INLINE float to_float(float x) { return x; }
REASSOC_INLINE double to_float(double x) { return x; }
REASSOC_INLINE float to_float(_Float16 x) { return float(x); }
REASSOC_INLINE float to_float(Half x) {
    const std::uint32_t bits = std::uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
template <class Out, class T>
REASSOC_INLINE Out narrow(T x) {
    if constexpr (sizeof(Out) == sizeof(Half) && !__is_same(Out, _Float16)) {
        const float y = float(x);
        std::uint32_t bits;
        std::memcpy(&bits, &y, sizeof bits);
        if (!(y == y)) return Half{std::uint16_t((bits >> 16) | 0x40)};
        return Half{std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to the nearest, ties to even
    } else {
        return Out(x);
    }
}

// Calls body(pointer of the view's own type, from an element offset).
template <class Body>
REASSOC_INLINE void typed(const View& view, index offset, Body&& body) {
    switch (view.kind) {
        case Kind::f32: body(static_cast<float*>(view.data) + offset); break;
        case Kind::f64: body(static_cast<double*>(view.data) + offset); break;
        case Kind::f16: body(static_cast<_Float16*>(view.data) + offset); break;
        case Kind::bf16: body(static_cast<Half*>(view.data) + offset); break;
    }
}

template <class T, class In>
REASSOC_INLINE Vec<T> fetch(const In* from) {
    if constexpr (sizeof(In) == sizeof(T) && __is_same(In, T)) {
        return load(from);
    } else {
        Vec<T> x;
        for (int l = 0; l < LANES<T>; ++l) x[l] = T(to_float(from[l]));
        return x;
    }
}

// One row of `width` numbers as whole registers, `size` in all, zeros at the end; each passes through `map`.
template <class T, class In, class Function>
REASSOC_INLINE void row(const In* from, index width, index size, T* to, Function&& map) {
    constexpr int L = LANES<T>;
    index at = 0;
    for (; at + L <= width; at += L) store(to + at, map(fetch<T>(from + at)));
    if (at < width) {
        T rest[L] = {};
        for (index l = 0; at + l < width; ++l) rest[l] = T(to_float(from[at + l]));
        Vec<T> x = map(load(rest));
        for (int l = 0; l < L; ++l)
            if (at + l >= width) x[l] = 0;
        store(to + at, x);
        at += L;
    }
    for (; at < size; at += L) store(to + at, Vec<T>{});
}

// Calls body(function of one register): once per chunk, so that the loops inside know which.
template <class T, class Body>
REASSOC_INLINE void mapped(Map map, Body&& body) {
    switch (map) {
        // Written so that NaN stays NaN.
        case Map::elu1: body([](Vec<T> x) { return x > T(0) ? x + T(1) : decaying(x); }); break;
        case Map::relu: body([](Vec<T> x) { return x <= T(0) ? Vec<T>{} : x; }); break;
        case Map::relu2: body([](Vec<T> x) { return x <= T(0) ? Vec<T>{} : x * x; }); break;
        case Map::given: body([](Vec<T> x) { return x; }); break;
    }
}

// Rows `start`.. of head `h` into to[n][size], mapped; hidden rows, and those up to the next tile, are zero.
template <class T>
inline void take(const View& view, index b, index h, index start, index n, index size, const bool* mask, Map map,
                 T* to) {
    typed(view, b * view.batch + h * view.head + start * view.position, [&](auto* from) {
        mapped<T>(map, [&](auto function) {
            for (index t = 0; t < n; ++t) {
                if (mask && !mask[t])
                    std::memset(to + t * size, 0, sizeof(T) * size);
                else
                    row<T>(from + t * view.position, view.width, size, to + t * size, function);
            }
        });
    });
    const index end = (n + ROWS - 1) / ROWS * ROWS;
    std::memset(to + n * size, 0, sizeof(T) * (end - n) * size);
}

// Divides every row by its own sum, and keeps the sums (0: an empty row, which stays zero).
template <class T>
inline void normalize_rows(T* rows, index n, index size, T* totals) {
    constexpr int L = LANES<T>;
    index t = 0;
    for (; t + L <= n; t += L) {
        Vec<T> acc[L] = {};
        for (index r = 0; r < size; r += L)
            REASSOC_UNROLL
            for (int m = 0; m < L; ++m) acc[m] += load(rows + (t + m) * size + r);
        store<T>(totals + t, sums<T>(acc));
    }
    for (; t < n; ++t) {
        Vec<T> acc{};
        for (index r = 0; r < size; r += L) acc += load(rows + t * size + r);
        totals[t] = sum<T>(acc);
    }
    for (t = 0; t < n; ++t) {
        const T total = totals[t], inverse = T(1) / total;
        if (total == T(0)) continue;
        const bool tame = inverse - inverse == T(0);  // else the quotient itself may still be finite
        for (T* at = rows + t * size; at < rows + (t + 1) * size; at += L)
            store(at, tame ? load(at) * splat(inverse) : load(at) / splat(total));
    }
}

// The gradient through that. `phi` and `d` may carry weights, which the normalized rows do not: phi = weight *
// normalized, and d is with respect to phi; d <- (weight d - sum(d phi)) / total.
template <class T>
inline void normalize_rows_backward(T* d, const T* phi, const T* weight, index n, index size, const T* totals) {
    constexpr int L = LANES<T>;
    for (index t = 0; t < n; ++t) {
        Vec<T> acc{};
        for (index r = 0; r < size; r += L) acc += load(d + t * size + r) * load(phi + t * size + r);
        const T inner = sum<T>(acc), factor = totals[t] == T(0) ? T(0) : T(1) / totals[t];
        for (index at = t * size; at < (t + 1) * size; at += L) {
            const Vec<T> own = weight ? load(d + at) * load(weight + at) : load(d + at);
            store(d + at, (own - splat(inner)) * splat(factor));
        }
    }
}

// d <- d * dphi/dx, with x read again from the view.
template <class T>
inline void chain(const View& view, index b, index h, index start, index n, index size, Map map, T* d) {
    if (map == Map::given) return;
    constexpr int L = LANES<T>;
    typed(view, b * view.batch + h * view.head + start * view.position, [&](auto* from) {
        for (index t = 0; t < n; ++t) {
            T* to = d + t * size;
            index at = 0;
            auto all = [&](auto function) {
                for (; at + L <= view.width; at += L) store(to + at, load(to + at) * function(fetch<T>(from + at)));
                T rest[L] = {};
                for (index l = 0; at + l < view.width; ++l) rest[l] = T(to_float(from[at + l]));
                if (at < view.width) store(to + at, load(to + at) * function(load(rest)));
            };
            if (map == Map::elu1) all([](Vec<T> x) { return x > T(0) ? splat(T(1)) : decaying(x); });
            if (map == Map::relu) all([](Vec<T> x) { return x > T(0) ? splat(T(1)) : Vec<T>{}; });
            if (map == Map::relu2) all([](Vec<T> x) { return x > T(0) ? x + x : Vec<T>{}; });
            from += view.position;
        }
    });
}

// Writes n rows of `width` numbers to a view.
template <class T>
inline void give(const View& view, index b, index h, index start, index n, index size, const T* from) {
    typed(view, b * view.batch + h * view.head + start * view.position, [&](auto* to) {
        using Out = __typeof__(*to);
        for (index t = 0; t < n; ++t) {
            index l = 0;
            if constexpr (__is_same(Out, T))
                for (; l + LANES<T> <= view.width; l += LANES<T>)
                    store(to + t * view.position + l, load(from + t * size + l));
            for (; l < view.width; ++l) to[t * view.position + l] = narrow<Out>(from[t * size + l]);
        }
    });
}

}  // namespace reassoc::REASSOC_ISA
