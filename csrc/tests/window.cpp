// Calls with a window through the table of kernels: forward against every weight written out in double, backward
// against finite differences, threads against one thread, keys that have left the window, hostile scales. Every
// buffer ends where its tensor ends.
#include <algorithm>
#include <cstring>
#include <memory>

#include "call.h"
#include "checks.h"

using namespace reassoc;
using checks::below;
using checks::Buffer;
using checks::uniform;

namespace {

struct Shape {
    std::int64_t B, G, P, N, M, r, e, window;
    bool masked, normalizer, divide, sum, packed, projected;  // the last: logarithms are x W^T, x of 3 numbers
    int logs;  // 0: none, 1: per feature alone, 2: one per vector and a mantissa, 3: per feature and a mantissa
    int gate;  // 0: none, 1: per token, 2: per token and feature
    Map map;
    double spread, decay;  // logarithms in +-spread, log decays in [-decay, 0]
};

template <class T>
constexpr Kind kind_of = sizeof(T) == 4 ? Kind::f32 : Kind::f64;

template <class T>
struct Tensors {
    using Pointer = std::unique_ptr<Buffer<T>>;
    const Shape s;
    const std::int64_t H, wide;  // query heads, columns of the output
    std::vector<std::int64_t> of_queries, of_keys;
    Pointer query, key, query_log, key_log, value, gate, out, den, row, of_query, of_key;
    std::unique_ptr<bool[]> mask;

    static Pointer blank(std::int64_t size) { return std::make_unique<Buffer<T>>(size); }
    static Pointer random(std::int64_t size, double low, double high) {
        Pointer made = blank(size);
        for (std::int64_t i = 0; i < size; ++i) (*made)[i] = T(low + (high - low) * uniform());
        return made;
    }
    std::int64_t log_width() const { return s.projected ? 3 : s.logs == 2 ? 1 : s.r; }
    std::int64_t gate_width() const { return s.gate == 1 ? 1 : s.r; }

    explicit Tensors(const Shape& shape) : s(shape), H(s.G * s.P), wide(s.e + (s.normalizer && !s.divide)) {
        if (s.packed) {  // the middle one has a key and no query, as when all of a sequence is context
            of_queries = {0, s.N / 3, s.N / 3, s.N}, of_keys = {0, s.N / 3, s.N / 3 + 1, s.M};
        }
        const std::int64_t keys = s.B * s.G * s.M, queries = s.B * H * s.N;
        const double low = s.map == Map::elu1 ? -2 : 0.05, high = 1;
        if (s.logs != 1) query = random(queries * s.r, low, high), key = random(keys * s.r, low, high);
        if (s.logs)
            query_log = random(queries * log_width(), -s.spread, s.spread),
            key_log = random(keys * log_width(), -s.spread, s.spread);
        if (s.projected) of_query = random(s.G * s.r * 3, -0.5, 0.5), of_key = random(s.r * 3, -0.5, 0.5);
        value = random(keys * s.e, -1, 1);
        if (s.gate) gate = random(keys * gate_width(), -s.decay, 0);
        for (std::int64_t i = 0; s.gate && s.decay >= 50 && i < gate->size(); ++i)
            if (uniform() < 0.05) (*gate)[i] = -std::numeric_limits<T>::infinity();
        if (s.masked) {
            mask.reset(new bool[s.B * s.M]);
            for (std::int64_t i = 0; i < s.B * s.M; ++i) mask[i] = uniform() < 0.7;
        }
        out = blank(queries * wide), den = blank(queries);
        if (s.logs) row = blank(queries);
    }

    // What a hidden key holds must not matter.
    void poison() {
        for (std::int64_t b = 0; b < s.B; ++b)
            for (std::int64_t g = 0; g < s.G; ++g)
                for (std::int64_t j = 0; s.masked && j < s.M; ++j) {
                    if (mask[b * s.M + j]) continue;
                    const std::int64_t at = (b * s.G + g) * s.M + j;
                    auto fill = [&](const Pointer& to, std::int64_t width) {
                        for (std::int64_t f = 0; to && f < width; ++f)
                            (*to)[at * width + f] = std::numeric_limits<T>::quiet_NaN();
                    };
                    fill(key, s.r), fill(key_log, log_width()), fill(value, s.e), fill(gate, gate_width());
                }
    }

