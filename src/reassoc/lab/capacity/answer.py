"""The answer, in sentences computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .._page import many, number
from ..fidelity import Row
from .run import Results
from .train import SOLVED, STOPS


def answer(results: Results) -> list[str]:
    """What was found, the most important first."""
    found: list[str] = []
    for part in (_held, _softmax, _floor, _published, _delta, _stopped, _closed):
        found += part(results)
    return found


def loss_of(rows: list[Row]) -> float:
    """The mean over seeds; NaN if a seed gave no number."""
    return math.fsum(row["loss"] for row in rows) / len(rows)


def points(results: Results, setting: int) -> dict[str, dict[int, list[Row]]]:
    """Case -> number of pairs, ascending -> rows of all seeds."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in results.runs:
        if row["setting"] == setting:
            found.setdefault(row["case"], {}).setdefault(row["pairs"], []).append(row)
    return {case: dict(sorted(by_pairs.items())) for case, by_pairs in found.items()}


def solved(rows: list[Row]) -> bool:
    """Whether every seed did it."""
    return all(row["loss"] <= SOLVED for row in rows)


def _held(results: Results) -> Iterator[str]:
    """How many pairs each memory held in setting 1."""
    parts, within = [], True
    for case, by_pairs in points(results, 1).items():
        features = next(iter(by_pairs.values()))[0]["features"]
        if features is None:
            continue
        lost = next((count for count, rows in by_pairs.items() if not solved(rows)), None)
        held = max((count for count in by_pairs if lost is None or count < lost), default=None)
        within = within and all(count <= features or not solved(rows) for count, rows in by_pairs.items())
        what = f"held {held:,}" if held is not None else "held none"
        what += " (all tried)" if lost is None else f" and lost {lost:,}"
        parts.append(f"{case} ({features:,} features) {what}")
    if parts:
        if within:
            yield "No memory held more pairs than it has features."
        yield f"Pairs held: {'; '.join(parts)}."


def _softmax(results: Results) -> Iterator[str]:
    by_pairs = points(results, 1).get("softmax", {})
    lost = [f"{count:,}" for count, rows in by_pairs.items() if not solved(rows)]
    if by_pairs and not lost:
        yield f"Softmax attention held every number of pairs tried, up to {max(by_pairs):,}."
    elif by_pairs:
        yield f"Softmax attention, tried up to {max(by_pairs):,} pairs, lost {', '.join(lost)}."


def _floor(results: Results) -> Iterator[str]:
    """How close training comes to what the features allow."""
    ratios = []
    for case, by_pairs in points(results, 1).items():
        for count, rows in by_pairs.items():
            floor, loss = rows[0]["floor"], loss_of(rows)
            if floor and math.isfinite(loss):
                ratios.append((loss / floor, case, count))
    if ratios:
        (low, *_), (high, case, count) = min(ratios), max(ratios)
        yield (
            f"With more pairs than features, at {many(len(ratios), 'point')}, the loss is {low:.2f} to "
            f"{high:.2f} times the floor ½ (1 − r/N) that no memory can pass (most: {case} at {count:,})."
        )


def _published(results: Results) -> Iterator[str]:
    same, others, apart = 0, [], []
    for setting in (1, 2):
        for case, by_pairs in points(results, setting).items():
            for count, rows in by_pairs.items():
                theirs, loss = rows[0]["published"], loss_of(rows)
                if theirs is None or theirs != theirs:
                    continue
                where = (
                    f"setting {setting}, {case}, {count:,} pairs: {number(loss)} here, {number(theirs)} there"
                )
                if (theirs <= SOLVED) == solved(rows):
                    same += 1
                else:
                    others.append(where)
                if not (theirs <= SOLVED and solved(rows)):
                    apart.append((abs(loss - theirs), where))
    if not same and not others:
        return
    text = f"Of {many(same + len(others), 'point')} with a published loss, {same:,} agree on what was solved"
    yield text + (f"; not so {'; '.join(others)}." if others else ".")
    if apart:
        size, where = max(apart)
        yield f"Where it was not solved, the losses differ by {number(size)} at most ({where})."


def _delta(results: Results) -> Iterator[str]:
    """Delta against sum, the same map in setting 2."""
    found = points(results, 2)
    for case, by_pairs in found.items():
        row = next(iter(by_pairs.values()))[0]
        twin = found.get(case.replace(":delta", "", 1), {})
        both = [count for count in by_pairs if count in twin]
        if row["rule"] != "delta" or not both:
            continue
        losses = [(loss_of(by_pairs[count]), loss_of(twin[count])) for count in both]
        better = sum(mine < other for mine, other in losses)
        pairs = ", ".join(
            f"{number(mine)} against {number(other)} at {count:,}"
            for count, (mine, other) in zip(both, losses, strict=True)
        )
        yield (
            f"Where keys come again with new values, the delta rule beats the sum rule at {better} of "
            f"{many(len(both), 'point')} with {row['map']}: loss {pairs} pairs."
        )


def _stopped(results: Results) -> Iterator[str]:
    cut = [row for row in results.runs if row["ended"] == STOPS["limit"]]
    if cut:
        limit = results.manifest["limit"]
        where = "; ".join(f"setting {r['setting']}, {r['case']}, {r['pairs']:,} pairs" for r in cut[:6])
        yield (
            f"{many(len(cut), 'training')} hit the limit of {many(limit, 'step')}, so that the loss might "
            f"have fallen further: {where}{' …' if len(cut) > 6 else ''}."
        )
    elif results.runs:
        yield "No training hit the step limit."


def _closed(results: Results) -> Iterator[str]:
    """What the closed form says where features are independent, for the sum rule and for the delta rule."""
    full = [row for row in results.closed if row["rank"] == row["pairs"]]
    if results.closed and not full:
        least, most = (f(1 - row["rank"] / row["pairs"] for row in results.closed) for f in (min, max))
        yield (
            "Closed form: more keys than independent features in every case, so that no rule can read them "
            f"all; the error is at least 1 − rank / N, {number(least)} to {number(most)}."
        )
    sums = [row["least_error"] for row in full if row["rule"] == "sum"]
    deltas = [row for row in full if row["rule"] == "delta"]
    parts = []
    if sums:
        parts.append(f"the sum rule reads exactly in {_below(sums)}")
    if deltas:
        after = [row["exact_error_passes"] for row in deltas]
        parts.append(f"the delta rule in {_below(after)} after 64 passes of exact writes")
    if parts:
        yield f"Closed form, features of all keys independent: {', '.join(parts)}."
    if sums:
        yield (
            f"Crosstalk leaves the sum rule an error of {number(min(sums))} to {number(max(sums))} there, "
            "however its reads are scaled; 1 is as bad as reading zero."
        )
    if deltas:
        once = [row["error"] for row in deltas]
        yield (
            "One pass of the delta rule with strength 1, features normalized as named, leaves "
            f"{number(min(once))} to {number(max(once))}."
        )


def _below(errors: list[float]) -> str:
    return f"{sum(error <= SOLVED for error in errors)} of {many(len(errors), 'case')}"
