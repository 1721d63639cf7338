"""What every figure shares: looks of the maps, error axes that clip, and bytes that repeat."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from ._series import is_random, tick
from .candidates import MEAN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# Okabe and Ito's colours, which stay apart for most kinds of colour blindness; marker and dash say the same
# again for the others.
_RANDOM = {"favor+": "#D55E00", "favor++": "#0072B2", "trig": "#009E73", "landmark": "#000000",
           "codebook": "#8B4513", "generalized-relu": "#CC79A7"}  # fmt: skip
_FIXED = {
    "relu": ("#777777", "v"), "elu+1": ("#E69F00", "^"), "softmax": ("#56B4E9", "s"),
    "taylor": ("#777777", "P"), "relu^2": ("#777777", "<"), "exp": ("#777777", ">"),
    "identity": ("#777777", "X"), "hedgehog": ("#E69F00", "p"), "t2r": ("#56B4E9", "*"),
}  # fmt: skip
WIDTH = 4.8  # inches: 460 CSS pixels, so that 10 pt text is still about 10 px in a 400 px window
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10, "axes.labelsize": 10, "axes.titlesize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False,
    "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 6,
    "svg.hashsalt": "reassoc", "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar sign in somebody's site name is no formula
}  # fmt: skip


class Look(NamedTuple):
    """Colour, marker, line and marker filling of one map, the same in every figure."""

    color: str
    marker: Any
    dash: Any
    face: str


def look(name: str) -> Look:
    """The look of a map: colour by its kind, dashes and hollow markers for what is not calibrated."""
    base, *options = name.split(":")
    if base in _RANDOM:
        color = _RANDOM[base]
        tuned = "calibrated" in options or base in ("generalized-relu", "landmark", "codebook")
        dash: Any = "-" if tuned else (0, (5, 2))
        if "iid" in options:
            dash = (0, (1, 1.2)) if tuned else (0, (5, 1, 1, 1))
        return Look(color, "D" if "hyperbolic" in options else "o", dash, color if tuned else "white")
    if base.startswith("dpfp-") and base[5:].isdecimal():
        return Look("#E69F00", (min(int(base[5:]), 9) + 3, 1, 0), "-", "#E69F00")
    color, marker = _FIXED.get(base, ("#777777", "h"))
    return Look(color, marker, "-", color)


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Draw with these settings whatever the user's matplotlibrc says, and leave those as they were."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with settings():
            return draw(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """The settings of all figures, for drawing and for saving."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # Site names may be in any script; a box for a letter is better than no figure.
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


def new_figure(height: float) -> Figure:
    """An empty figure of the common width; no pyplot, so no window and no global list of figures."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def save(figure: Figure, kind: str) -> bytes:
    """The figure as ``"png"`` or ``"svg"``; no date and no version, so equal figures give equal bytes."""
    buffer = io.BytesIO()
    nothing: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with settings():
        figure.savefig(buffer, format=kind, dpi=150, metadata=nothing)
    return buffer.getvalue()


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG file as an element of a page: no header, every id made unique, scaled by the page.

    Args:
        svg: as :func:`save` gives it. prefix: put before each id. label: already escaped, read aloud.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}", svg)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    return f'<svg {box[0] if box else ""} role="img" aria-label="{label}">{rest.strip()}'


def log_axis(
    axes: Axes,
    which: str,
    low: float,
    high: float,
    at: Sequence[float] = (),
    write: Callable[[float], str] = tick,
) -> None:
    """Make ``"x"`` or ``"y"`` logarithmic from low to high, labelled at round numbers or where told."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    axis = getattr(axes, f"{which}axis")
    fine = high / low < 200
    axis.set_major_locator(
        FixedLocator(at)
        if len(at)
        else LogLocator(10, (1, 2, 5) if fine else (1,), numticks=12 if fine else 7)
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


@dataclass
class ErrorAxis:
    """Limits of a logarithmic axis of errors; what lies beyond it is named, not squashed into view."""

    low: float
    high: float
    beyond: dict[str, list[float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @classmethod
    def around(cls, values: Iterable[float], *, target: float, baseline: float = math.nan) -> ErrorAxis:
        """From below the target and the least error up to a few times "as bad as an output of zeros"."""
        finite = [v for v in values if math.isfinite(v) and v > 0]
        least = min(finite, default=1.0)
        usual = max(1.0, least, baseline if math.isfinite(baseline) else 0.0)
        return cls(max(0.7 * min(target, least), usual * 1e-6), 2.5 * usual)

    def inside(self, value: float, name: str) -> float | None:
        """The value if the axis shows it; otherwise it is noted under the name and ``None`` comes back."""
        if value != value:
            if name not in self.missing:
                self.missing.append(name)
            return None
        if value > self.high:
            self.beyond.setdefault(name, []).append(value)
            return None
        return max(value, self.low)

    def note(self) -> str:
        """A line for each map with something beyond the axis or without a number."""
        lines = []
        for name, values in self.beyond.items():
            ends = dict.fromkeys(
                "∞" if math.isinf(v) else tick(float(f"{v:.2g}")) for v in (min(values), max(values))
            )
            lines.append(f"▲ beyond the axis: {name} {' to '.join(ends)}")
        lines += [f"no number: {name}" for name in self.missing]
        return "\n".join(lines[:4] + ([f"… and {len(lines) - 4} more"] if len(lines) > 4 else []))


def legend(figure: Figure, handles: list[Any], columns: int = 2) -> None:
    """One legend under the axes, where it hides no data."""
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6, columnspacing=1.4
    )


def map_handle(name: str, label: str | None = None) -> Any:
    """Legend entry of a map: line and marker if it has widths, a marker alone otherwise."""
    from matplotlib.lines import Line2D

    color, marker, dash, face = look(name)
    line: Any = dash if is_random(name) else "none"
    return Line2D(
        [], [], color=color, marker=marker, linestyle=line, markerfacecolor=face, label=label or name
    )


def rule_handle(kind: str, label: str) -> Any:
    """Legend entry of a reference line: ``"target"``, ``"mean"`` or ``"zero"``, see :data:`RULES`."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **RULES[kind])


RULES: dict[str, dict[str, Any]] = {
    "target": {"color": "#000000", "linestyle": "-", "linewidth": 1.4},
    MEAN: {"color": "#555555", "linestyle": (0, (1, 1.5)), "linewidth": 1.6},
    "other": {"color": "#999999", "linestyle": (0, (6, 3)), "linewidth": 1.2},
}
