// Whole calls through the table of kernels: forward against the recurrence in double, backward against finite
// differences, threads against one thread, steps against the whole. Every buffer ends where its tensor ends.
#include "call.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "checks.h"

using namespace reassoc;
using checks::below;
using checks::Buffer;
using checks::symmetric;
using checks::uniform;

namespace {

struct Shape {
    std::int64_t B, G, P, N, r, e;
    bool causal, masked, logs, delta, normalizer, divide, sum, packed, carried;
    int gate;  // 0: none, 1: per token, 2: per token and feature
    Map map;
};

template <class T>
constexpr Kind kind_of = sizeof(T) == 4 ? Kind::f32 : Kind::f64;

template <class T>
struct Tensors {  // one call's buffers: contiguous, exact
    const Shape s;
    std::int64_t H, n, c;  // query heads, sequences, columns of the state
    std::unique_ptr<Buffer<T>> query, key, query_log, key_log, value, gate, beta, memory, scale, out, den, row,
        memory_out, scale_out;
    std::unique_ptr<bool[]> mask;
    std::vector<std::int64_t> bounds;

    static std::unique_ptr<Buffer<T>> random(std::int64_t size, double low, double high) {
        auto made = std::make_unique<Buffer<T>>(size);
        for (std::int64_t i = 0; i < size; ++i) (*made)[i] = T(low + (high - low) * uniform());
        return made;
    }
    static std::unique_ptr<Buffer<T>> blank(std::int64_t size) { return std::make_unique<Buffer<T>>(size); }

    explicit Tensors(const Shape& shape) : s(shape), H(s.G * s.P), n(s.B), c(s.e + s.normalizer) {
        const std::int64_t rows = s.B * s.G * s.N, reads = s.B * H * s.N;
        if (s.packed) bounds = {0, s.N / 3, s.N / 3, s.N}, n = 3;
        // Features stay positive, so that denominators do, and small, so that the delta rule is stable.
        const bool mapped = s.map == Map::elu1;
        const double low = mapped ? -2 : 0.01, high = mapped ? 1 : 1.0 / double(s.r);
        if (!s.logs) query = random(reads * s.r, low, high), key = random(rows * s.r, low, high);
        if (s.logs) query_log = random(reads * s.r, -3, 3), key_log = random(rows * s.r, -3, 3);
        value = random(rows * s.e, -1, 1);
        if (s.gate) gate = random(rows * (s.gate == 1 ? 1 : s.r), -0.5, 0);
        if (s.delta) beta = random(rows, 0, 1);
        if (s.carried) memory = random(n * s.G * s.r * c, 0.1, 1);
        if (s.carried && s.logs) scale = random(n * s.G * s.r, -1, 1);
        if (s.masked) {
            mask.reset(new bool[s.B * s.N]);
            // The first key of a sequence is real, so that no row is undefined.
            for (std::int64_t i = 0; i < s.B * s.N; ++i) mask[i] = i % s.N == 0 || uniform() < 0.7;
            if (s.packed) mask[s.N / 3] = true;
        }
        out = blank(reads * (s.divide ? s.e : c)), den = blank(reads), memory_out = blank(n * s.G * s.r * c);
        if (s.logs) row = blank(reads), scale_out = blank(n * s.G * s.r);
    }

