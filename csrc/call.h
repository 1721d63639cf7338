// The interface of the kernels: plain structs of pointers, sizes and strides. No torch, no Python.
#pragma once

#include <cstdint>

namespace reassoc {

enum class Kind : int { f32, f64, bf16, f16 };

// How a number of the input becomes a feature. `given`: it is one already.
enum class Map : int { given, elu1, relu, relu2 };

// A tensor of axes (batch, head, position, component); strides count elements, that of components is 1.
struct View {
    void* data = nullptr;
    std::int64_t batch = 0, head = 0, position = 0;
    Kind kind = Kind::f32;
    std::int64_t width = 0;  // components

    explicit operator bool() const { return width > 0; }  // an empty tensor has no address
};

// A matrix per key head, or one for all: rows x width, contiguous, `head` elements apart (0: shared), in the
// accumulating type.
struct Matrix {
    const void* data = nullptr;
    std::int64_t head = 0, rows = 0, width = 0;

    explicit operator bool() const { return width > 0; }
};

// One call: an update rule on B batches (or n packed sequences) of G key heads with P query heads each.
// Accumulating is in double where `wide`, else in float; states, scales and denominators have that type.
struct Call {
    std::int64_t groups = 0, share = 0;             // G, P
    std::int64_t queries = 0, keys = 0;             // N, M
    std::int64_t features = 0, columns = 0;         // r, e
    std::int64_t sequences = 0;                     // B, or n where packed
    bool wide = false, causal = false;
    bool normalizer = false;  // z is kept, as a last column of memory
    bool divide = false;      // out is the quotient; else the read, and the denominator as one more column
    bool sum_normalize = false;
    bool delta = false;
    Map map = Map::given;
    // Not 0: query i sees the keys i - window < j <= i, positions counted from the ends of both. Causal, no delta
    // rule, no state in or out.
    std::int64_t window = 0;
    double eps = 0.0, fill = 0.0;  // added to the denominator; written where it is zero
    int threads = 1;

    View query, key, value, out;                  // features or what `map` makes into them
    View query_log, key_log;                      // width r or 1: features are mantissa * exp(log)
    Matrix query_matrix, key_matrix;              // where given, the logarithms are log W^T, of width r
    View log_decay, beta;                         // width 1 or r; width 1
    const bool* mask = nullptr;                   // (B, M): false hides a key
    const std::int64_t* boundaries = nullptr;     // (n + 1): packed sequences
    const std::int64_t* query_boundaries = nullptr;  // (n + 1): with a window; null: those of the keys
    const void *memory = nullptr, *scale = nullptr;  // (B or n, G, r, c), (B or n, G, r)
    void *memory_out = nullptr, *scale_out = nullptr;
    void *denominator = nullptr, *log_row = nullptr;  // (B, H, N)

    // Backward only. Gradients have the layout of a contiguous (B, heads, positions, width).
    View d_out;
    const void* d_memory_out = nullptr;
    View d_query, d_key, d_value, d_query_log, d_key_log, d_log_decay, d_beta;
    void* d_memory = nullptr;
};

// Decode steps of one kind: everything that does not change from token to token. Inputs, output and state are
// contiguous; what changes is given with each token.
struct Decoder {
    std::int64_t batch = 0, groups = 0, share = 0, features = 0, columns = 0;
    bool wide = false, normalizer = false, divide = false, sum_normalize = false, exponential = false;
    Map map = Map::given;
    Kind kind = Kind::f32, beta_kind = Kind::f32, gate_kind = Kind::f32;
    std::int64_t gate_batch = 0, gate_head = 0, gate_width = 0;  // strides, and 1 or r; no gate: 0
    double eps = 0.0, fill = 0.0;
    int threads = 1;
};
struct Token {
    const void *query, *key, *value;  // (B, H, d), (B, G, d), (B, G, e)
    const void *beta, *log_decay;     // (B, G), and see Decoder; null: none
    const bool* mask;                 // (B), or null
    void *memory, *lost, *scale;      // (B, G, r, c), the same, (B, G, r)
    std::int64_t* length;             // (B): counts real keys
    void* out;                        // (B, H, e)
};

// One entry per instruction set.
struct Kernels {
    const char* isa;
    void (*forward)(const Call&);
    void (*backward)(const Call&);
    void (*step)(const Decoder&, const Token&);
    double (*fma_peak)(int threads, bool wide, double seconds);
};

// Asks for large pages under new memory: the first touch of a small one costs more than filling it. Only a
// request; without effect on what does not hold a whole large page, and where there are none.
void large_pages(void* memory, std::int64_t bytes);

const Kernels& kernels();  // the widest that this processor runs; REASSOC_ISA in the environment lowers it

}  // namespace reassoc
