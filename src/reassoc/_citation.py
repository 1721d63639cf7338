"""The papers behind what was used, as BibTeX."""

from __future__ import annotations

from torch import nn

from .feature_maps import FeatureMap
from .rules import Decay, Delta, GatedDelta, Sum

_TYPES = {"C": "inproceedings", "J": "article", "A": "misc"}

# key: kind, authors, title, where, year
_PAPERS = {
    "katharopoulos2020": (
        "C", "Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and Fleuret, Fran{\\c{c}}ois",
        "Transformers are {RNN}s: Fast Autoregressive Transformers with Linear Attention", "ICML", 2020,
    ),
    "choromanski2021": (
        "C", "Choromanski, Krzysztof and Likhosherstov, Valerii and Dohan, David and others",
        "Rethinking Attention with Performers", "ICLR", 2021,
    ),
    "likhosherstov2022": (
        "C", "Likhosherstov, Valerii and Choromanski, Krzysztof and Dubey, Avinava and others",
        "Chefs' Random Tables: Non-Trigonometric Random Features", "NeurIPS", 2022,
    ),
    "rahimi2007": (
        "C", "Rahimi, Ali and Recht, Benjamin",
        "Random Features for Large-Scale Kernel Machines", "NeurIPS", 2007,
    ),
    "yu2016": (
        "C", "Yu, Felix X. and Suresh, Ananda Theertha and Choromanski, Krzysztof and others",
        "Orthogonal Random Features", "NeurIPS", 2016,
    ),
    "schlag2021": (
        "C", "Schlag, Imanol and Irie, Kazuki and Schmidhuber, J{\\\"u}rgen",
        "Linear Transformers Are Secretly Fast Weight Programmers", "ICML", 2021,
    ),
    "schmidhuber1992": (
        "J", "Schmidhuber, J{\\\"u}rgen",
        "Learning to Control Fast-Weight Memories: An Alternative to Dynamic Recurrent Networks",
        "Neural Computation", 1992,
    ),
    "shen2021": (
        "C", "Shen, Zhuoran and Zhang, Mingyuan and Zhao, Haiyu and Yi, Shuai and Li, Hongsheng",
        "Efficient Attention: Attention with Linear Complexities", "WACV", 2021,
    ),
    "arora2024": (
        "C", "Arora, Simran and Eyuboglu, Sabri and Zhang, Michael and others",
        "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff", "ICML", 2024,
    ),
    "zhang2024": (
        "C", "Zhang, Michael and Bhatia, Kush and Kumbong, Hermann and R{\\'e}, Christopher",
        "The Hedgehog \\& the Porcupine: Expressive Linear Attentions with Softmax Mimicry", "ICLR", 2024,
    ),
    "lingle2024": (
        "C", "Lingle, Lucas D.", "Transformer-{VQ}: Linear-Time Transformers via Vector Quantization", "ICLR",
        2024,
    ),
    "kasai2021": (
        "C", "Kasai, Jungo and Peng, Hao and Zhang, Yizhe and Yogatama, Dani and others",
        "Finetuning Pretrained Transformers into {RNN}s", "EMNLP", 2021,
    ),
    "sun2023": (
        "A", "Sun, Yutao and Dong, Li and Huang, Shaohan and Ma, Shuming and others",
        "Retentive Network: A Successor to Transformer for Large Language Models", "arXiv:2307.08621", 2023,
    ),
    "yang2024": (
        "C", "Yang, Songlin and Wang, Bailin and Shen, Yikang and Panda, Rameswar and Kim, Yoon",
        "Gated Linear Attention Transformers with Hardware-Efficient Training", "ICML", 2024,
    ),
    "yang2025": (
        "C", "Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali",
        "Gated Delta Networks: Improving {Mamba2} with Delta Rule", "ICLR", 2025,
    ),
    "dao2024": (
        "C", "Dao, Tri and Gu, Albert",
        "Transformers are {SSM}s: Generalized Models and Efficient Algorithms Through Structured State Space "
        "Duality", "ICML", 2024,
    ),
    "su2024": (
        "J", "Su, Jianlin and Ahmed, Murtadha and Lu, Yu and Pan, Shengfeng and Bo, Wen and Liu, Yunfeng",
        "{RoFormer}: Enhanced Transformer with Rotary Position Embedding", "Neurocomputing", 2024,
    ),
    "so2021": (
        "C", "So, David R. and Ma{\\'n}ke, Wojciech and Liu, Hanxiao and Dai, Zihang and others",
        "Primer: Searching for Efficient Transformers for Language Modeling", "NeurIPS", 2021,
    ),
    "kimi2025": (
        "A", "{Kimi Team}",
        "Kimi Linear: An Expressive, Efficient Attention Architecture", "arXiv:2510.26692", 2025,
    ),
}  # fmt: skip

_KINDS = (Sum, Decay, Delta, GatedDelta)
RULE_PAPERS = {
    "sum": ("katharopoulos2020",),
    "decay": ("sun2023", "yang2024"),
    "delta": ("schlag2021",),
    "gated delta": ("schlag2021", "yang2025", "kimi2025"),
}


def citation(*objects: object) -> str:
    """BibTeX of the papers behind feature maps, rules, or models that contain them.

    Args:
        objects: feature maps, rules (objects or classes), models made of ``reassoc.nn``. None: the paper
            of linear attention itself.

    Returns:
        BibTeX entries, each once.

    Raises:
        TypeError: an object that this library has no paper for.

    Example:
        >>> import reassoc
        >>> print(reassoc.citation(reassoc.feature_maps.DPFP(8, 1)).splitlines()[0])
        @inproceedings{katharopoulos2020,
    """
    keys: dict[str, None] = {"katharopoulos2020": None}
    for thing in objects:
        if isinstance(thing, _KINDS) or thing in _KINDS:
            keys |= dict.fromkeys(RULE_PAPERS[thing.name])
            continue
        found = list(thing.modules()) if isinstance(thing, nn.Module) else []
        papers = [part.papers for part in found if hasattr(part, "papers")]
        if not papers:
            raise TypeError(
                f"citation knows feature maps, rules and models with them, got {type(thing).__name__}"
            )
        for some in papers:
            keys |= dict.fromkeys(some)  # type: ignore[arg-type]
        if any(isinstance(part, FeatureMap) and getattr(part, "orthogonal", False) for part in found):
            keys["yu2016"] = None
    return "\n\n".join(_entry(key) for key in keys)


def _entry(key: str) -> str:
    kind, authors, title, where, year = _PAPERS[key]
    venue = {"C": "booktitle", "J": "journal", "A": "howpublished"}[kind]
    return (
        f"@{_TYPES[kind]}{{{key},\n  author = {{{authors}}},\n  title = {{{title}}},\n"
        f"  {venue} = {{{where}}},\n  year = {{{year}}},\n}}"
    )