    View view(const std::unique_ptr<Buffer<T>>& b, std::int64_t heads, std::int64_t width) const {
        if (!b) return {};
        return {static_cast<T*>(*b), heads * s.N * width, s.N * width, width, kind_of<T>, width};
    }
    Call call(int threads) const {
        Call k;
        k.groups = s.G, k.share = s.P, k.queries = k.keys = s.N, k.features = s.r, k.columns = s.e;
        k.sequences = n, k.wide = sizeof(T) == 8, k.causal = s.causal, k.normalizer = s.normalizer, k.divide = s.divide;
        k.sum_normalize = s.sum, k.delta = s.delta, k.map = s.map, k.threads = threads;
        k.query = view(query, H, s.r), k.key = view(key, s.G, s.r), k.value = view(value, s.G, s.e);
        k.query_log = view(query_log, H, s.r), k.key_log = view(key_log, s.G, s.r);
        k.log_decay = view(gate, s.G, s.gate == 1 ? 1 : s.r), k.beta = view(beta, s.G, 1);
        k.out = view(out, H, s.divide ? s.e : c), k.denominator = static_cast<T*>(*den);
        k.memory_out = static_cast<T*>(*memory_out);
        if (memory) k.memory = static_cast<T*>(*memory);
        if (scale) k.scale = static_cast<T*>(*scale);
        if (s.logs) k.log_row = static_cast<T*>(*row), k.scale_out = static_cast<T*>(*scale_out);
        k.mask = mask.get();
        if (s.packed) k.boundaries = bounds.data();
        return k;
    }
};

template <class T>
double feature(const Tensors<T>& t, const std::unique_ptr<Buffer<T>>& plain, const std::unique_ptr<Buffer<T>>& log,
               std::int64_t row, std::int64_t f) {
    if (log) return std::exp(double((*log)[row * t.s.r + f]));
    return checks::feature(*plain + row * t.s.r, t.s.r, t.s.map, t.s.sum, f);
}

// The recurrence itself, in double, at true scale: out (B, H, N, e or c) and the last state.
template <class T>
void naive(const Tensors<T>& t, std::vector<double>& out, std::vector<double>& state) {
    const Shape& s = t.s;
    const std::int64_t wide = s.divide ? s.e : t.c;
    out.assign(s.B * t.H * s.N * wide, 0);
    state.assign(t.n * s.G * s.r * t.c, 0);
    for (std::int64_t seq = 0; seq < t.n; ++seq)
        for (std::int64_t g = 0; g < s.G; ++g) {
            const std::int64_t b = s.packed ? 0 : seq, first = s.packed ? t.bounds[seq] : 0,
                               last = s.packed ? t.bounds[seq + 1] : s.N;
            double* S = &state[(seq * s.G + g) * s.r * t.c];
            if (s.carried)
                for (std::int64_t i = 0; i < s.r * t.c; ++i) {
                    const std::int64_t at = (seq * s.G + g) * s.r;
                    S[i] = double((*t.memory)[at * t.c + i]) * (s.logs ? std::exp(double((*t.scale)[at + i / t.c])) : 1);
                }
            auto read = [&](std::int64_t i) {
                for (std::int64_t p = 0; p < s.P; ++p) {
                    const std::int64_t row = (b * t.H + g * s.P + p) * s.N + i;
                    std::vector<double> o(t.c, 0);
                    for (std::int64_t f = 0; f < s.r; ++f)
                        for (std::int64_t j = 0; j < t.c; ++j)
                            o[j] += feature(t, t.query, t.query_log, row, f) * S[f * t.c + j];
                    for (std::int64_t j = 0; j < wide; ++j) out[row * wide + j] = s.divide ? o[j] / o[s.e] : o[j];
                }
            };
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t row = (b * s.G + g) * s.N + i;
                if (!s.masked || t.mask[b * s.N + i]) {
                    std::vector<double> held(s.e, 0);
                    for (std::int64_t f = 0; f < s.r; ++f) {
                        const double g_ = s.gate ? double((*t.gate)[s.gate == 1 ? row : row * s.r + f]) : 0;
                        for (std::int64_t j = 0; j < t.c; ++j) S[f * t.c + j] *= std::exp(g_);
                        for (std::int64_t j = 0; j < s.e; ++j)
                            held[j] += feature(t, t.key, t.key_log, row, f) * S[f * t.c + j];
                    }
                    for (std::int64_t f = 0; f < s.r; ++f) {
                        const double k = feature(t, t.key, t.key_log, row, f);
                        for (std::int64_t j = 0; j < s.e; ++j) {
                            const double v = double((*t.value)[row * s.e + j]);
                            S[f * t.c + j] += k * (s.delta ? double((*t.beta)[row]) * (v - held[j]) : v);
                        }
                        if (s.normalizer) S[f * t.c + s.e] += k;
                    }
                }
                if (s.causal) read(i);
            }
            for (std::int64_t i = first; !s.causal && i < last; ++i) read(i);
        }
}

