"""Losses that Schlag et al. 2021 published for their synthetic retrieval, to draw beside ours.

Source: the loss of the last evaluation in each log that comes with the paper's code,
github.com/ischlag/fast-weight-transformers, folder synthetic/logs, to three digits: one run each, key size
64, trained as in :mod:`.train`. "Linear" there is ELU+1 here; FAVOR+ with m projections has 2m features;
the update rule "ours" is the delta rule. (Their numbers for a delta rule with FAVOR+ are no numbers from 40
pairs on, and are left out.)
"""

from __future__ import annotations

import math

PUBLISHED_DIM = 64  # size of keys
_STEP = 20  # between numbers of pairs, from the first
# Setting -> case -> loss at 20, 40, 60, ... pairs.
_LOSSES: dict[int, dict[str, tuple[float, ...]]] = {
    1: {
        "dpfp-1": (
            0.000783, 0.000274, 0.000429, 0.000167, 0.000209, 0.00862, 0.0532, 0.102, 0.143,
            0.175, 0.212, 0.23, 0.272, 0.284, 0.288, 0.277, 0.347, 0.339, 0.338, 0.346, 0.329,
            0.343, 0.367, 0.371, 0.389, 0.397, 0.403, 0.399, 0.392, 0.418,
        ),
        "dpfp-2": (
            0.000305, 0.000633, 0.000969, 0.000601, 0.000503, 0.000291, 0.000514, 0.000384,
            0.000284, 0.000366, 0.000733, 0.000513, 0.00968, 0.0456, 0.0681, 0.106, 0.13, 0.16,
            0.149, 0.166, 0.166, 0.209, 0.217, 0.24, 0.281, 0.253, 0.279, 0.295, 0.259, 0.326,
        ),
        "dpfp-3": (
            0.000481, 0.000868, 0.00049, 0.000745, 0.000475, 0.000501, 0.000861, 0.000248,
            0.000413, 0.000882, 0.000286, 0.000523, 0.000395, 0.000875, 0.000254, 0.000629,
            7.17e-05, 0.00446, 0.00877, 0.0361, 0.0526, 0.0504, 0.0962, 0.109, 0.172, 0.135,
            0.17, 0.179, 0.169, 0.201,
        ),
        "favor+:features=128": (0.13, 0.298, 0.493, 0.5, 0.5, *(0.5,) * 25),
        "favor+:features=256": (0.0797, 0.21, 0.485, 0.5, 0.5, *(0.5,) * 25),
        "favor+:features=1024": (0.0453, 0.0762, 0.409, 0.5, 0.5, *(0.5,) * 25),
        "elu+1": (
            0.000889, 0.000829, 0.0246, 0.11, 0.172, 0.232, 0.272, 0.301, 0.323, 0.343, 0.355,
            0.366, 0.38, 0.391, 0.4, 0.398, 0.411, 0.421, 0.401, 0.422, 0.422, 0.427, 0.436,
            0.433, 0.434, 0.448, 0.443, 0.448, 0.441, 0.452,
        ),
        "softmax": (
            0.000634, 0.000324, 7.22e-05, 3.02e-05, 2.01e-05, 1.08e-05, 6.99e-06, 5.73e-06,
            6.16e-06, 8.6e-06, 0.000126, 0.000423, 4.07e-06, 2.28e-06, 5.46e-06, 4.27e-06,
            2.88e-06, 0.0268, 2.9e-06, 2.8e-06, 3.11e-06, 2.14e-06, 0.00893, 4.52e-06, 0.174,
            0.00893, 0.0446, 0.0357, 0.0313, 0.0536,
        ),
    },
    2: {
        "dpfp-1:delta": (
            0.000766, 0.00097, 0.00609, 0.0106, 8.62e-05, 0.0183, 0.0493, 0.114, 0.138, 0.185,
        ),
        "dpfp-1": (
            0.105, 0.114, 0.123, 0.119, 0.117, 0.133, 0.157, 0.183, 0.21, 0.239,
        ),
        "dpfp-2:delta": (
            0.000969, 0.000525, 0.000487, 0.000805, 0.0854, 0.000732, 0.000294, 0.0004,
            0.000404, 0.000836,
        ),
        "elu+1:delta": (
            0.000796, 0.000685, 0.000511, 0.101, 0.161, 0.223, 0.264, 0.291, 0.322, 0.342,
        ),
    },
}  # fmt: skip


def published(setting: int, case: str, pairs: int) -> float:
    """The published loss, NaN where there is none."""
    place, rest = divmod(pairs, _STEP)
    found = _LOSSES[setting].get(case, ())
    return found[place - 1] if not rest and 1 <= place <= len(found) else math.nan