    View view(const Pointer& b, std::int64_t heads, std::int64_t length, std::int64_t width) const {
        if (!b) return {};
        return {static_cast<T*>(*b), heads * length * width, length * width, width, kind_of<T>, width};
    }
    Call call(int threads) const {
        Call k;
        k.groups = s.G, k.share = s.P, k.queries = s.N, k.keys = s.M, k.features = s.r, k.columns = s.e;
        k.sequences = s.packed ? 3 : s.B, k.wide = sizeof(T) == 8, k.causal = true, k.window = s.window;
        k.normalizer = s.normalizer, k.divide = s.divide, k.sum_normalize = s.sum, k.map = s.map, k.threads = threads;
        k.fill = 7;
        k.query = view(query, H, s.N, s.r), k.key = view(key, s.G, s.M, s.r), k.value = view(value, s.G, s.M, s.e);
        k.query_log = view(query_log, H, s.N, log_width()), k.key_log = view(key_log, s.G, s.M, log_width());
        k.log_decay = view(gate, s.G, s.M, gate_width()), k.out = view(out, H, s.N, wide);
        k.denominator = static_cast<T*>(*den), k.mask = mask.get();
        if (s.projected) {
            k.query_matrix = {static_cast<T*>(*of_query), s.r * 3, s.r, 3};
            k.key_matrix = {static_cast<T*>(*of_key), 0, s.r, 3};
        }
        if (s.logs) k.log_row = static_cast<T*>(*row);
        if (s.packed) k.boundaries = of_keys.data(), k.query_boundaries = of_queries.data();
        return k;
    }
};

struct Truth {  // rows: (e + 1) reads and denominators at the scale exp(level), and the sizes of their terms
    std::vector<double> reads, sizes, level;
};

template <class T>
double mantissa(const Tensors<T>& t, const typename Tensors<T>::Pointer& from, std::int64_t row, std::int64_t f) {
    if (!from) return 1;
    return checks::feature(*from + row * t.s.r, t.s.r, t.s.map, t.s.sum, f);
}

// Logarithm of feature f of a row; `matrix` is null or that of its key head.
template <class T>
double logarithm(const Tensors<T>& t, const typename Tensors<T>::Pointer& from, const T* matrix, std::int64_t row,
                 std::int64_t f) {
    if (!matrix) return double((*from)[t.s.logs == 2 ? row : row * t.s.r + f]);
    double total = 0;
    for (int c = 0; c < 3; ++c) total += double((*from)[row * 3 + c]) * double(matrix[f * 3 + c]);
    return total;
}

template <class T>
Truth truth(const Tensors<T>& t) {
    const Shape& s = t.s;
    const std::int64_t c = s.e + 1, queries = s.B * t.H * s.N;
    Truth found{std::vector<double>(queries * c, 0), std::vector<double>(queries * c, 0), std::vector<double>(queries, 0)};
    for (std::int64_t seq = 0; seq < (s.packed ? 3 : s.B); ++seq)
        for (std::int64_t h = 0; h < t.H; ++h) {
            const std::int64_t b = s.packed ? 0 : seq, g = h / s.P;
            const std::int64_t q0 = s.packed ? t.of_queries[seq] : 0, q1 = s.packed ? t.of_queries[seq + 1] : s.N,
                               k0 = s.packed ? t.of_keys[seq] : 0, k1 = s.packed ? t.of_keys[seq + 1] : s.M;
            for (std::int64_t i = q0; i < q1; ++i) {
                const std::int64_t row = (b * t.H + h) * s.N + i, place = k1 - (q1 - i);
                std::vector<double> after(s.r, 0);  // decay from after the key
                std::vector<std::int64_t> keys;
                std::vector<double> logs;
                double level = -INFINITY;
                for (std::int64_t j = place; j > place - s.window && j >= k0; --j) {
                    const std::int64_t at = (b * s.G + g) * s.M + j;
                    if (s.masked && !t.mask[b * s.M + j]) continue;
                    keys.push_back(at);
                    for (std::int64_t f = 0; f < s.r; ++f) {
                        double log = after[f];
                        if (s.logs)
                            log += logarithm<T>(t, t.query_log, s.projected ? *t.of_query + g * s.r * 3 : nullptr, row, f) +
                                   logarithm<T>(t, t.key_log, s.projected ? *t.of_key : (T*)nullptr, at, f);
                        logs.push_back(log);
                        level = std::max(level, log);
                        if (s.gate) after[f] += double((*t.gate)[s.gate == 1 ? at : at * s.r + f]);
                    }
                }
                if (!s.logs || level == -INFINITY) level = 0;
                found.level[row] = level;
                for (std::size_t n = 0; n < keys.size(); ++n) {
                    double w = 0, size = 0;
                    for (std::int64_t f = 0; f < s.r; ++f) {
                        const double x = mantissa(t, t.query, row, f) * mantissa(t, t.key, keys[n], f) *
                                         std::exp(logs[n * s.r + f] - level);
                        w += x, size += std::fabs(x);
                    }
                    for (std::int64_t j = 0; j < c; ++j) {
                        const double v = j < s.e ? double((*t.value)[keys[n] * s.e + j]) : 1;
                        found.reads[row * c + j] += w * v, found.sizes[row * c + j] += size * std::fabs(v);
                    }
                }
            }
        }
    return found;
}

// Errors are in units of sum_j |w_ij||v_j| (over |den_i|), as the project's budgets are.
template <class T>
void compare(const char* what, const Tensors<T>& t, const Truth& want, double budget) {
    const std::int64_t c = t.s.e + 1;
    for (std::size_t row = 0; row < want.level.size(); ++row)
        for (std::int64_t j = 0; j < t.wide; ++j) {
            const double read = want.reads[row * c + j], den = want.reads[row * c + t.s.e];
            double got = double((*t.out)[row * t.wide + j]), expected = read, size = want.sizes[row * c + j];
            if (t.s.divide) {
                expected = den == 0 ? 7 : read / den;
                size = den == 0 ? 1 : std::fabs(size / den);
            } else if (t.s.logs) {
                got *= std::exp(double((*t.row)[row]) - want.level[row]);
            }
            const double error = std::fabs(got - expected);
            if (!(error <= budget * size + 1e-30)) {
                std::printf("row %d column %d: %g, expected %g\n", int(row), int(j), got, expected);
                checks::fail(what, error / size, budget);
            }
        }
}

template <class T>
double budget_of(const Shape& s) {
    const double eps = sizeof(T) == 4 ? 1.2e-7 : 2.3e-16;
    // 4 eps max|log phi|, where decays are among the logarithms once they meet any.
    return checks::BUDGET<T> + (s.logs ? 4 * eps * (2 * s.spread + s.decay * double(std::min(s.window, s.M))) : 0);
}

template <class T>
void check_forward(const Shape& shape) {
    Tensors<T> t(shape);
    const Truth want = truth(t);
    t.poison();
    kernels().forward(t.call(1));
    compare("out", t, want, budget_of<T>(shape));
    kernels().forward(t.call(5));
    compare("out of five threads", t, want, budget_of<T>(shape));
    std::vector<T> before(static_cast<T*>(*t.out), static_cast<T*>(*t.out) + t.out->size());
    kernels().forward(t.call(5));
    checks::require(!before.size() || !std::memcmp(before.data(), static_cast<T*>(*t.out), sizeof(T) * before.size()),
                    "the same threads give the same bits");
}

// d(loss) along one direction of all inputs: backward's sum against a central difference.
void check_backward(const Shape& shape) {
    Tensors<double> t(shape);
    auto d_out = Tensors<double>::random(t.out->size(), -1, 1);
    std::vector<Tensors<double>::Pointer*> inputs = {&t.query, &t.key, &t.query_log, &t.key_log, &t.value, &t.gate};
    std::vector<Tensors<double>::Pointer> gradients, steps;
    for (auto* input : inputs) {
        gradients.push_back(*input ? Tensors<double>::blank((*input)->size()) : nullptr);
        steps.push_back(*input ? Tensors<double>::random((*input)->size(), -1, 1) : nullptr);
    }
    kernels().forward(t.call(2));
    Call call = t.call(2);
    const std::int64_t N = shape.N, M = shape.M;
    call.d_out = t.view(d_out, t.H, N, t.wide);
    call.d_query = t.view(gradients[0], t.H, N, shape.r), call.d_key = t.view(gradients[1], shape.G, M, shape.r);
    call.d_query_log = t.view(gradients[2], t.H, N, t.log_width());
    call.d_key_log = t.view(gradients[3], shape.G, M, t.log_width());
    call.d_value = t.view(gradients[4], shape.G, M, shape.e);
    call.d_log_decay = t.view(gradients[5], shape.G, M, t.gate_width());
    kernels().backward(call);
    std::vector<double> rows;  // what a read is scaled by is no function of the inputs
    for (std::int64_t i = 0; shape.logs && i < t.row->size(); ++i) rows.push_back((*t.row)[i]);
    double terms = 0;  // of the loss, by which the rounding of differences is measured
    auto loss = [&] {
        const Truth now = truth(t);
        const std::int64_t c = shape.e + 1;
        double total = 0;
        terms = 0;
        for (std::size_t row = 0; row < now.level.size(); ++row)
            for (std::int64_t j = 0; j < t.wide; ++j) {
                const double read = now.reads[row * c + j], den = now.reads[row * c + shape.e];
                const double scale = shape.logs ? std::exp(now.level[row] - rows[row]) : 1;
                const double term = (*d_out)[row * t.wide + j] * (!shape.divide ? read * scale : den == 0 ? 0 : read / den);
                total += term, terms += std::fabs(term);
            }
        return total;
    };
    const double h = 1e-6;
    for (std::size_t i = 0; i < inputs.size(); ++i) {  // each input by itself: a small gradient is no rest of a large one
        if (!gradients[i]) continue;
        double predicted = 0, size = 0;
        for (std::int64_t j = 0; j < gradients[i]->size(); ++j) {
            predicted += (*gradients[i])[j] * (*steps[i])[j];
            size += std::fabs((*gradients[i])[j] * (*steps[i])[j]);
        }
        auto move = [&](double by) {
            for (std::int64_t j = 0; j < gradients[i]->size(); ++j) (**inputs[i])[j] += by * (*steps[i])[j];
        };
        move(h);
        const double above = loss();
        move(-2 * h);
        const double under = loss();
        move(h);
        const double error = std::fabs((above - under) / (2 * h) - predicted) / (size + 2e-3 * terms + 1e-12);
        if (!(error <= 2e-6)) {
            std::printf("input %d: %.12g, expected %.12g\n", int(i), predicted, (above - under) / (2 * h));
            checks::fail("gradient along a direction", error, 2e-6);
        }
    }
    // Hidden keys may hold NaN, and get no gradient.
    t.poison();
    kernels().forward(t.call(1));
    kernels().backward(call);
    for (const auto& gradient : gradients)
        for (std::int64_t j = 0; gradient && j < gradient->size(); ++j)
            checks::require((*gradient)[j] == (*gradient)[j], "no NaN from hidden keys");
}

// A huge key and value that have left the window, and later ones of any size, leave no trace.
template <class T>
void check_no_trace(Shape s) {
    s.masked = s.packed = s.sum = s.projected = false, s.map = Map::given, s.spread = 3;
    Tensors<T> t(s);
    kernels().forward(t.call(1));
    const Truth want = truth(t);
    for (std::int64_t at : {s.M / 5, s.M / 2, s.M - 1}) {
        Tensors<T> huge(s);
        for (auto [to, from] : {std::pair(&huge.query, &t.query), {&huge.key, &t.key}, {&huge.query_log, &t.query_log},
                                {&huge.key_log, &t.key_log}, {&huge.value, &t.value}, {&huge.gate, &t.gate}})
            for (std::int64_t i = 0; *to && i < (*to)->size(); ++i) (**to)[i] = (**from)[i];
        for (std::int64_t g = 0; g < s.B * s.G; ++g) {
            const std::int64_t row = g * s.M + at;
            for (std::int64_t f = 0; huge.key && f < s.r; ++f) (*huge.key)[row * s.r + f] = T(1e12);
            for (std::int64_t f = 0; huge.key_log && f < huge.log_width(); ++f)
                (*huge.key_log)[row * huge.log_width() + f] = T(300);
            for (std::int64_t f = 0; f < s.e; ++f) (*huge.value)[row * s.e + f] = T(1e12);
        }
        kernels().forward(huge.call(1));
        for (std::int64_t b = 0; b < s.B * t.H; ++b)
            for (std::int64_t i = 0; i < s.N; ++i) {
                const std::int64_t place = s.M - s.N + i;
                if (at > place - s.window && at <= place) continue;
                for (std::int64_t j = 0; j < t.wide; ++j) {
                    const std::int64_t row = b * s.N + i, k = row * t.wide + j;
                    double got = double((*huge.out)[k]), expected = double((*t.out)[k]);
                    double size = want.sizes[row * (s.e + 1) + j];
                    if (s.divide) size /= std::fabs(want.reads[row * (s.e + 1) + s.e]);
                    if (s.logs && !s.divide) {
                        got *= std::exp(double((*huge.row)[row]) - want.level[row]);
                        expected *= std::exp(double((*t.row)[row]) - want.level[row]);
                    }
                    const double error = std::fabs(got - expected) / (size + 1e-30);
                    if (!(error <= budget_of<T>(s))) checks::fail("a key out of sight left a trace", error, budget_of<T>(s));
                }
            }
    }
}

Shape draw(int number) {
    static const std::int64_t sizes[] = {1, 2, 3, 5, 8, 16, 17, 33, 64, 70};
    static const std::int64_t lengths[] = {1, 2, 3, 5, 63, 64, 65, 130, 200, 330};
    static const std::int64_t windows[] = {1, 2, 3, 7, 31, 63, 64, 65, 100, 127, 128, 129, 192, 200, 256, 300, 1000};
    Shape s{};
    s.P = 1 + below(3), s.G = 1 + below(2), s.N = lengths[below(10)], s.r = sizes[below(10)], s.e = sizes[below(10)];
    s.window = windows[below(17)];
    s.packed = s.N > 2 && uniform() < 0.2, s.B = s.packed ? 1 : 1 + below(2);
    s.M = s.N + (s.packed ? 1 + below(90) : uniform() < 0.5 ? 0 : below(150));
    s.logs = number % 2 ? int(1 + below(3)) : 0, s.projected = s.logs == 1 && uniform() < 0.4, s.gate = int(below(3)), s.masked = uniform() < 0.4;
    s.normalizer = uniform() < 0.8, s.divide = s.normalizer && uniform() < 0.7;
    s.map = !s.logs && uniform() < 0.6 ? Map::elu1 : Map::given;
    s.sum = s.map == Map::elu1 && uniform() < 0.3;
    s.spread = 3, s.decay = 0.5;
    return s;
}

}  // namespace

int main() {
    std::printf("%s\n", kernels().isa);
    for (int number = 0; number < checks::cases(56); ++number) {
        checks::state = std::uint64_t(1000 + number);
        Shape s = draw(number);
        std::printf("%d: B%d G%d P%d N%d M%d r%d e%d window%d mask%d logs%d gate%d z%d divide%d sum%d packed%d projected%d\n", number, int(s.B),
                    int(s.G), int(s.P), int(s.N), int(s.M), int(s.r), int(s.e), int(s.window), s.masked, s.logs, s.gate,
                    s.normalizer, s.divide, s.sum, s.packed, s.projected);
        std::fflush(stdout);
        check_forward<float>(s);
        check_forward<double>(s);
        check_backward(s);
        check_no_trace<float>(s);
        // Keys far apart in scale, and gates that forget within a few tokens.
        s.spread = 150, s.decay = number % 3 ? 50 : 5;
        check_forward<float>(s);
        check_forward<double>(s);
        if (s.divide && number % 4 == 0) check_backward(s);
    }
    std::printf("right\n");
}
