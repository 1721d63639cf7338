// The recurrent core against loops that do one token, one row and one column at a time, in double.
//
//   g++ -std=c++17 -O3 -ffp-contract=fast [-mavx2 -mfma ...] csrc/tests/recurrent.cpp -o recurrent && ./recurrent
#include "../recurrent_backward.h"
#include "checks.h"

namespace {

using namespace checks;
namespace isa = reassoc::REASSOC_ISA;
using std::int64_t;
using Numbers = std::vector<double>;

// All of one chunk, without padding in time: q [P][n][R], k [n][R], v [n][E], S [R][E] and so on.
struct Problem {
    int64_t n, R, E, P, keep_width;
    bool delta, has_z;
    Numbers q, k, v, beta, keep, S, z;
    Numbers d_o, d_den, dS, dz;  // of the loss o . d_o + den . d_den + S' . dS + z' . dz

    double factor(int64_t t, int64_t r) const {
        return keep_width == 0 ? 1 : keep[t * keep_width + (keep_width == 1 ? 0 : r)];
    }
};

Numbers numbers(int64_t size, double scale = 1) {
    Numbers x(size);
    for (double& y : x) y = scale * symmetric();
    return x;
}

Problem problem(int64_t n, int64_t R, int64_t E, int64_t P, int64_t keep_width, bool delta, bool has_z) {
    Problem p{n, R, E, P, keep_width, delta, has_z, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    p.q = numbers(P * n * R);
    p.k = numbers(n * R);
    p.v = numbers(n * E);
    p.S = numbers(R * E);
    p.z = numbers(R);
    p.d_o = numbers(P * n * E);
    p.d_den = numbers(P * n);
    p.dS = numbers(R * E);
    p.dz = numbers(R);
    p.beta.resize(n);
    p.keep.resize(n * keep_width);
    for (double& x : p.beta) x = below(8) == 0 ? double(below(2)) : uniform();  // 0 and 1 among them
    for (double& x : p.keep) {
        const int64_t kind = below(16);
        x = kind == 0 ? 0 : kind == 1 ? 1e-30 : kind == 2 ? 1 : 1 - 0.5 * uniform() * uniform();
    }
    for (int64_t t = 0; t < n; ++t) {
        double square = 0;  // unit keys, with which a delta rule neither grows nor oscillates
        for (int64_t r = 0; r < R; ++r) square += p.k[t * R + r] * p.k[t * R + r];
        const bool hidden = below(7) == 0;
        for (int64_t r = 0; r < R; ++r) p.k[t * R + r] *= hidden ? 0 : 1 / std::sqrt(square);
        for (int64_t r = 0; hidden && r < keep_width; ++r) p.keep[t * keep_width + r] = 1;
    }
    // What both sides compute with must be the same numbers.
    for (Numbers* x : {&p.q, &p.k, &p.v, &p.beta, &p.keep, &p.S, &p.z, &p.d_o, &p.d_den, &p.dS, &p.dz})
        for (double& y : *x) y = float(y);
    return p;
}

struct Answer {
    Numbers o, den, S, z;
    std::vector<Numbers> states, zs;  // decayed, before each write: keep S
    std::vector<Numbers> error;       // v - S^T k, or v
};

Answer forward(const Problem& p) {
    Answer a{Numbers(p.P * p.n * p.E), Numbers(p.P * p.n), p.S, p.z, {}, {}, {}};
    for (int64_t t = 0; t < p.n; ++t) {
        for (int64_t r = 0; r < p.R; ++r) {
            a.z[r] *= p.factor(t, r);
            for (int64_t e = 0; e < p.E; ++e) a.S[r * p.E + e] *= p.factor(t, r);
        }
        a.states.push_back(a.S);
        a.zs.push_back(a.z);
        Numbers error(p.E);
        for (int64_t e = 0; e < p.E; ++e) {
            error[e] = p.v[t * p.E + e];
            for (int64_t r = 0; p.delta && r < p.R; ++r) error[e] -= a.S[r * p.E + e] * p.k[t * p.R + r];
        }
        a.error.push_back(error);
        for (int64_t r = 0; r < p.R; ++r) {
            a.z[r] += p.k[t * p.R + r];
            for (int64_t e = 0; e < p.E; ++e)
                a.S[r * p.E + e] += p.k[t * p.R + r] * (p.delta ? p.beta[t] : 1) * error[e];
        }
        for (int64_t h = 0; h < p.P; ++h)
            for (int64_t r = 0; r < p.R; ++r) {
                const double q = p.q[(h * p.n + t) * p.R + r];
                a.den[h * p.n + t] += q * a.z[r];
                for (int64_t e = 0; e < p.E; ++e) a.o[(h * p.n + t) * p.E + e] += q * a.S[r * p.E + e];
            }
    }
    return a;
}

struct Gradient {
    Numbers dq, dk, dv, dbeta, dlog, dS, dz;
};

Gradient backward(const Problem& p) {
    const Answer a = forward(p);
    Gradient d{Numbers(p.P * p.n * p.R), Numbers(p.n * p.R), Numbers(p.n * p.E), Numbers(p.n),
               Numbers(p.n * p.keep_width), p.dS, p.has_z ? p.dz : Numbers(p.R)};
    for (int64_t t = p.n - 1; t >= 0; --t) {
        const Numbers &S = a.states[t], &z = a.zs[t];
        const double beta = p.delta ? p.beta[t] : 1;
        for (int64_t h = 0; h < p.P; ++h) {
            const double d_den = p.has_z ? p.d_den[h * p.n + t] : 0;
            for (int64_t r = 0; r < p.R; ++r) {
                const double k = p.k[t * p.R + r], q = p.q[(h * p.n + t) * p.R + r];
                double dq = (z[r] + k) * d_den;
                d.dz[r] += q * d_den;
                for (int64_t e = 0; e < p.E; ++e) {
                    const double d_o = p.d_o[(h * p.n + t) * p.E + e];
                    dq += (S[r * p.E + e] + k * beta * a.error[t][e]) * d_o;
                    d.dS[r * p.E + e] += q * d_o;
                }
                d.dq[(h * p.n + t) * p.R + r] = dq;
            }
        }
        Numbers dp(p.E);
        for (int64_t e = 0; e < p.E; ++e) {
            double du = 0;
            for (int64_t r = 0; r < p.R; ++r) du += d.dS[r * p.E + e] * p.k[t * p.R + r];
            d.dv[t * p.E + e] = beta * du;
            d.dbeta[t] += du * a.error[t][e];
            dp[e] = p.delta ? -beta * du : 0;
        }
        for (int64_t r = 0; r < p.R; ++r) {
            double dk = p.has_z ? d.dz[r] : 0, dlog = p.has_z ? d.dz[r] * z[r] : 0;
            for (int64_t e = 0; e < p.E; ++e) {
                double& dS = d.dS[r * p.E + e];
                dk += dS * beta * a.error[t][e] + S[r * p.E + e] * dp[e];
                dS += p.k[t * p.R + r] * dp[e];
                dlog += dS * S[r * p.E + e];
                dS *= p.factor(t, r);
            }
            d.dk[t * p.R + r] = dk;
            d.dz[r] *= p.factor(t, r);
            if (p.keep_width) d.dlog[t * p.keep_width + (p.keep_width == 1 ? 0 : r)] += dlog;
        }
    }
    return d;
}

double loss(const Problem& p) {
    const Answer a = forward(p);
    double total = 0;
    for (std::size_t i = 0; i < a.o.size(); ++i) total += a.o[i] * p.d_o[i];
    for (std::size_t i = 0; i < a.S.size(); ++i) total += a.S[i] * p.dS[i];
    for (std::size_t i = 0; p.has_z && i < a.den.size(); ++i) total += a.den[i] * p.d_den[i];
    for (std::size_t i = 0; p.has_z && i < a.z.size(); ++i) total += a.z[i] * p.dz[i];
    return total;
}

// The reference for gradients is itself held against differences of the loss.
void differences(Problem p) {
    const Gradient d = backward(p);
    auto check = [&](const char* what, Numbers& x, const Numbers& dx, bool log) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double at = x[i], h = log ? 1e-5 * at : 1e-5;
            x[i] = at + h;
            const double above = loss(p);
            x[i] = at - h;
            const double under = loss(p);
            x[i] = at;
            const double want = (above - under) / 2e-5;  // of the logarithm: d at * (dx / d log x)
            if (std::fabs(want - dx[i]) > 1e-6 * (1 + std::fabs(want))) fail(what, dx[i], want);
        }
    };
    check("dq by differences", p.q, d.dq, false);
    check("dk by differences", p.k, d.dk, false);
    check("dv by differences", p.v, d.dv, false);
    check("dS by differences", p.S, d.dS, false);
    if (p.delta) check("dbeta by differences", p.beta, d.dbeta, false);
    if (p.has_z) check("dz by differences", p.z, d.dz, false);
    check("dlog by differences", p.keep, d.dlog, true);
}