// What `out` holds, at true scale.
template <class T>
std::vector<double> truth_scaled(const Tensors<T>& t) {
    const std::int64_t wide = t.s.divide ? t.s.e : t.c;
    std::vector<double> found(t.out->size());
    for (std::int64_t i = 0; i < t.out->size(); ++i)
        found[i] = double((*t.out)[i]) * (t.s.logs && !t.s.divide ? std::exp(double((*t.row)[i / wide])) : 1);
    return found;
}
template <class T>
std::vector<double> state_scaled(const Tensors<T>& t) {
    std::vector<double> found(t.memory_out->size());
    for (std::int64_t i = 0; i < t.memory_out->size(); ++i)
        found[i] = double((*t.memory_out)[i]) * (t.s.logs ? std::exp(double((*t.scale_out)[i / t.c])) : 1);
    return found;
}

void compare(const char* what, const std::vector<double>& got, const std::vector<double>& want, double budget) {
    double size = 1e-30, worst = 0;
    for (double w : want) size = std::max(size, std::fabs(w));
    for (std::size_t i = 0; i < want.size(); ++i) {
        const double error = std::fabs(got[i] - want[i]) / size;
        if (!(error <= budget)) checks::fail(what, error, budget);
        worst = std::max(worst, error);
    }
}

template <class T>
void check_forward(const Shape& shape) {
    const double budget = sizeof(T) == 4 ? 1e-5 : 1e-10;  // design, section 5
    Tensors<T> t(shape);
    std::vector<double> out, state;
    naive(t, out, state);
    kernels().forward(t.call(1));
    compare("out", truth_scaled(t), out, budget);
    compare("state", state_scaled(t), state, budget);
    const std::vector<double> one = truth_scaled(t);
    for (int repeat = 0; repeat < 2; ++repeat) {
        std::vector<T> before(static_cast<T*>(*t.out), static_cast<T*>(*t.out) + t.out->size());
        kernels().forward(t.call(3));
        compare("out of three threads", truth_scaled(t), one, budget);
        compare("state of three threads", state_scaled(t), state, budget);
        if (repeat)
            checks::require(!before.size() || !std::memcmp(before.data(), static_cast<T*>(*t.out), sizeof(T) * before.size()),
                            "the same threads give the same bits");
    }
}

