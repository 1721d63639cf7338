// The widest instruction set that this processor has, among those the library was built for.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <cstring>

#include "call.h"

namespace reassoc {

#if defined(REASSOC_HAS_AVX512)
namespace avx512 { extern const Kernels table; }
#endif
#if defined(REASSOC_HAS_AVX2)
namespace avx2 { extern const Kernels table; }
#endif
#if defined(REASSOC_HAS_NEON)
namespace neon { extern const Kernels table; }
#endif
namespace plain { extern const Kernels table; }

static const Kernels& choose() {
    const char* wanted = std::getenv("REASSOC_ISA");
    auto allowed = [&](const char* name) { return !wanted || !*wanted || std::strcmp(wanted, name) == 0; };
    (void)allowed;
#if defined(REASSOC_HAS_AVX512)
    if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return avx512::table;
#endif
#if defined(REASSOC_HAS_AVX2)
    if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return avx2::table;
#endif
#if defined(REASSOC_HAS_NEON)
    if (allowed("neon")) return neon::table;
#endif
    return plain::table;
}

void large_pages(void* memory, std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t PAGE = std::uintptr_t(1) << 21;
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t from = (start + PAGE - 1) / PAGE * PAGE, to = (start + bytes) / PAGE * PAGE;
    if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace reassoc
