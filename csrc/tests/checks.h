// What the tests of the kernels share: random numbers, buffers that show what was not to be touched, and errors
// measured against a reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "../call.h"
#include "../vec.h"

namespace checks {

inline std::uint64_t state = 1;
inline double uniform() {  // in [0, 1): splitmix64
    std::uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return double((x ^ (x >> 31)) >> 11) * 0x1p-53;
}
inline double symmetric() { return 2 * uniform() - 1; }
inline std::int64_t below(std::int64_t n) { return std::int64_t(uniform() * double(n)); }

// Exactly `size` numbers, aligned like the scratch of the kernels unless `offset` moves them; NaN at first, so
// that what is read before it is written shows, as does (with the address sanitizer) what lies beyond the end.
template <class T>
class Buffer {
public:
    explicit Buffer(std::int64_t size, std::int64_t offset = 0) : size_(size), offset_(offset) {
        data_ = static_cast<T*>(::operator new(sizeof(T) * (size + offset), std::align_val_t(64)));
        for (std::int64_t i = 0; i < size + offset; ++i) data_[i] = std::numeric_limits<T>::quiet_NaN();
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
    operator T*() const { return data_ + offset_; }
    std::int64_t size() const { return size_; }

private:
    T* data_;
    std::int64_t size_, offset_;
};

// Feature f of a row x of r numbers under a map of the kernels, in double; with `sum` divided by all of them.
template <class T>
double feature(const T* x, std::int64_t r, reassoc::Map map, bool sum, std::int64_t f) {
    auto mapped = [&](std::int64_t at) {
        const double y = double(x[at]);
        return map == reassoc::Map::elu1 ? (y > 0 ? y + 1 : std::exp(y)) : y;
    };
    double total = sum ? 0 : 1;
    for (std::int64_t at = 0; sum && at < r; ++at) total += mapped(at);
    return mapped(f) / total;
}

// Of so many random cases, those there is time for: sanitizers slow each down tenfold and more.
constexpr int cases(int all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return all / 8;
#else
    return all;
#endif
}

[[noreturn]] inline void fail(const char* what, double got, double limit) {
    std::printf("FAILED: %s: %g, allowed %g\n", what, got, limit);
    std::exit(1);
}
inline void require(bool holds, const char* what) {
    if (!holds) fail(what, 0, 0);
}

// The largest difference must be within `budget` of the largest reference (or of `floor`, where that is larger).
template <class T, class Index>
void close(const char* what, const std::vector<double>& want, const T* got, Index&& at, double budget, double floor) {
    double scale = floor, worst = 0;
    for (double w : want) scale = std::fmax(scale, std::fabs(w));
    for (std::size_t i = 0; i < want.size(); ++i) {
        const double error = std::fabs(double(got[at(std::int64_t(i))]) - want[i]);
        if (!(error <= budget * scale)) fail(what, error / scale, budget);
        worst = std::fmax(worst, error);
    }
}

// The error budgets of the project, for values; gradients have three times as much.
template <class T>
constexpr double BUDGET = sizeof(T) == 4 ? 1e-5 : 1e-10;

}  // namespace checks
