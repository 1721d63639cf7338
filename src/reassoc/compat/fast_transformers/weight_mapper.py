"""State dicts of other encoders under the names used here: torch's, BERT's, Longformer's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

Items = list[tuple[str, Tensor]]


class MappingRule:
    """Says which entries of a state dict it is for, and what becomes of them."""

    def matches(self, key: str) -> bool:
        """Whether the rule is for this entry."""
        raise NotImplementedError(f"{type(self).__name__} must define matches(key)")

    def apply(self, key: str, value: Tensor) -> Items:
        """The entries that take its place."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(key, value)")


class IdentityRule(MappingRule):
    """Every entry, as it is."""

    def matches(self, key: str) -> bool:
        """Always."""
        return True

    def apply(self, key: str, value: Tensor) -> Items:
        """Unchanged."""
        return [(key, value)]


class NotRule(IdentityRule):
    """Entries that ``rule`` is not for, as they are."""

    def __init__(self, rule: MappingRule) -> None:
        self.rule = rule

    def matches(self, key: str) -> bool:
        """Whether the other rule does not."""
        return not self.rule.matches(key)


class OrRule(MappingRule):
    """Entries that any of ``rules`` is for; those that are apply one after the other."""

    def __init__(self, *rules: MappingRule) -> None:
        self.rules = rules

    def matches(self, key: str) -> bool:
        """Whether any does."""
        return any(rule.matches(key) for rule in self.rules)

    def apply(self, key: str, value: Tensor) -> Items:
        """What they make of it."""
        items = [(key, value)]
        for rule in self.rules:
            items = [new for k, v in items for new in (rule.apply(k, v) if rule.matches(k) else [(k, v)])]
        return items


class RegexRule(MappingRule):
    """Entries with ``search`` in their name, which is replaced as by ``re.sub``."""

    def __init__(self, search: str, replace: str | Callable[[re.Match[str]], str]) -> None:
        self.pattern, self.replace = re.compile(search), replace

    def matches(self, key: str) -> bool:
        """Whether the pattern occurs."""
        return self.pattern.search(key) is not None

    def apply(self, key: str, value: Tensor) -> Items:
        """Renamed."""
        return [(self.pattern.sub(self.replace, key), value)]


class PytorchAttentionWeightsRule(MappingRule):
    """The three projections that ``torch.nn.MultiheadAttention`` keeps in one."""

    def matches(self, key: str) -> bool:
        """Whether it is such a weight or bias."""
        return "self_attn.in_proj_" in key

    def apply(self, key: str, value: Tensor) -> Items:
        """Query, key and value projection, a third each."""
        names = (f"attention.{role}_projection." for role in ("query", "key", "value"))
        parts = value.chunk(3)
        return [
            (key.replace("self_attn.in_proj_", name), part) for name, part in zip(names, parts, strict=True)
        ]


class SimpleMapper:
    """Applies the first rule that matches to each entry; entries that none matches are left out.

    Args:
        rules: in order. add_identity: keep the entries that none of them matches.
    """

    def __init__(self, rules: Sequence[MappingRule] = (), add_identity: bool = True) -> None:
        self._rules = [*rules, *([IdentityRule()] if add_identity else [])]

    def map(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new state dict; tensors are shared."""
        new: dict[str, Tensor] = {}
        for key, value in state_dict.items():
            rule = next((rule for rule in self._rules if rule.matches(key)), None)
            new.update(rule.apply(key, value) if rule else ())
        return new

    @classmethod
    def load_file(
        cls,
        filepath: str | PathLike[str],
        model_root: str | None = None,
        map_location: Any = None,
        **other_args: Any,
    ) -> Any:
        """What ``torch.load`` finds, mapped; with ``model_root``, the entry of that name is.

        Only tensors and plain containers are read (``weights_only=True``).
        """
        state = torch.load(filepath, map_location=map_location, weights_only=True, **other_args)
        if model_root is None:
            return cls().map(state)
        state[model_root] = cls().map(state[model_root])
        return state


class PytorchMapper(SimpleMapper):
    """For ``torch.nn.TransformerEncoder``."""

    def __init__(self) -> None:
        rules = [
            PytorchAttentionWeightsRule(),
            RegexRule(
                r"layers\.(\d+)\.self_attn\.([a-z]+)_proj(ection)?\.", r"layers.\1.attention.\2_projection."
            ),
            NotRule(RegexRule(r"\.softmax_temp$", "")),
        ]
        super().__init__(rules, add_identity=False)


def _bert_rules() -> list[MappingRule]:
    at, layer = r"layer\.(\d+)\.", r"layers.\1."
    return [
        RegexRule(at + r"attention\.self\.(query|key|value)(?!_global)", layer + r"attention.\2_projection"),
        RegexRule(at + r"attention\.output\.dense", layer + "attention.out_projection"),
        RegexRule(at + r"attention\.output\.LayerNorm", layer + "norm1"),
        RegexRule(at + r"intermediate\.dense", layer + "linear1"),
        RegexRule(at + r"output\.dense", layer + "linear2"),
        RegexRule(at + r"output\.LayerNorm", layer + "norm2"),
    ]


class HugginfaceBertEncoderMapper(SimpleMapper):
    """For the encoder of a BERT model of transformers (the name is the original's)."""

    def __init__(self) -> None:
        super().__init__(_bert_rules())


class LongformerMapper(SimpleMapper):
    """For Longformer; projections of its global attention are left out."""

    def __init__(self) -> None:
        glob = RegexRule(r"layer\.(\d+)\.attention\.self\.(query|key|value)_global", "")
        super().__init__([*_bert_rules(), NotRule(glob)], add_identity=False)
