"""Recording what attention layers of a transformers model receive, in place of their attention function.

The attention interface of transformers hands its function the queries and keys after the rotary embedding,
with grouped key heads not repeated: exactly what kernel attention would get. The recording function keeps
them and then answers with the library's own softmax attention, so the model runs as it always does.
"""

import contextlib
import importlib
import secrets
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._beyond import beyond_softmax
from .._errors import InputError
from ._pretrained import quiet_and_offline


class Recorder:
    """Queries, keys and values of the chosen layers, batch after batch.

    Every batch must hold whole sequences of one length, without padding and without a cache.
    """

    def __init__(self, layers: frozenset[int] | None, heads: tuple[int, ...] | None):
        """Choose what is kept.

        **Arguments**

        - `layers`: indices of the layers; None for all.
        - `heads`: indices of key heads, each kept with its group of query heads; None for all.
        """
        self.layers = layers
        self.heads = heads
        self.seen: dict[int, nn.Module] = {}  # every attention layer that ran, wanted or not
        self.causal: dict[int, bool] = {}
        self.scale: dict[int, float] = {}
        self.key_heads: dict[int, tuple[int, ...]] = {}
        self.query_heads: dict[int, tuple[int, ...]] = {}
        # layer -> per sequence: query (H, m, d), key (G, m, d), value (G, m, e)
        self.sequences: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._ran: set[int] = set()

    @property
    def tokens(self) -> int:
        """Tokens recorded so far."""
        rows = next(iter(self.sequences.values()), [])
        return sum(query.shape[1] for query, _, _ in rows)

    def start_batch(self) -> None:
        """Announce the next forward pass."""
        self._ran.clear()

    def record(
        self,
        module: nn.Module,
        query: Tensor,  # (B, H, m, d)
        key: Tensor,  # (B, G, m, d)
        value: Tensor,  # (B, G, m, e)
        mask: Tensor | None,  # (B or 1, H or 1, m, m) bool, True = visible, or float, added to the scores
        scaling: float | None,
        is_causal: bool | None,
    ) -> None:
        """Keep what one layer received; `InputError` for attention that these tensors do not determine."""
        layer = self._layer_of(module)
        if self.layers is not None and layer not in self.layers:
            return
        length = query.shape[2]
        if key.shape[2] != length:
            raise InputError(
                f"layer {layer} reads {key.shape[2]} keys with {length} queries (cross-attention or a "
                "cache); only self-attention can be captured"
            )
        flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = _is_causal(layer, mask, length, bool(flag))
        if length > 1 or layer not in self.causal:  # a single token looks the same both ways
            self.causal[layer] = causal
        self.scale[layer] = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        G, group = key.shape[1], query.shape[1] // key.shape[1]
        kept = tuple(range(G)) if self.heads is None else self.heads
        if kept[-1] >= G:
            raise InputError(f"layer {layer} has no key head {kept[-1]}; choose --heads from 0 to {G - 1}")
        readers = tuple(head * group + i for head in kept for i in range(group))
        self.key_heads[layer], self.query_heads[layer] = kept, readers
        rows = self.sequences.setdefault(layer, [])
        for q, k, v in zip(query[:, readers], key[:, kept], value[:, kept], strict=True):
            rows.append((q.cpu(), k.cpu(), v.cpu()))

    def _layer_of(self, module: nn.Module) -> int:
        layer = next((index for index, other in self.seen.items() if other is module), None)
        if layer is None:
            index = getattr(module, "layer_idx", None)
            layer = index if isinstance(index, int) else len(self.seen)
            if layer in self.seen:
                raise InputError(
                    f"two attention modules are both layer {layer}; only single-tower models work"
                )
            self.seen[layer] = module
        elif layer in self._ran:
            raise InputError(
                f"layer {layer} runs twice in one pass (shared layers), which cannot be captured"
            )
        self._ran.add(layer)
        return layer


@contextlib.contextmanager
def recording(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Send the attention of a transformers model through a recorder for the length of the block.

    The registration is process-wide but under a name of its own, and it is undone, as is the model's setting.
    A model that does not use the attention interface runs unrecorded.
    """
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    softmax = modeling.AttentionInterface._global_mapping["sdpa"]
    build_mask = masking.AttentionMaskInterface._global_mapping["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if (extra := beyond_softmax(kwargs)) is not None:
            raise InputError(
                f"{type(module).__name__} uses {extra}, which an activation file does not hold; capture "
                "from a model with plain softmax attention"
            )
        recorder.record(module, query, key, value, attention_mask, scaling, is_causal)
        out: tuple[Tensor, None] = softmax(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out

    def full_mask(*args: Any, **kwargs: Any) -> Any:
        # Always a written-out mask: it is what tells full from causal from windowed attention.
        return build_mask(
            *args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )

    name = f"reassoc_capture_{secrets.token_hex(4)}"
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configs.values()]
    modeling.AttentionInterface.register(name, attend)
    masking.AttentionMaskInterface.register(name, full_mask)
    try:
        with quiet_and_offline():  # it would warn of a model that ignores it; the caller finds out
            model.set_attn_implementation(name)  # type: ignore[operator]
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        # There is no public way to take a registration back.
        modeling.AttentionInterface._global_mapping.pop(name, None)
        masking.AttentionMaskInterface._global_mapping.pop(name, None)


def _is_causal(layer: int, mask: Tensor | None, length: int, flag: bool) -> bool:
    if mask is None:
        return flag
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~visible if mask.dtype == torch.bool else mask < -1e4
    square = visible[..., :length, :length]
    if mask.ndim == 4 and bool((visible | hidden).all()):
        if bool((square == torch.ones(length, length, dtype=torch.bool).tril()).all()):
            return flag if length == 1 else True
        if bool(square.all()):
            return False
    raise InputError(
        f"layer {layer} masks something else than the future (a window or a bias); with a window, "
        "a --sequence-length that fits into it can be captured"
    )
