"""From samples to what is printed first: who is how many times faster, and from which length on."""

from __future__ import annotations

import math
from typing import Any

from .._series import quartiles
from .contenders import Contender
from .settings import Settings

Row = dict[str, Any]
MEASURED, WRONG, SKIPPED = "measured", "wrong", "skipped"


def opponents(mine: Contender, contenders: list[Contender]) -> list[Contender]:
    """Whom one of ours is compared with: softmax, and everyone else who solves the same problem."""
    if mine.kind != "ours":
        return []
    index = contenders.index(mine)
    return [
        other
        for place, other in enumerate(contenders)
        if other.kind == "softmax"
        or (other.problem == mine.problem and (other.kind != "ours" or place > index))
    ]


def ratios(rows: list[Row], contenders: list[Contender], settings: Settings) -> list[Row]:
    """A row for each of ours, opponent, direction and length: the other's time divided by ours.

    Above 1 ours is faster. Each round gives one ratio, of two calls moments apart; quartiles are over
    rounds. Where either has no valid time, ``ratio`` is ``None`` and ``reason`` says why.
    """
    by = {(row["contender"], row["direction"], row["length"]): row for row in rows}
    found = []
    for direction in settings.directions:
        for mine in contenders:
            for other in opponents(mine, contenders):
                for length in settings.lengths:
                    pair = [by.get((c.name, direction, length)) for c in (mine, other)]
                    if pair[0] is not None and pair[1] is not None:
                        about: Row = {
                            "direction": direction, "ours": mine.name, "other": other.name, "length": length
                        }  # fmt: skip
                        found.append(about | _ratio(pair[0], pair[1]))
    return found


def _ratio(mine: Row, other: Row) -> Row:
    for row in (mine, other):
        if row["status"] != MEASURED:
            reason = f"{row['contender']}: {row['reason']}"
            return {"ratio": None, "lower": None, "upper": None, "status": row["status"], "reason": reason}
    each = [b / a for a, b in zip(mine["samples"], other["samples"], strict=True)]
    middle = quartiles(each)
    assert middle is not None
    return {"ratio": middle[1], "lower": middle[0], "upper": middle[2], "status": MEASURED, "reason": ""}


def crossovers(found: list[Row]) -> list[Row]:
    """For each of ours, opponent and direction: the length from which ours is never slower.

    ``tokens`` is interpolated, log ratio against log length, between the two measured lengths around it;
    ``None`` with ``bound`` "below" (the shortest length measured), or "beyond" (not even at the longest).
    """
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in found:
        if row["ratio"] is not None:
            key = (row["direction"], row["ours"], row["other"])
            lines.setdefault(key, []).append((row["length"], row["ratio"]))
    result = []
    for (direction, mine, other), points in lines.items():
        points.sort()
        about: Row = {"direction": direction, "ours": mine, "other": other}
        about |= {"shortest": points[0][0], "longest": points[-1][0]}
        result.append(about | _crossover(points))
    return result


def _crossover(points: list[tuple[int, float]]) -> Row:
    slower = [index for index, (_, ratio) in enumerate(points) if ratio < 1]
    if not slower:
        return {"tokens": None, "bound": "below"}
    last = slower[-1]
    if last == len(points) - 1:
        return {"tokens": None, "bound": "beyond"}
    (n0, r0), (n1, r1) = points[last], points[last + 1]
    share = -math.log(r0) / (math.log(r1) - math.log(r0))
    return {"tokens": n0 * (n1 / n0) ** share, "bound": "between"}


def crossover_text(row: Row) -> str:
    """In a few words."""
    if row["bound"] == "below":
        return f"at every length measured (from {row['shortest']:,})"
    if row["bound"] == "beyond":
        return f"not up to {row['longest']:,}"
    about = float(f"{row['tokens']:.2g}")
    return f"from about {about:,.0f} (interpolated)"
