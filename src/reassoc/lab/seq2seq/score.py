"""How good translations are: exact matches and BLEU."""

from __future__ import annotations

from typing import Any

from ..._errors import InputError


def exact_match(found: list[str], wanted: list[str]) -> float:
    """The share of texts that are right in every character."""
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


class Bleu:
    """BLEU of a corpus, 0 to 100, by sacrebleu (Post 2018), so that scores compare across papers.

    Args:
        tokenize: sacrebleu's name of a tokenization.

    Raises:
        InputError: sacrebleu is missing, or does not know the tokenization.
    """

    def __init__(self, tokenize: str) -> None:
        try:
            from sacrebleu.metrics.bleu import BLEU
        except ImportError:
            raise InputError("BLEU needs sacrebleu: run pip install 'reassoc[lab]'") from None
        # The others download models or need further packages.
        known = ("13a", "char", "intl", "none", "zh")
        if tokenize not in known:
            raise InputError(f"--tokenize: expected one of {', '.join(known)}, got {tokenize!r}")
        self._metric: Any = BLEU(tokenize=tokenize)

    def __call__(self, found: list[str], wanted: list[str]) -> float:
        """The score of the texts against one reference each."""
        return float(self._metric.corpus_score(found, [wanted]).score)

    @property
    def signature(self) -> str:
        """What a reader needs to get the same score; known once there is one."""
        return str(self._metric.get_signature())
