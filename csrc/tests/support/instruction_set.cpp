// Linked into every test: leaves with 77, which ctest shows as skipped, where the machine lacks the
// instruction set that REASSOC_ISA names. The library itself would quietly take a narrower one.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"

static const bool checked = [] {
    const char* wanted = std::getenv("REASSOC_ISA");
    if (wanted && *wanted && std::strcmp(wanted, reassoc::kernels().isa) != 0) {
        std::printf("skipped: this machine has no %s\n", wanted);
        std::exit(77);
    }
    return true;
}();
