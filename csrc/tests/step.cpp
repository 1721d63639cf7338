// A decode step against plain loops in double; and a long run of steps, in which rounding must not build up.
//
//   g++ -std=c++17 -O3 -ffp-contract=fast [-mavx2 -mfma ...] csrc/tests/step.cpp -o step && ./step
#include "../step.h"
#include "checks.h"

namespace {

using namespace checks;
namespace isa = reassoc::REASSOC_ISA;
using std::int64_t;
using Numbers = std::vector<double>;

int64_t same(int64_t i) { return i; }

template <class T>
Numbers fill(const Buffer<T>& x, double low, double high) {
    Numbers copy(x.size());
    for (int64_t i = 0; i < x.size(); ++i) copy[i] = x[i] = T(low + (high - low) * uniform());
    return copy;
}

template <class T>
void once(int64_t R, int64_t C, int64_t P, bool has_z, bool delta, int64_t keep_width, bool compensated) {
    const int64_t e = C - has_z, offset = below(5);
    Buffer<T> k(R, offset), v(e, offset), q(P * R, offset), beta(1), keep(keep_width), memory(R * C, offset),
        lost(compensated ? R * C : 0, offset), out(P * C, offset);
    const Numbers k_ = fill(k, -0.3, 0.3), v_ = fill(v, -1, 1), q_ = fill(q, -1, 1), beta_ = fill(beta, 0, 1);
    Numbers keep_ = fill(keep, 0, 1), S = fill(memory, -1, 1), left = fill(lost, -1e-8, 1e-8);
    if (keep_width) keep_[keep_width / 2] = keep[keep_width / 2] = T(below(2));
    isa::step<T>({R, C, P, has_z, k, v, q, delta ? (T*)beta : nullptr, keep_width ? (T*)keep : nullptr, keep_width,
                  memory, compensated ? (T*)lost : nullptr, out});

    Numbers want(P * C), exact(R * C);
    auto factor = [&](int64_t r) { return keep_width == 0 ? 1 : keep_[keep_width == 1 ? 0 : r]; };
    for (int64_t c = 0; c < C; ++c) {
        double u = c < e ? v_[c] : 1;
        if (delta && c < e) {
            for (int64_t r = 0; r < R; ++r) u -= factor(r) * S[r * C + c] * k_[r];
            u *= beta_[0];
        }
        for (int64_t r = 0; r < R; ++r) {
            exact[r * C + c] = factor(r) * (S[r * C + c] - (compensated ? left[r * C + c] : 0)) + k_[r] * u;
            for (int64_t p = 0; p < P; ++p) want[p * C + c] += q_[p * R + r] * exact[r * C + c];
        }
    }
    close("reads", want, (T*)out, same, BUDGET<T>, 1);
    close("memory", exact, (T*)memory, same, BUDGET<T>, 1);
    if (!compensated) return;
    Numbers kept(R * C);  // memory - lost is nearer to the exact sum than one rounding
    for (int64_t i = 0; i < R * C; ++i) kept[i] = double(memory[i]) - double(lost[i]);
    close("memory - lost", exact, kept.data(), same, sizeof(T) == 4 ? 1e-6 : 1e-14, 1);
}

// Many small terms onto a large state. Returns the largest relative error.
double run(double decay, bool compensated) {
    const int64_t R = 3, C = 2 * isa::LANES<float> + 6;  // whole registers, parts of one and single columns
    Buffer<float> k(R), v(C - 1), memory(R * C), lost(R * C);
    Numbers S(R * C, 1.0), k_(R), v_(C - 1);
    const float keep = float(decay);
    for (int64_t i = 0; i < R * C; ++i) memory[i] = 1, lost[i] = 0;
    for (int64_t r = 0; r < R; ++r) k_[r] = k[r] = float(1e-3 * (0.5 + 0.5 * uniform()));
    for (int64_t c = 0; c < C - 1; ++c) v_[c] = v[c] = float(1e-5 * (1 + c % 3));
    for (int64_t t = 0; t < 300000; ++t) {
        isa::step<float>({R, C, 0, true, k, v, nullptr, nullptr, &keep, 1, memory, compensated ? (float*)lost : nullptr,
                          nullptr});
        for (int64_t r = 0; r < R; ++r)
            for (int64_t c = 0; c < C; ++c) S[r * C + c] = S[r * C + c] * keep + k_[r] * (c < C - 1 ? v_[c] : 1);
    }
    double worst = 0;
    for (int64_t i = 0; i < R * C; ++i) worst = std::fmax(worst, std::fabs(memory[i] - S[i]) / S[i]);
    return worst;
}

template <class T>
void all() {
    for (int64_t C = 1; C <= 140; ++C)
        for (int64_t kind = 0; kind < 8; ++kind) {
            const int64_t R = 1 + below(20);
            const bool has_z = (kind & 1) && C > 1;
            for (int64_t keep_kind = 0; keep_kind < 3; ++keep_kind)
                once<T>(R, C, (C + keep_kind) % 4, has_z, kind & 2, keep_kind == 2 ? R : keep_kind, kind & 4);
        }
}

}  // namespace

int main() {
    all<float>();
    all<double>();
    const double plain = run(1, false);
    require(plain > 1e-4, "a plain sum loses small terms, or this test shows nothing");
    for (double decay : {1.0, 1 - 0x1p-20, 1 - 0x1p-12, 0.9, 0.4}) {
        const double worst = run(decay, true);
        if (worst > 1e-6) fail("a long compensated sum", worst, 1e-6);
    }
    std::printf("step: registers of %d bytes: passed\n", isa::BYTES);
}
