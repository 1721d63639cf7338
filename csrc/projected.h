// Logarithms of features that are one product away, log phi = x W^T: made where they are used, chunk by chunk,
// so that neither they nor the features ever go through memory. Offsets of rows and of features travel as
// further coordinates of x and W.
#pragma once

#include "call.h"
#include "graded.h"

namespace reassoc::REASSOC_ISA {

template <class T>
class Projection {
public:
    static index elements(const Matrix& m, index R) {
        return m ? m.width * R + R * padded<T>(m.width) + CHUNK * padded<T>(m.width) : 0;
    }
    Projection(const Matrix& m, index R, T* scratch) : matrix_(m), R_(R), D_(padded<T>(m.width)) {
        across_ = scratch, along_ = across_ + m.width * R, rows_ = along_ + R * D_;
    }

    // Copies the matrix of a key head into the two orders that the products want, padded with zeros.
    void use(index head) {
        if (matrix_.head == 0) head = 0;
        if (!matrix_ || head == head_) return;
        head_ = head;
        const T* from = static_cast<const T*>(matrix_.data) + head * matrix_.head;
        std::memset(across_, 0, sizeof(T) * (matrix_.width * R_ + R_ * D_));
        for (index f = 0; f < matrix_.rows; ++f)
            for (index c = 0; c < matrix_.width; ++c)
                across_[c * R_ + f] = along_[f * D_ + c] = from[f * matrix_.width + c];
    }

    // Logarithms (n x R) as `take_logs` gives them; hidden rows and features beyond r are `hidden`.
    void logs(const View& view, index b, index h, index start, index n, index r, const bool* mask, T hidden, T* to) {
        take<T>(view, b, h, start, n, D_, nullptr, Map::given, rows_);
        multiply(rows_, n, D_, matrix_.width, across_, R_, to);
        for (index t = 0; t < n; ++t)
            for (index f = mask && !mask[t] ? 0 : r; f < R_; ++f) to[t * R_ + f] = hidden;
    }

    // The gradient of x (n x padded width) from that of the logarithms; returns it in scratch.
    const T* backward(const T* d, index n) {
        multiply(d, n, R_, R_, along_, D_, rows_);
        return rows_;
    }
    index width() const { return D_; }
    explicit operator bool() const { return bool(matrix_); }

private:
    Matrix matrix_;
    index R_, D_, head_ = -1;
    T *across_, *along_, *rows_;

    // to (n x width) = a (n x depth, rows ld apart) b (depth x width); the last tile may write rows beyond n.
    static void multiply(const T* a, index n, index ld, index depth, const T* b, index width, T* to) {
        stretches<T>(width, [&](index at, auto count) {
            constexpr int N = decltype(count)::value;
            for (index i = 0; i < n; i += ROWS) {
                Vec<T> acc[ROWS][N];
                clear<T>(acc);
                tile<T, ROWS, N>(acc, depth, a + i * ld, ld, 1, b + at, width);
                for (int m = 0; m < ROWS; ++m)
                    for (int k = 0; k < N; ++k) store(to + (i + m) * width + at + k * LANES<T>, acc[m][k]);
            }
        });
    }
};

}  // namespace reassoc::REASSOC_ISA
