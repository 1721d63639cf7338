"""A million tokens through a constant state: errors against float64, and memory.

Run: python benchmarks/stream.py [--tokens 1000000] [--map elu+1|favor+]
Writes a table to standard output. Takes a few minutes on 2 cores.
"""

import argparse
import resource
import time

import torch

import reassoc
from reassoc import feature_maps

HEADS, DIM, PIECE = 2, 16, 4000


def inputs(piece: int) -> tuple[torch.Tensor, ...]:
    """Query, key, value of one piece, the same whatever consumes them."""
    generator = torch.Generator().manual_seed(piece)
    return tuple(torch.randn(1, HEADS, PIECE, DIM, generator=generator) for _ in range(3))


def peak_megabytes() -> float:
    """Largest resident memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Compare stepping and pieces in float32 with pieces in float64."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--map", default="elu+1", choices=("elu+1", "favor+"))
    options = parser.parse_args()
    phi = feature_maps.ELU1(DIM) if options.map == "elu+1" else feature_maps.PositiveFeatures(DIM, 32)
    states = {
        name: reassoc.AttentionState.zeros(phi, 1, HEADS, DIM, dtype=dtype)
        for name, dtype in (("step", torch.float32), ("pieces", torch.float32), ("float64", torch.float64))
    }
    worst = {"step": 0.0, "pieces": 0.0}
    seconds = dict.fromkeys(states, 0.0)
    size: dict[str, int] = {}
    print(
        f"{'tokens':>9} {'step error':>11} {'pieces error':>13} {'step z':>8} {'pieces z':>9} {'peak MB':>8}"
    )
    with torch.no_grad():
        for piece in range(options.tokens // PIECE):
            query, key, value = inputs(piece)
            start = time.perf_counter()
            exact, states["float64"] = reassoc.linear_attention(
                query.double(), key.double(), value.double(), phi, causal=True, state=states["float64"],
                return_state=True,
            )  # fmt: skip
            seconds["float64"] += time.perf_counter() - start
            start = time.perf_counter()
            found = {}
            found["pieces"], states["pieces"] = reassoc.linear_attention(
                query, key, value, phi, causal=True, state=states["pieces"], return_state=True
            )
            seconds["pieces"] += time.perf_counter() - start
            start = time.perf_counter()
            rows = [
                reassoc.step(
                    query[:, :, i : i + 1], key[:, :, i : i + 1], value[:, :, i : i + 1], phi, states["step"]
                )
                for i in range(PIECE)
            ]
            found["step"] = torch.cat(rows, dim=2)
            seconds["step"] += time.perf_counter() - start
            size = size or {name: state.nbytes for name, state in states.items()}  # after the first piece
            # Relative to what an average of values of this size would weigh: sum |w| |v| is below max |v|.
            for name, output in found.items():
                worst[name] = max(worst[name], ((output - exact).abs().max() / value.abs().mean()).item())
            if (piece + 1) * PIECE % (options.tokens // 5) == 0:
                z = [relative_z(states[name], states["float64"]) for name in ("step", "pieces")]
                print(
                    f"{(piece + 1) * PIECE:>9,} {worst['step']:>11.1e} {worst['pieces']:>13.1e} "
                    f"{z[0]:>8.1e} {z[1]:>9.1e} {peak_megabytes():>8.0f}",
                    flush=True,
                )
    assert all(state.nbytes == size[name] for name, state in states.items())
    print({name: f"{1e6 * s / options.tokens:.1f} us/token" for name, s in seconds.items()})
    print(f"state: {size} bytes throughout")


def relative_z(state: reassoc.AttentionState, exact: reassoc.AttentionState) -> float:
    """Largest relative error of the normalizer z."""
    z, true = state.z.double(), exact.z
    if state.log_scale is not None:
        z, true = z * (state.log_scale.double() - exact.log_scale).exp(), true
    return ((z - true) / true).abs().max().item()


if __name__ == "__main__":
    main()