template <class T>
struct Layout {
    const Problem& p;
    // Positions in the kernel's layout of number i of a [P][n][width] array, of [n][E] rows apart, and of S.
    auto heads(int64_t width) const {
        return [this, width](int64_t i) {
            const int64_t h = i / (p.n * width), rest = i % (p.n * width);
            return h * isa::CHUNK * width + rest;
        };
    }
    auto rows(int64_t width, int64_t ld) const {
        return [width, ld](int64_t i) { return i / width * ld + i % width; };
    }
    auto state() const {
        return [this](int64_t i) {
            const int64_t r = i / p.E, e = i % p.E, block = e / isa::BLOCK<T> * isa::BLOCK<T>;
            const int64_t width = p.E - block < isa::BLOCK<T> ? p.E - block : isa::BLOCK<T>;
            return p.R * block + r * width + e - block;
        };
    }
    int64_t headed(int64_t width) const { return p.P ? ((p.P - 1) * isa::CHUNK + p.n) * width : 0; }
};
int64_t same(int64_t i) { return i; }

template <class T, class At>
void place(const Numbers& from, T* to, At&& at) {
    for (std::size_t i = 0; i < from.size(); ++i) to[at(int64_t(i))] = T(from[i]);
}

// Numbers in a buffer that belong to nobody must be what they were.
template <class T, class At>
void untouched(const char* what, const Buffer<T>& x, std::size_t used, At&& at) {
    std::vector<bool> mine(x.size());
    for (std::size_t i = 0; i < used; ++i) mine[at(int64_t(i))] = true;
    for (int64_t i = 0; i < x.size(); ++i) require(mine[i] || std::isnan(x[i]), what);
}

