"""Layers one after another: as they are, or reversible, which keep no activations for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

Routes = Mapping[str, Sequence[tuple[bool, bool]]]
Arguments = tuple[dict[str, Any], dict[str, Any]]  # of both functions of a layer


def route_args(router: Routes, args: Mapping[str, Any], depth: int) -> list[Arguments]:
    """Which of ``args`` each function of each layer gets; those that no route names are left out."""
    routed: list[Arguments] = [({}, {}) for _ in range(depth)]
    for name in args.keys() & router.keys():
        for layer, wanted in zip(routed, router[name], strict=True):
            for mine, goes in zip(layer, wanted, strict=True):
                if goes:
                    mine[name] = args[name]
    return routed


class SequentialSequence(nn.Module):
    """``x = x + f(x)``, then ``x = x + g(x)``, for each layer.

    Args:
        layers: pairs (f, g). args_route: for each keyword argument, which functions of each layer get it.

    Raises:
        ValueError: a route of another depth.
    """

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.args_route = _checked(args_route, len(layers))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        routed = route_args(self.args_route, kwargs, len(self.layers))
        for layer, arguments in zip(self.layers, routed, strict=True):
            for function, mine in zip(layer, arguments, strict=True):  # type: ignore[call-overload]
                x = x + function(x, **mine)
        return x


class Deterministic(nn.Module):
    """A module that can be run again with the random numbers of an earlier run."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._random: Any = None

    def forward(self, x: Tensor, *, record: bool = False, repeat: bool = False, **kwargs: Any) -> Tensor:
        """The module's output; ``record`` notes the random state before, ``repeat`` goes back to it."""
        if record:
            self._random = torch.get_rng_state(), get_device_states(x)
        if not repeat:
            out: Tensor = self.net(x, **kwargs)
            return out
        cpu, (devices, states) = self._random
        with torch.random.fork_rng(devices):
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            again: Tensor = self.net(x, **kwargs)
            return again


class ReversibleBlock(nn.Module):
    """``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``: what went in can be had back from what came out.

    Source: Gomez et al. 2017, equations 6 and 7.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = Deterministic(f)
        self.g = Deterministic(g)


class ReversibleSequence(nn.Module):
    """Reversible blocks on two copies of the input, summed at the end.

    Args:
        blocks: pairs (f, g). args_route: as for :class:`SequentialSequence`.
    """

    def __init__(self, blocks: Iterable[Any], args_route: Routes | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReversibleBlock(f, g) for f, g in blocks])
        self.args_route = _checked(args_route, len(self.blocks))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``(B, N, dim) -> (B, N, dim)``."""
        routed = route_args(self.args_route, kwargs, len(self.blocks))
        shared = [t for t in kwargs.values() if isinstance(t, Tensor) and t.requires_grad]
        weights = [p for p in self.parameters() if p.requires_grad]
        y1, y2 = _Reversible.apply(list(self.blocks), routed, len(shared), x, *shared, *weights)  # type: ignore[no-untyped-call]
        out: Tensor = y1 + y2
        return out


class _Reversible(torch.autograd.Function):
    """The blocks as one function of the input, of arguments with a gradient, and of the parameters."""

    @staticmethod
    def forward(
        ctx: Any, blocks: list[ReversibleBlock], routed: list[Arguments], count: int, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        record = any(ctx.needs_input_grad)
        first, second = x, x
        for block, (to_f, to_g) in zip(blocks, routed, strict=True):
            first = first + block.f(second, record=record, **to_f)
            second = second + block.g(first, record=record, **to_g)
        ctx.blocks, ctx.routed = blocks, routed
        ctx.shared, ctx.weights = rest[:count], rest[count:]
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_first: Tensor, d_second: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        leaves = [*ctx.shared, *ctx.weights]
        found: dict[int, Tensor] = {}

        def again(function: Deterministic, x: Tensor, d_out: Tensor, arguments: dict[str, Any]) -> Any:
            """The output once more, and the gradient of x; the others are added to ``found``."""
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                # Stand-ins, so that the gradient stops at an argument and does not go on into what made it.
                local = {id(t): t.detach().requires_grad_() for t in ctx.shared}
                out = function(x, repeat=True, **{n: local.get(id(t), t) for n, t in arguments.items()})
                mine = [p for p in function.parameters() if p.requires_grad]
                inputs = [x, *local.values(), *mine]
                grads = torch.autograd.grad(out, inputs, d_out, allow_unused=True)
            for key, grad in zip([*local, *map(id, mine)], grads[1:], strict=True):
                if grad is not None:
                    found[key] = found[key] + grad if key in found else grad
            return out.detach(), 0 if grads[0] is None else grads[0]

        for block, (to_f, to_g) in zip(reversed(ctx.blocks), reversed(ctx.routed), strict=True):
            out, d_x = again(block.g, first, d_second, to_g)
            second, d_first = second - out, d_first + d_x
            out, d_x = again(block.f, second, d_first, to_f)
            first, d_second = first - out, d_second + d_x
        return None, None, None, d_first + d_second, *(found.get(id(t)) for t in leaves)


def _checked(route: Routes | None, depth: int) -> Routes:
    for name, layers in (route or {}).items():
        if len(layers) != depth:
            raise ValueError(f"args_route[{name!r}] must name {depth} layers, got {len(layers)}")
    return route or {}
