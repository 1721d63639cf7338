// One parallel loop. OpenMP shares torch's threads; std::thread serves sanitizers, which do not know OpenMP.
#pragma once

#include <cstdint>
#include <new>

#include "vec.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(REASSOC_STD_THREADS)
#include <thread>
#include <vector>
#endif

namespace reassoc::REASSOC_ISA {

// Calls body(item, thread) for every item; which thread takes which item changes no result. No exception may
// leave a thread of the team, so that memory which could not be had is told of afterwards.
template <class Body>
inline void parallel_for(std::int64_t items, int threads, Body&& body) {
    if (threads > items) threads = int(items);
    if (threads <= 1) {
        for (std::int64_t item = 0; item < items; ++item) body(item, 0);
        return;
    }
    bool failed = false;
    auto guarded = [&](std::int64_t item, int thread) {
        try {
            body(item, thread);
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    };
#if defined(REASSOC_STD_THREADS)
    std::vector<std::thread> team;
    for (int thread = 0; thread < threads; ++thread)
        team.emplace_back([&, thread] {
            for (std::int64_t item = thread; item < items; item += threads) guarded(item, thread);
        });
    for (auto& member : team) member.join();
#elif defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (std::int64_t item = 0; item < items; ++item) guarded(item, omp_get_thread_num());
#else
    for (std::int64_t item = 0; item < items; ++item) guarded(item, 0);
#endif
    if (failed) throw std::bad_alloc();
}

}  // namespace reassoc::REASSOC_ISA