// d(loss) along one direction of all inputs: backward's sum against a central difference.
void check_backward(const Shape& shape) {
    Tensors<double> t(shape);
    const std::int64_t wide = t.s.divide ? t.s.e : t.c;
    auto d_out = Tensors<double>::random(t.out->size(), -1, 1);
    auto d_memory = shape.logs ? nullptr : Tensors<double>::random(t.memory_out->size(), -1, 1);
    std::vector<std::unique_ptr<Buffer<double>>*> inputs = {&t.query, &t.key, &t.query_log, &t.key_log,
                                                            &t.value, &t.gate, &t.beta,      &t.memory};
    std::vector<std::unique_ptr<Buffer<double>>> gradients, steps;
    for (auto* input : inputs) {
        gradients.push_back(*input ? Tensors<double>::blank((*input)->size()) : nullptr);
        steps.push_back(*input ? Tensors<double>::random((*input)->size(), -1, 1) : nullptr);
    }
    kernels().forward(t.call(2));
    Call call = t.call(2);
    call.d_out = t.view(d_out, t.H, wide);
    if (d_memory) call.d_memory_out = static_cast<double*>(*d_memory);
    call.d_query = t.view(gradients[0], t.H, t.s.r), call.d_key = t.view(gradients[1], t.s.G, t.s.r);
    call.d_query_log = t.view(gradients[2], t.H, t.s.r), call.d_key_log = t.view(gradients[3], t.s.G, t.s.r);
    call.d_value = t.view(gradients[4], t.s.G, t.s.e);
    call.d_log_decay = t.view(gradients[5], t.s.G, t.s.gate == 1 ? 1 : t.s.r);
    call.d_beta = t.view(gradients[6], t.s.G, 1);
    if (gradients[7]) call.d_memory = static_cast<double*>(*gradients[7]);
    // log_row is read by backward: keep what forward wrote, and take differences at true scale.
    kernels().backward(call);
    double predicted = 0, size = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i)
        for (std::int64_t j = 0; gradients[i] && j < gradients[i]->size(); ++j) {
            predicted += (*gradients[i])[j] * (*steps[i])[j];
            size += std::fabs((*gradients[i])[j] * (*steps[i])[j]);
        }
    std::vector<double> rows(t.s.logs ? t.row->size() : 0);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = (*t.row)[i];
    auto loss = [&] {
        std::vector<double> out, state;
        naive(t, out, state);
        double total = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            const bool scaled = t.s.logs && !t.s.divide;
            total += out[i] * (*d_out)[i] * (scaled ? std::exp(-rows[i / wide]) : 1);
        }
        for (std::size_t i = 0; d_memory && i < state.size(); ++i) total += state[i] * (*d_memory)[i];
        return total;
    };
    const double h = 1e-6;
    auto move = [&](double by) {
        for (std::size_t i = 0; i < inputs.size(); ++i)
            for (std::int64_t j = 0; *inputs[i] && j < (*inputs[i])->size(); ++j) (**inputs[i])[j] += by * (*steps[i])[j];
    };
    move(h);
    const double above = loss();
    move(-2 * h);
    const double under = loss();
    const double error = std::fabs((above - under) / (2 * h) - predicted) / std::max(size, 1e-12);
    if (!(error <= 1e-6)) checks::fail("gradient along a direction", error, 1e-6);
}

// Steps through the state in place against the whole call.
void check_steps(const Shape& shape) {
    Tensors<double> t(shape);
    std::vector<double> out, state;
    naive(t, out, state);
    const std::int64_t H = t.H, rows = shape.r;
    Decoder d;
    d.batch = shape.B, d.groups = shape.G, d.share = shape.P, d.features = rows, d.columns = shape.e;
    d.wide = true, d.normalizer = shape.normalizer, d.divide = shape.divide, d.sum_normalize = shape.sum;
    d.exponential = shape.logs, d.map = shape.map, d.threads = 2;
    d.kind = d.beta_kind = d.gate_kind = Kind::f64;
    d.gate_width = shape.gate == 0 ? 0 : shape.gate == 1 ? 1 : rows;
    d.gate_head = d.gate_width, d.gate_batch = shape.G * d.gate_width;
    Buffer<double> memory(shape.B * shape.G * rows * t.c), lost(memory.size()), scale(shape.B * shape.G * rows);
    for (std::int64_t i = 0; i < memory.size(); ++i) memory[i] = shape.carried ? (*t.memory)[i] : 0, lost[i] = 0;
    for (std::int64_t i = 0; i < scale.size(); ++i)
        scale[i] = shape.carried && shape.logs ? (*t.scale)[i] : -std::numeric_limits<double>::infinity();
    Buffer<double> q(shape.B * H * rows), k(shape.B * shape.G * rows), v(shape.B * shape.G * shape.e),
        g(shape.B * shape.G * std::max<std::int64_t>(1, d.gate_width)), beta(shape.B * shape.G), o(shape.B * H * shape.e);
    std::vector<std::int64_t> length(shape.B, 0), seen(shape.B, 0);
    std::unique_ptr<bool[]> mask(new bool[shape.B]);
    std::vector<double> got(shape.B * H * shape.N * shape.e);
    for (std::int64_t i = 0; i < shape.N; ++i) {
        auto gather = [&](double* to, const std::unique_ptr<Buffer<double>>& from, std::int64_t heads, std::int64_t width) {
            for (std::int64_t h = 0; from && h < heads; ++h)
                for (std::int64_t f = 0; f < width; ++f) to[h * width + f] = (*from)[(h * shape.N + i) * width + f];
        };
        gather(q, shape.logs ? t.query_log : t.query, shape.B * H, rows);
        gather(k, shape.logs ? t.key_log : t.key, shape.B * shape.G, rows);
        gather(v, t.value, shape.B * shape.G, shape.e);
        gather(g, t.gate, shape.B * shape.G, d.gate_width);
        gather(beta, t.beta, shape.B * shape.G, 1);
        for (std::int64_t b = 0; b < shape.B; ++b) {
            mask[b] = !shape.masked || t.mask[b * shape.N + i];
            seen[b] += mask[b];
        }
        kernels().step(d, {q, k, v, shape.delta ? static_cast<double*>(beta) : nullptr,
                           shape.gate ? static_cast<double*>(g) : nullptr, shape.masked ? mask.get() : nullptr, memory, lost,
                           scale, length.data(), o});
        for (std::int64_t h = 0; h < shape.B * H; ++h)
            for (std::int64_t c = 0; c < shape.e; ++c) got[(h * shape.N + i) * shape.e + c] = o[h * shape.e + c];
    }
    if (!shape.logs || shape.divide) compare("steps", got, out, 1e-10);
    checks::require(length == seen, "length counts real keys");
}

