// The arithmetic ceiling of this machine: nothing but fused multiply-adds on registers.
#pragma once

#include "vec.h"

namespace reassoc::REASSOC_ISA {

constexpr int CHAINS = 12;  // two units times a latency of four, and some

// Multiply-adds of `rounds` rounds over independent accumulators.
template <class T>
inline T multiply_add(std::int64_t rounds) {
    Vec<T> acc[CHAINS], factor = splat(T(0.999)), term = splat(T(0.001));
    for (int c = 0; c < CHAINS; ++c) acc[c] = splat(T(c));
    asm("" : "+x"(factor), "+x"(term));  // else the compiler could work the result out
    for (std::int64_t round = 0; round < rounds; ++round)
        for (int c = 0; c < CHAINS; ++c) acc[c] = acc[c] * factor + term;
    for (int c = 1; c < CHAINS; ++c) acc[0] += acc[c];
    return sum<T>(acc[0]);
}
template <class T>
constexpr double FLOPS_PER_ROUND = 2.0 * CHAINS * LANES<T>;

}  // namespace reassoc::REASSOC_ISA
