"""The speed that docs/results/speed.md states: ratios of medians, both sides timed in turn in one run.

    python benchmarks/speed.py --out speed.json        # about ten minutes; nothing else should run

Transformers' fallback, pytorch-fast-transformers and the plain chunked form are compared where they are
installed (`pip install reassoc[hf]`; pytorch-fast-transformers 0.4.0 needs a build for CPU).
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import reassoc
from reassoc import rules
from reassoc.kernels._library import library
from reassoc.kernels.native.call import Inputs, Options, Results, empty_results, forward
from reassoc.lab._machine import machine
from reassoc.lab.bench.clock import time_rounds
from reassoc.lab.bench.yardstick import yardstick

H, D = 8, 64
softmax = torch.nn.functional.scaled_dot_product_attention


def draw(n: int, heads: int = H, dim: int = D, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, heads, n, dim, generator=generator).requires_grad_(grad) for _ in range(3)]


def timed(*calls: Callable[[], object], rounds: int = 7) -> list[float]:
    """Median seconds of each call, taken in turn."""
    found = time_rounds({str(index): call for index, call in enumerate(calls)}, rounds)
    return [median(timing.seconds) for timing in found.values()]


def trained(run: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    weight = torch.randn(1, *tensors[0].shape[1:3], tensors[2].shape[-1])
    return lambda: torch.autograd.grad(run(*tensors), tensors, weight)


def elu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reassoc.linear_attention(q, k, v, "elu+1", causal=True)


def causal_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q, k, v, is_causal=True)


OPTIONS = Options(True, "elu+1", False, True, True, 0.0, float("nan"), "float32")


def reused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Inputs, Results]:
    """A call of the kernel alone into memory that was touched before."""
    inputs = Inputs(q, None, k, None, v)
    into = empty_results(inputs, OPTIONS)
    into.out.zero_()
    return inputs, into


def flops(n: int) -> float:
    """Of the triangular form in chunks of 64, nothing else: what is above the diagonal does not count."""
    return H * n * (65 * (D + D) + 4 * D * D)


def sums(report: dict[str, float]) -> None:
    peak = max(library().fma_peak(torch.get_num_threads(), False, 0.3) for _ in range(5))  # type: ignore[union-attr]
    report["FMA peak, GFLOP/s"] = peak / 1e9
    for n in (256, 512, 1024, 2048, 4096, 16384):
        q, k, v = draw(n)
        with torch.no_grad():
            ours, soft, yard = timed(
                lambda: elu(q, k, v), lambda: causal_softmax(q, k, v), lambda: yardstick(q, k, v, True),
                rounds=31 if n <= 1024 else 9 if n <= 4096 else 3,
            )  # fmt: skip
        report[f"forward {n}: ms"] = ours * 1e3
        report[f"forward {n}: SDPA / ours"] = soft / ours
        report[f"forward {n}: chunked PyTorch / ours"] = yard / ours
        report[f"forward {n}: share of FMA peak"] = flops(n) / ours / peak
        inputs, into = reused(q, k, v)
        kernel = timed(lambda: forward(inputs, OPTIONS, into), rounds=31 if n <= 4096 else 7)[0]
        report[f"forward {n}: share of FMA peak, output reused"] = flops(n) / kernel / peak
    q, k, v = draw(4096, grad=True)
    ours, soft, yard = timed(
        *(trained(run, [q, k, v]) for run in (elu, causal_softmax, lambda *t: yardstick(*t, True))), rounds=5
    )
    report["forward+backward 4096: ms"] = ours * 1e3
    report["forward+backward 4096: SDPA / ours"] = soft / ours
    report["forward+backward 4096: chunked PyTorch / ours"] = yard / ours


def fast_transformers(report: dict[str, float]) -> None:
    try:
        from fast_transformers.attention import CausalLinearAttention
        from fast_transformers.masking import LengthMask, TriangularCausalMask
    except ImportError:
        print("pytorch-fast-transformers is not installed: not compared")
        return
    q, k, v = draw(4096)
    other = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    attention, mask = CausalLinearAttention(D), TriangularCausalMask(4096)
    lengths = LengthMask(torch.full((1,), 4096, dtype=torch.int64), max_len=4096)
    with torch.no_grad():
        ours, theirs = timed(lambda: elu(q, k, v), lambda: attention(*other, mask, lengths, lengths))
    report["forward 4096: pytorch-fast-transformers / ours"] = theirs / ours


def delta_rules(report: dict[str, float]) -> None:
    n = 2048
    q, k, v = draw(n, grad=True)
    beta = torch.rand(1, H, n)
    gate = -torch.rand(1, H, n) * 0.1

    def delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reassoc.linear_attention(
            q, k, v, "elu+1", rule=rules.Delta(beta), normalize="sum", causal=True
        )

    def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rule = rules.GatedDelta(beta, gate)
        return reassoc.linear_attention(q, k, v, "elu+1", rule=rule, normalize="sum", causal=True)

    with torch.no_grad():
        base, *others = timed(lambda: elu(q, k, v), lambda: delta(q, k, v), lambda: gated(q, k, v), rounds=31)
    for name, seconds in zip(("delta", "gated delta"), others, strict=True):
        report[f"forward {n}: {name} / sum"] = seconds / base
    base, *others = timed(*(trained(run, [q, k, v]) for run in (elu, delta, gated)), rounds=9)
    for name, seconds in zip(("delta", "gated delta"), others, strict=True):
        report[f"forward+backward {n}: {name} / sum"] = seconds / base

    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    fallback = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
    q, k, v = draw(n, 16, 128)
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    beta, gate = torch.rand(1, 16, n), -torch.rand(1, 16, n) * 0.1
    other = [t.transpose(1, 2).contiguous() for t in (q, k, v, gate, beta)]
    rule = rules.GatedDelta(beta, gate)
    with torch.no_grad():
        ours, theirs = timed(
            lambda: reassoc.linear_attention(q, k, v, "identity", rule=rule, normalize="none", causal=True),
            lambda: fallback(*other),
        )
    report["H16 d128 2048, gated delta: transformers / ours"] = theirs / ours


def positive(report: dict[str, float]) -> None:
    phi = reassoc.feature_maps.PositiveFeatures(D, 256, seed=0)
    for n in (512, 1024, 2048, 4096):
        q, k, v = draw(n)
        with torch.no_grad():
            ours, soft = timed(
                lambda: reassoc.linear_attention(q, k, v, phi, causal=True), lambda: causal_softmax(q, k, v),
                rounds=9,
            )  # fmt: skip
        report[f"256 positive features, forward {n}: SDPA / ours"] = soft / ours


def steps(report: dict[str, float]) -> None:
    phi = reassoc.feature_maps.make("elu+1", D)
    q, k, v = draw(1)
    for seen in (0, 32768):
        state = reassoc.AttentionState.zeros(phi, 1, H, D)
        if seen:
            with torch.no_grad():
                keys = draw(seen)
                _, state = reassoc.linear_attention(*keys, phi, causal=True, return_state=True)

        def many(state: reassoc.AttentionState = state) -> None:
            for _ in range(1000):
                reassoc.step(q, k, v, phi, state)

        report[f"step after {seen}: us"] = timed(many, rounds=9)[0] * 1e3
    cache = draw(32768)
    ours, soft = timed(many, lambda: [softmax(q, *cache[1:]) for _ in range(20)], rounds=5)
    report["step: SDPA over 32768 cached keys / ours"] = (soft / 20) / (ours / 1000)


def lengths(report: dict[str, float]) -> None:
    found = {}
    for n in (16384, 65536, 262144):
        q, k, v = draw(n)
        inputs, into = reused(q, k, v)
        same, fresh = timed(
            lambda: forward(inputs, OPTIONS, into),
            lambda: forward(inputs, OPTIONS),
            rounds=9 if n < 2e5 else 5,
        )
        found[n] = same / n
        report[f"{n} tokens: ns a token, output reused"] = same / n * 1e9
        report[f"{n} tokens: ns a token, output in fresh pages"] = fresh / n * 1e9
    report["growth of time a token, 16384 to 262144"] = found[262144] / found[16384] - 1


def threads(report: dict[str, float]) -> None:
    q, k, v = draw(16384, 1)

    def run(count: int) -> float:
        torch.set_num_threads(count)  # new threads are made: not to be timed
        return timed(lambda: elu(q, k, v), rounds=15)[0]

    with torch.no_grad():
        pairs = [(run(1), run(2)) for _ in range(3)]
    report["one head, 16384: 1 thread / 2 threads"] = median(one / two for one, two in pairs)


MEMORY = """
import torch, reassoc
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
q, k, v = (torch.randn(1, 1, 1_000_000, 64) for _ in range(3))
with torch.no_grad():
    reassoc.linear_attention(q[:, :, :4096], k[:, :, :4096], v[:, :, :4096], "elu+1", causal=True)
    before = peak()
    out = reassoc.linear_attention(q, k, v, "elu+1", causal=True)
print(peak() - before - out.numel() * 4 / 2**20)
"""


def memory(report: dict[str, float]) -> None:
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    report["1000000 tokens: MiB beyond inputs and output"] = float(found.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures and the machine as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, float] = {}
    for part in (sums, fast_transformers, delta_rules, positive, steps, lengths, memory, threads):
        known = set(report)
        part(report)
        for name in report:
            if name not in known:
                print(f"{name:58s} {report[name]:10.3f}", flush=True)
    if arguments.out is not None:
        about = {"machine": machine(), "threads": arguments.threads, "figures": report}
        arguments.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
