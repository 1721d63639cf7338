// The kernels of one instruction set: compiled once for each, with its flags and its REASSOC_ISA.
#include "decode.h"
#include "peak.h"
#include "window_backward.h"

#include <ctime>

#define REASSOC_TEXT(name) #name
#define REASSOC_NAME(name) REASSOC_TEXT(name)

namespace reassoc::REASSOC_ISA {

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

template <class T>
static double peak(int threads, double seconds) {
    constexpr std::int64_t ROUNDS = 100000;
    std::int64_t rounds = 0;
    double rate = 0;
    // As many rounds at a time as take about a tenth of the time asked for.
    const double start = now();
    for (std::int64_t batch = ROUNDS; now() - start < seconds; batch *= now() - start < seconds / 10 ? 2 : 1) {
        const double before = now();
        parallel_for(threads, threads, [&](std::int64_t, int) {
            volatile T kept = multiply_add<T>(batch);
            (void)kept;
        });
        rounds = batch * threads;
        const double found = FLOPS_PER_ROUND<T> * double(rounds) / (now() - before);
        rate = found > rate ? found : rate;
    }
    return rate;
}

template <class T>
static void forward_of(const Call& call) {
    call.window ? window_forward<T>(call) : forward<T>(call);
}
template <class T>
static void backward_of(const Call& call) {
    call.window ? window_backward<T>(call) : backward<T>(call);
}
static void run_forward(const Call& call) { call.wide ? forward_of<double>(call) : forward_of<float>(call); }
static void run_backward(const Call& call) { call.wide ? backward_of<double>(call) : backward_of<float>(call); }
static void run_step(const Decoder& d, const Token& t) { d.wide ? decode<double>(d, t) : decode<float>(d, t); }
static double run_peak(int threads, bool wide, double seconds) {
    return wide ? peak<double>(threads, seconds) : peak<float>(threads, seconds);
}

extern const Kernels table;
const Kernels table{REASSOC_NAME(REASSOC_ISA), run_forward, run_backward, run_step, run_peak};

}  // namespace reassoc::REASSOC_ISA