Shape draw(int number) {
    static const std::int64_t sizes[] = {1, 2, 3, 5, 8, 16, 17, 33, 64, 70};
    static const std::int64_t lengths[] = {1, 2, 3, 4, 5, 63, 64, 65, 130, 200};
    Shape s{};
    s.P = 1 + below(3), s.G = 1 + below(2), s.N = lengths[below(10)], s.r = sizes[below(10)], s.e = sizes[below(10)];
    s.delta = number % 3 == 2, s.causal = s.delta || uniform() < 0.7;
    s.packed = uniform() < 0.25, s.B = s.packed ? 1 : 1 + below(2);
    s.logs = !s.delta && uniform() < 0.4;
    s.gate = int(below(3)), s.masked = uniform() < 0.4, s.carried = uniform() < 0.4;
    s.normalizer = !s.delta || uniform() < 0.3, s.divide = s.normalizer && uniform() < 0.7;
    s.map = !s.logs && uniform() < 0.6 ? Map::elu1 : Map::given;
    s.sum = s.map == Map::elu1 && (s.delta || uniform() < 0.3);
    return s;
}

}  // namespace

int main() {
    std::printf("%s\n", kernels().isa);
    for (int number = 0; number < checks::cases(300); ++number) {
        checks::state = std::uint64_t(1000 + number);
        const Shape s = draw(number);
        std::printf("%d: B%d G%d P%d N%d r%d e%d causal%d mask%d logs%d delta%d z%d divide%d sum%d packed%d state%d gate%d\n",
                    number, int(s.B), int(s.G), int(s.P), int(s.N), int(s.r), int(s.e), s.causal, s.masked, s.logs, s.delta,
                    s.normalizer, s.divide, s.sum, s.packed, s.carried, s.gate);
        check_forward<float>(s);
        check_forward<double>(s);
        check_backward(s);
        if (s.causal && !s.packed && s.N <= 70 && (s.divide || !s.normalizer)) check_steps(s);
    }
    // Long enough for the sequence to be split over threads.
    for (int number = 0; number < 8; ++number) {
        checks::state = std::uint64_t(number);
        Shape s = draw(3 * number);
        s.B = s.G = s.P = 1, s.N = 1700 + number, s.r = 5, s.e = 3, s.packed = false, s.causal = number % 2;
        std::printf("long %d\n", number);
        check_forward<float>(s);
        check_forward<double>(s);
    }
    std::printf("right\n");
}
