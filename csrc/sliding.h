// What the last few chunks have written together. A window that slides by one chunk would have to take its oldest
// chunk out again, and nothing is ever subtracted from a state: a huge key would leave its rounding behind. So
// runs are kept on two stacks, as of a queue made of them: the older half as compositions of everything from one
// chunk to the half's end, the newer half as one composition and its single runs. When the older half is used up
// the newer one takes its place, composed anew from its end: every chunk takes part in three compositions.
#pragma once

#include "forward.h"

namespace reassoc::REASSOC_ISA {

// A run of tokens: what it writes, from nothing, and its log decay ([R], or [0] alone where it is one per token).
template <class T>
struct Run {
    State<T> state;
    T* decay;

    static index size(index R, index E) { return State<T>::size(R, E) + R; }
    static Run at(T* memory, index R, index E) {
        return {State<T>::at(memory, R, E), memory + State<T>::size(R, E)};
    }
};

template <class T>
class Sliding {
public:
    Sliding(const Walk<T>& w, index R_, index E_, index depth)
        : walk(w), R(R_), E(E_), slots(depth + 2), arena(Arena::bytes<T>((depth + 3) * Run<T>::size(R_, E_))) {
        memory = arena.take<T>((slots + 1) * Run<T>::size(R, E));
    }

    void clear() { oldest = middle = end = 0; }
    index count() const { return end - oldest; }

    // The place of the next run, empty; it belongs to the window once `push` is called.
    Run<T> next() const {
        Run<T> run = slot(end);
        blank(run);
        return run;
    }
    void push() {
        if (end == middle)
            copy(newer(), slot(end));
        else
            compose(newer(), slot(end));
        ++end;
    }
    void pop() {
        const bool used_up = oldest == middle;
        ++oldest;
        if (!used_up) return;
        for (index i = end - 2; i >= oldest; --i) compose(slot(i), slot(i + 1));
        middle = end;
    }
    // All runs of the window as one.
    void whole(Run<T> to) const {
        if (oldest < middle) {
            copy(to, slot(oldest));
            if (middle < end) compose(to, newer());
        } else if (middle < end) {
            copy(to, newer());
        } else {
            blank(to);
        }
    }
    void blank(Run<T> run) const {
        std::memset(run.state.S, 0, sizeof(T) * Run<T>::size(R, E));
        if (walk.logarithmic)
            for (index f = 0; f < R; ++f) run.state.scale[f] = -T(__builtin_inf());
    }

private:
    const Walk<T>& walk;
    const index R, E, slots;
    Arena arena;
    T* memory;
    index oldest = 0, middle = 0, end = 0;  // numbers of runs; those before `middle` are composed up to it

    Run<T> slot(index number) const { return Run<T>::at(memory + number % slots * Run<T>::size(R, E), R, E); }
    Run<T> newer() const { return Run<T>::at(memory + slots * Run<T>::size(R, E), R, E); }
    void copy(Run<T> to, Run<T> from) const { std::memcpy(to.state.S, from.state.S, sizeof(T) * Run<T>::size(R, E)); }
    void compose(Run<T> earlier, Run<T> later) const {
        append(walk, earlier.state, later.state, double(later.decay[0]), later.decay);
        for (index r = 0; r < R; ++r) earlier.decay[r] += later.decay[r];
    }
};

}  // namespace reassoc::REASSOC_ISA
