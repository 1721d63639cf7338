"""Other libraries, where installed: each is given its own layout, converted before the clock starts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._errors import InputError
from .contenders import Contender, Ready, UnsupportedError
from .inputs import Inputs
from .settings import Problem, Settings

Make = Callable[[Settings, Any, "Peer"], Contender]
TRAINED = ("forward", "backward")


@dataclass(frozen=True)
class Peer:
    """Another library's function.

    Attributes:
        name: on the command line. package: on PyPI. modules: to import. problem: what it computes.
        make: settings, the last module and this to a contender. install: how, where pip alone will not do.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    problem: Problem
    make: Make
    install: str = ""

    def load(self) -> Any:
        """The last module, or ``ImportError``; what it prints or warns of on import is not ours."""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = None
            for module in self.modules:
                found = importlib.import_module(module)
            return found

    def how_to_install(self) -> str:
        """A command."""
        return self.install or f"pip install {self.package}"


def _transposed(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(B, H, N, ...) -> (B, N, H, ...)``, contiguous: not charged to a peer that wants it so."""
    return tuple(t.transpose(1, 2).contiguous() for t in inputs.tensors)


def _fast_transformers(settings: Settings, module: Any, peer: Peer) -> Contender:
    masks = importlib.import_module("fast_transformers.masking")
    kind = module.CausalLinearAttention if settings.causal else module.LinearAttention
    attention = kind(settings.head_dim)  # its default feature map is ELU+1

    def call(inputs: Inputs) -> Ready:
        length = inputs.query.shape[2]
        mask = masks.TriangularCausalMask(length) if settings.causal else masks.FullMask(length)
        lengths = masks.LengthMask(torch.full((settings.batch,), length, dtype=torch.int64), max_len=length)
        q, k, v = leaves = _transposed(inputs)
        return Ready(lambda: attention(q, k, v, mask, lengths, lengths), leaves, transposed=True)

    return _contender(settings, peer, call)


def _performer(settings: Settings, module: Any, peer: Peer) -> Contender:
    width = settings.candidate("favor+").width
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        attention = module.FastAttention(settings.head_dim, nb_features=width, causal=settings.causal)

    def call(inputs: Inputs) -> Ready:
        q, k, v = leaves = inputs.tensors
        # An epsilon in every feature makes it another kernel: it is judged by its own.
        return Ready(lambda: attention(q, k, v), leaves)

    def own(inputs: Inputs) -> Tensor:
        """Its features, read by the quadratic form."""
        matrix = attention.projection_matrix.double()
        q = module.softmax_kernel(inputs.query, projection_matrix=matrix, is_query=True)
        k = module.softmax_kernel(inputs.key, projection_matrix=matrix, is_query=False)
        weights = q @ k.transpose(-1, -2)
        weights = weights.tril() if settings.causal else weights
        total = weights.sum(-1, keepdim=True)
        if settings.causal:  # its causal form adds an epsilon to every sum of keys
            total = total + 1e-6 * q.sum(-1, keepdim=True)
        output: Tensor = weights @ inputs.value / total
        return output

    return _contender(settings, peer, call, reference=own)


def _fla(
    function: str, order: str, multiple: int = 1, scaled: bool = False, heads_first: bool = False
) -> Make:
    """A naive form of flash-linear-attention: plain PyTorch, all of it that runs without a GPU.

    Args:
        function: its name. order: of arguments, q k v b (beta) g (log decay). multiple: of tokens.
        scaled: it divides by sqrt(d) itself; the others are told scale 1. heads_first: (B, H, N, d).
    """

    def make(settings: Settings, module: Any, peer: Peer) -> Contender:
        run = getattr(module, function)
        options = {} if scaled else {"scale": 1.0}

        def call(inputs: Inputs) -> Ready:
            if inputs.query.shape[2] % multiple:
                raise UnsupportedError(f"takes multiples of {multiple} tokens only")
            leaves = inputs.tensors if heads_first else _transposed(inputs)
            named = dict(zip(_letters(inputs), leaves, strict=True))
            arguments = [named[letter] for letter in order]
            scale = settings.head_dim**-0.5 if scaled else 1.0
            return Ready(lambda: run(*arguments, **options)[0], leaves, not heads_first, scale)

        return _contender(settings, peer, call)

    return make


def _transformers(settings: Settings, module: Any, peer: Peer) -> Contender:
    # Where fla-core is installed, its GPU kernel is wrapped around the fallback, and fails on a CPU.
    fallback = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def call(inputs: Inputs) -> Ready:
        q, k, v, beta, gate = leaves = _transposed(inputs)

        def run() -> Tensor:
            output: Tensor = fallback(q, k, v, g=gate, beta=beta)[0]
            return output

        return Ready(run, leaves, transposed=True, scale=settings.head_dim**-0.5)

    return _contender(settings, peer, call)


def _opengdn(settings: Settings, module: Any, peer: Peer) -> Contender:
    def call(inputs: Inputs) -> Ready:
        q, k, v, beta, gate = leaves = _transposed(inputs)

        def run() -> Tensor:
            output: Tensor = module.gated_delta_chunkwise(q, k, v, gate.exp(), beta)[0]
            return output

        return Ready(run, leaves, transposed=True)

    return _contender(settings, peer, call)


def _letters(inputs: Inputs) -> str:
    return "qkv" + ("b" if inputs.beta is not None else "") + ("g" if inputs.log_decay is not None else "")


def _contender(
    settings: Settings,
    peer: Peer,
    call: Callable[[Inputs], Ready],
    reference: Callable[[Inputs], Tensor] | None = None,
) -> Contender:
    features = settings.feature_map(peer.problem.map).feature_dim
    return Contender(
        peer.name, "peer", peer.problem, features, call,
        reference=reference, directions=TRAINED, exact=False,
    )  # fmt: skip


_GDN = Problem("identity", "gated-delta")
_NEEDS_TRITON = "pip install fla-core triton einops transformers"

PEERS = (
    Peer(
        "fast-transformers", "pytorch-fast-transformers",
        ("fast_transformers.attention",), Problem("elu+1", "sum"), _fast_transformers,
        "pip install --no-build-isolation pytorch-fast-transformers (compiles for minutes; torch first)",
    ),
    Peer(
        "performer-pytorch", "performer-pytorch",
        ("performer_pytorch.performer_pytorch",), Problem("favor+", "sum"), _performer,
    ),
    Peer(
        "fla-simple-gla", "fla-core", ("fla.ops.simple_gla.naive",), Problem("identity", "decay"),
        _fla("naive_chunk_simple_gla", "qkvg"), _NEEDS_TRITON,
    ),
    Peer(
        "fla-delta", "fla-core", ("fla.ops.delta_rule.naive",), Problem("identity", "delta"),
        _fla("delta_rule_chunkwise", "qkvb", multiple=32, scaled=True, heads_first=True), _NEEDS_TRITON,
    ),
    Peer(
        "fla-gated-delta", "fla-core", ("fla.ops.gated_delta_rule.naive",), _GDN,
        _fla("naive_chunk_gated_delta_rule", "qkvgb"), _NEEDS_TRITON,
    ),
    Peer(
        "fla-kda", "fla-core", ("fla.ops.kda.naive",), Problem("identity", "kda"),
        _fla("naive_chunk_kda", "qkvgb", multiple=64), _NEEDS_TRITON,
    ),
    Peer(
        "transformers", "transformers",
        ("transformers.models.qwen3_next.modeling_qwen3_next",), _GDN, _transformers,
    ),
    Peer("opengdn", "opengdn", ("opengdn",), _GDN, _opengdn),
)  # fmt: skip


def load_peers() -> None:
    """Import every peer that is installed."""
    for peer in PEERS:
        with contextlib.suppress(Exception):
            peer.load()


def peers(settings: Settings) -> tuple[list[Contender], dict[str, str]]:
    """Installed peers that solve one of the problems, and versions of their packages.

    Returns:
        (contenders, peer -> version or why it is missing).

    Raises:
        InputError: an unknown name, or one named that is not installed.
    """
    known = {peer.name: peer for peer in PEERS}
    for name in settings.peers or ():
        if name not in known:
            raise InputError(f"--peers: expected names of {', '.join(known)}, or none; got {name!r}")
    found, about = [], {}
    for peer in PEERS if settings.peers is None else [known[name] for name in settings.peers]:
        if settings.peers is None and peer.problem not in settings.problems:
            continue
        try:
            module = peer.load()
        except Exception as error:  # a package half installed may raise anything
            why = f"not installed ({type(error).__name__}: {error}); {peer.how_to_install()}"
            if settings.peers is not None:
                raise InputError(f"--peers: {peer.name} is {why}") from None
            about[peer.name] = why
            continue
        if not settings.causal and peer.name not in ("fast-transformers", "performer-pytorch"):
            about[peer.name] = "causal only"
            continue
        found.append(peer.make(settings, module, peer))
        about[peer.name] = f"{peer.package} {importlib.metadata.version(peer.package)}"
    return found, about
