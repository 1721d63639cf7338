// Python's view of the kernels: pointers, strides and numbers. Checks of shapes and types are in
// reassoc/kernels/native/ and reassoc/_decode.py, the callers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "call.h"

namespace nb = nanobind;
using reassoc::Call;
using reassoc::Decoder;
using reassoc::Kind;
using reassoc::Map;
using reassoc::Matrix;
using reassoc::Token;
using reassoc::View;

static void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

template <auto Member>
static void address(nb::class_<Call>& cls, const char* name) {
    cls.def_prop_rw(
        name, [](const Call& call) { return reinterpret_cast<std::uintptr_t>(call.*Member); },
        [](Call& call, std::uintptr_t at) {
            call.*Member = static_cast<std::remove_reference_t<decltype(call.*Member)>>(pointer(at));
        });
}

NB_MODULE(_native, m) {
    m.attr("isa") = reassoc::kernels().isa;
    m.attr("version") = REASSOC_VERSION;
#if defined(_OPENMP)
    m.attr("openmp") = true;
#else
    m.attr("openmp") = false;
#endif
    nb::enum_<Map>(m, "Map")
        .value("given", Map::given)
        .value("elu1", Map::elu1)
        .value("relu", Map::relu)
        .value("relu2", Map::relu2);
    nb::class_<View>(m, "View").def(
        "__init__",
        [](View* view, std::uintptr_t at, std::int64_t batch, std::int64_t head, std::int64_t position, int kind,
           std::int64_t width) {
            new (view) View{pointer(at), batch, head, position, Kind(kind), width};
        });
    nb::class_<Matrix>(m, "Matrix").def(
        "__init__", [](Matrix* matrix, std::uintptr_t at, std::int64_t head, std::int64_t rows, std::int64_t width) {
            new (matrix) Matrix{pointer(at), head, rows, width};
        });
    nb::class_<Call> call(m, "Call");
    call.def(nb::init<>())
        .def_rw("groups", &Call::groups)
        .def_rw("share", &Call::share)
        .def_rw("queries", &Call::queries)
        .def_rw("keys", &Call::keys)
        .def_rw("features", &Call::features)
        .def_rw("columns", &Call::columns)
        .def_rw("sequences", &Call::sequences)
        .def_rw("wide", &Call::wide)
        .def_rw("causal", &Call::causal)
        .def_rw("normalizer", &Call::normalizer)
        .def_rw("divide", &Call::divide)
        .def_rw("sum_normalize", &Call::sum_normalize)
        .def_rw("delta", &Call::delta)
        .def_rw("map", &Call::map)
        .def_rw("window", &Call::window)
        .def_rw("eps", &Call::eps)
        .def_rw("fill", &Call::fill)
        .def_rw("threads", &Call::threads)
        .def_rw("query", &Call::query)
        .def_rw("key", &Call::key)
        .def_rw("value", &Call::value)
        .def_rw("out", &Call::out)
        .def_rw("query_log", &Call::query_log)
        .def_rw("key_log", &Call::key_log)
        .def_rw("query_matrix", &Call::query_matrix)
        .def_rw("key_matrix", &Call::key_matrix)
        .def_rw("log_decay", &Call::log_decay)
        .def_rw("beta", &Call::beta)
        .def_rw("d_out", &Call::d_out)
        .def_rw("d_query", &Call::d_query)
        .def_rw("d_key", &Call::d_key)
        .def_rw("d_value", &Call::d_value)
        .def_rw("d_query_log", &Call::d_query_log)
        .def_rw("d_key_log", &Call::d_key_log)
        .def_rw("d_log_decay", &Call::d_log_decay)
        .def_rw("d_beta", &Call::d_beta);
    address<&Call::mask>(call, "mask");
    address<&Call::boundaries>(call, "boundaries");
    address<&Call::query_boundaries>(call, "query_boundaries");
    address<&Call::memory>(call, "memory");
    address<&Call::scale>(call, "scale");
    address<&Call::memory_out>(call, "memory_out");
    address<&Call::scale_out>(call, "scale_out");
    address<&Call::denominator>(call, "denominator");
    address<&Call::log_row>(call, "log_row");
    address<&Call::d_memory_out>(call, "d_memory_out");
    address<&Call::d_memory>(call, "d_memory");
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::init<>())
        .def_rw("batch", &Decoder::batch)
        .def_rw("groups", &Decoder::groups)
        .def_rw("share", &Decoder::share)
        .def_rw("features", &Decoder::features)
        .def_rw("columns", &Decoder::columns)
        .def_rw("wide", &Decoder::wide)
        .def_rw("normalizer", &Decoder::normalizer)
        .def_rw("divide", &Decoder::divide)
        .def_rw("sum_normalize", &Decoder::sum_normalize)
        .def_rw("exponential", &Decoder::exponential)
        .def_rw("map", &Decoder::map)
        .def_prop_rw(
            "kinds", [](const Decoder& d) { return nb::make_tuple(int(d.kind), int(d.beta_kind), int(d.gate_kind)); },
            [](Decoder& d, std::tuple<int, int, int> kinds) {
                std::tie(d.kind, d.beta_kind, d.gate_kind) =
                    std::tuple(Kind(std::get<0>(kinds)), Kind(std::get<1>(kinds)), Kind(std::get<2>(kinds)));
            })
        .def_rw("gate_batch", &Decoder::gate_batch)
        .def_rw("gate_head", &Decoder::gate_head)
        .def_rw("gate_width", &Decoder::gate_width)
        .def_rw("eps", &Decoder::eps)
        .def_rw("fill", &Decoder::fill)
        .def_rw("threads", &Decoder::threads)
        // Positional, and without letting go of the interpreter: a step takes a few microseconds.
        .def("step", [](const Decoder& d, std::uintptr_t query, std::uintptr_t key, std::uintptr_t value,
                        std::uintptr_t beta, std::uintptr_t log_decay, std::uintptr_t mask, std::uintptr_t memory,
                        std::uintptr_t lost, std::uintptr_t scale, std::uintptr_t length, std::uintptr_t out) {
            const Token token{pointer(query), pointer(key), pointer(value), pointer(beta), pointer(log_decay),
                              static_cast<const bool*>(pointer(mask)), pointer(memory), pointer(lost), pointer(scale),
                              static_cast<std::int64_t*>(pointer(length)), pointer(out)};
            reassoc::kernels().step(d, token);
        });
    m.def("large_pages", [](std::uintptr_t at, std::int64_t bytes) { reassoc::large_pages(pointer(at), bytes); });
    m.def("forward", [](const Call& c) { reassoc::kernels().forward(c); }, nb::call_guard<nb::gil_scoped_release>());
    m.def("backward", [](const Call& c) { reassoc::kernels().backward(c); }, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fma_peak",
        [](int threads, bool double_precision, double seconds) {
            return reassoc::kernels().fma_peak(threads, double_precision, seconds);
        },
        nb::arg("threads"), nb::arg("double_precision"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
}