template <class T>
void compare(const Problem& p) {
    const Layout<T> layout{p};
    const int64_t ldv = p.E + isa::LANES<T>;
    Buffer<T> q(layout.headed(p.R)), k(p.n * p.R), v((p.n - 1) * ldv + p.E), beta(p.n), keep(p.n * p.keep_width);
    Buffer<T> S(p.R * p.E), z(p.R), S0(p.R * p.E), z0(p.R);
    place<T>(p.q, q, layout.heads(p.R));
    place<T>(p.k, k, same);
    place<T>(p.v, v, layout.rows(p.E, ldv));
    place<T>(p.beta, beta, same);
    place<T>(p.keep, keep, same);
    for (T* x : {(T*)S, (T*)S0}) place<T>(p.S, x, layout.state());
    for (T* x : {(T*)z, (T*)z0}) place<T>(p.z, x, same);
    const isa::Tokens<T> c{p.n, p.R, p.E, p.P, q, k, v, ldv, p.delta ? (T*)beta : nullptr,
                           p.keep_width ? (T*)keep : nullptr, p.keep_width};

    // Forward, its columns shared by two callers.
    Buffer<T> o(layout.headed(p.E)), den(layout.headed(1)), scratch(isa::recur_scratch<T>(p.R, p.P));
    const int64_t blocks = (p.E + isa::BLOCK<T> - 1) / isa::BLOCK<T>, cut = below(blocks + 1);
    isa::recur<T>(c, S, p.has_z ? (T*)z : nullptr, o, den, cut, blocks, scratch);
    isa::recur<T>(c, S, p.has_z ? (T*)z : nullptr, o, den, 0, cut, scratch);
    const Answer a = forward(p);
    close("o", a.o, (T*)o, layout.heads(p.E), BUDGET<T>, 1);
    close("S", a.S, (T*)S, layout.state(), BUDGET<T>, 1);
    untouched("o of other tokens", o, a.o.size(), layout.heads(p.E));
    if (p.has_z) {
        close("den", a.den, (T*)den, layout.heads(1), BUDGET<T>, 1);
        close("z", a.z, (T*)z, same, BUDGET<T>, 1);
    }
    untouched("den of other tokens", den, p.has_z ? a.den.size() : 0, layout.heads(1));

    Buffer<T> d_o(layout.headed(p.E)), d_den(layout.headed(1)), dS(p.R * p.E), dz(p.R);
    Buffer<T> dq(layout.headed(p.R)), dk(p.n * p.R), dv(p.n * p.E), dbeta(p.n), dlog(p.n * p.keep_width);
    Buffer<T> room(isa::recur_backward_scratch<T>(p.R, p.E, p.P));
    place<T>(p.d_o, d_o, layout.heads(p.E));
    place<T>(p.d_den, d_den, layout.heads(1));
    place<T>(p.dS, dS, layout.state());
    place<T>(p.dz, dz, same);
    isa::recur_backward<T>(c, S0, p.has_z ? (T*)z0 : nullptr,
                           {d_o, d_den, dS, dz, dq, dk, dv, p.delta ? (T*)dbeta : nullptr,
                            p.keep_width ? (T*)dlog : nullptr},
                           room);
    const Gradient d = backward(p);
    const double budget = 3 * BUDGET<T>;
    close("dq", d.dq, (T*)dq, layout.heads(p.R), budget, 1);
    close("dk", d.dk, (T*)dk, same, budget, 1);
    close("dv", d.dv, (T*)dv, same, budget, 1);
    close("dS", d.dS, (T*)dS, layout.state(), budget, 1);
    if (p.delta) close("dbeta", d.dbeta, (T*)dbeta, same, budget, 1);
    if (p.has_z) close("dz", d.dz, (T*)dz, same, budget, 1);
    close("dlog", d.dlog, (T*)dlog, same, budget, 1);
    untouched("dq of other tokens", dq, d.dq.size(), layout.heads(p.R));
    for (std::size_t i = 0; i < p.keep.size(); ++i)
        if (p.keep[i] == 0) require(dlog[i] == 0, "a factor of zero has no gradient");
}

template <class T>
void all() {
    const int64_t L = isa::LANES<T>;
    for (int64_t n = 1; n <= isa::CHUNK; ++n)
        for (int64_t keep_kind = 0; keep_kind < 3; ++keep_kind)
            for (int64_t kind = 0; kind < 4; ++kind) {
                const int64_t R = L * (1 + below(4)), E = L * (1 + below(10)), P = (n + keep_kind + kind) % 4;
                compare<T>(problem(n, R, E, P, keep_kind == 2 ? R : keep_kind, kind & 1, kind & 2));
            }
    compare<T>(problem(isa::CHUNK, 1024, L, 1, 1024, true, true));  // strips narrower than a block
    compare<T>(problem(19, 512, 5 * L, 2, 1, true, true));
    compare<T>(problem(7, 512, 7 * L, 0, 512, false, true));
}

}  // namespace

int main() {
    for (int64_t kind = 0; kind < 12; ++kind) {
        const int64_t R = 3;
        differences(problem(6, R, 2, kind % 3, kind / 4 == 2 ? R : kind / 4, kind & 1, kind & 2));
    }
    all<float>();
    all<double>();
    std::printf("recurrent: registers of %d bytes: passed\n", isa::BYTES);
}
