"""The page in a real browser prints the library's numbers, for every preset, map, query and prefix."""

import json
import math
import warnings
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import torch
from explorer_browser import QUIET, assert_printed, parsed

from reassoc import attention_matrix, feature_maps, linear_attention, read
from reassoc.explorer.panels import PANELS, answer
from reassoc.explorer.presets import PRESETS

CASES = {
    case["name"]: case["expect"]
    for case in json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]
}
MAPS = {
    "identity": ("identity", {}), "elu+1": ("elu+1", {}), "relu": ("relu", {}),
    "dpfp-1": ("dpfp", {"nu": "1"}), "dpfp-2": ("dpfp", {"nu": "2"}), "dpfp-3": ("dpfp", {"nu": "3"}),
    "trig": ("trig", {"m": "4", "seed": "0"}), "favor+": ("favor+", {"m": "7", "seed": "3"}),
}  # fmt: skip
SLIDERS = {control.name: control.values for control in PANELS["reassociation"].controls}

# Goes through every query and prefix as a visitor does, and reads the three tables back.
COLLECT = f"""async () => {{
  {QUIET}
  const read = (cell) => ({{
    value: cell.querySelector("data")?.value ?? null, text: cell.querySelector("data")?.textContent ?? null,
    ins: cell.querySelector("ins")?.textContent ?? null,
    bars: cell.querySelector("svg[role=img]")?.getAttribute("aria-label") ?? null,
    raw: cell.textContent, look: cell.className }});
  const rows = (id) => [...document.querySelectorAll(`#${{id}} tbody tr`)]
  .map((row) => ({{ look: row.className, cells: [...row.cells].map(read) }}));
  await quiet();
  const slider = document.getElementById("prefix"), seen = [];
  for (let query = 0; query < document.querySelectorAll("#queries input").length; query++) {{
    document.querySelectorAll("#queries input")[query].click();
    for (let prefix = 0; prefix <= Number(slider.max); prefix++) {{
      slider.value = prefix;
      slider.dispatchEvent(new Event("input"));
      seen.push({{ query, prefix, rescan: rows("rescan"), running: rows("running"),
        cards: [...document.querySelectorAll("#results .card")]
        .map((card) => [card.querySelector(".number").textContent,
          card.querySelector("data")?.value ?? null, card.querySelector(".small").textContent]),
        reason: document.querySelector("#results .unavailable")?.textContent ?? null }});
    }}
  }}
  return seen;
}}"""


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def library_map(name, size):
    """The map, and what it warned of."""
    kind, options = MAPS[name]
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        if "m" not in options:
            phi = feature_maps.make(name, size)
        else:
            phi = feature_maps.make(kind, size, num_features=int(options["m"]), seed=int(options["seed"]))
    return phi.double(), " ".join(str(note.message) for note in notes)


def cell_is(cell, want, digits=6, noise=0.0, what=""):
    """Printed text and exact value of one cell."""
    want = [float(x) for x in torch.as_tensor(want).flatten().tolist()]
    if cell["bars"] is not None:
        assert_printed(cell["bars"], want, digits, noise, what)
        return
    assert_printed(cell["text"], want, digits, noise, what)
    exact = [float(x) for x in cell["value"].split(" ")]
    for got, number in zip(exact, want, strict=True):
        assert got == pytest.approx(number, rel=1e-8, abs=2 * noise + 1e-300, nan_ok=True), what


@pytest.mark.parametrize("name", MAPS)
def test_every_preset_query_and_prefix(visit, name):
    kind, options = MAPS[name]
    page = visit()
    for preset, start in PRESETS.items():
        page.locator("#c-preset").select_option(preset)
        page.locator("#c-map").select_option(kind)
        for control, value in options.items():
            page.locator(f"#c-{control}").fill(str(SLIDERS[control].index(value)))
        seen = page.evaluate(COLLECT)
        q, k, v = tensor(start.query), tensor(start.key), tensor(start.value)
        assert len(seen) == len(start.query) * (len(start.key) + 1)
        phi, notes = library_map(name, q.shape[-1])
        assert page.locator("#map-notes").inner_text() == notes
        assert page.locator("#preset-note").inner_text() == start.note
        features, keys = phi.query(q)[0, 0], phi.key(k)[0, 0]
        sizes = (features[:, None] * keys[None]).abs().sum(-1)  # what rounding is measured by
        scores = attention_matrix(q, k, phi, normalize="none")[0, 0]
        for state in seen:
            i, count = state["query"], state["prefix"]
            what = f"{preset}, query {i}, prefix {count}"
            seen_keys, seen_values = k[:, :, :count], v[:, :, :count]
            output, memory = linear_attention(q, seen_keys, seen_values, phi, return_state=True)
            weights = attention_matrix(q, seen_keys, phi)[0, 0, i]
            scale = torch.ones(1) if memory.log_scale is None else memory.log_scale[0, 0].exp()
            z, S = memory.z[0, 0] * scale, memory.S[0, 0] * scale[:, None]
            rescanned(state, i, count, k, v, keys, scores, weights, sizes, what)
            for row, feature, s, norm in zip(state["running"], features[i], S, z, strict=False):
                cell_is(row["cells"][1], feature, what=f"{what}, φ(q)")
                for cell, number in zip(row["cells"][2:], [*s, norm], strict=True):
                    cell_is(cell, number, noise=1e-14, what=f"{what}, state")
            grown(state["running"], keys, v[0, 0], count, what)
            numerator, denominator = features[i] @ S, features[i] @ z
            noise = 1e-14 * max(1.0, sizes[i].sum().item())
            for cell, number in zip(
                state["running"][-1]["cells"][1:], [*numerator, denominator], strict=True
            ):
                cell_is(cell, number, noise=noise, what=f"{what}, read of the state")
            results_are(
                state,
                output[0, 0, i],
                read(q, phi, memory)[0, 0, i],
                numerator,
                denominator,
                count,
                noise,
                what,
            )
            if count:
                logits = (q[0, 0, i] @ seen_keys[0, 0].T) / math.sqrt(q.shape[-1])
                cell = {"bars": None, "text": state["cards"][2][0], "value": state["cards"][2][1]}
                cell_is(cell, logits.softmax(-1) @ seen_values[0, 0], what=f"{what}, softmax")
            else:
                assert state["cards"][2][0] == "no key"


def rescanned(state, i, count, k, v, keys, scores, weights, sizes, what):
    """The left side, key by key."""
    rows = state["rescan"]
    assert len(rows) == k.shape[2] + 1
    for j, row in enumerate(rows[:-1]):
        cells = row["cells"]
        cell_is(cells[1], k[0, 0, j], what=what)
        cell_is(cells[2], keys[j], what=f"{what}, φ(k{j + 1})")
        cell_is(cells[3], v[0, 0, j], what=what)
        if j >= count:
            assert row["look"] == "later" and cells[4]["raw"] == "not seen" and cells[5]["raw"] == ""
            continue
        noise = 1e-14 * max(1.0, sizes[i, j].item())
        cell_is(cells[4], scores[i, j], noise=noise, what=f"{what}, score of k{j + 1}")
        cell_is(cells[5], scores[i, j] * v[0, 0, j], noise=noise * 10, what=f"{what}, term of k{j + 1}")
        cell_is(
            cells[6],
            weights[j],
            4,
            noise=1e-12 * float(weights.abs().max().nan_to_num()),
            what=f"{what}, weight of k{j + 1}",
        )
        negative = float(weights[j]) < -1e-15
        assert (row["look"] == "negative") is negative and ("negative" in cells[6]["raw"]) is negative, what
    total = rows[-1]["cells"]
    noise = 1e-13 * max(1.0, sizes[i].sum().item())
    cell_is(total[1], scores[i, :count].sum(), noise=noise, what=f"{what}, denominator")
    cell_is(total[2], scores[i, :count] @ v[0, 0, :count], noise=noise * 10, what=f"{what}, numerator")


def grown(rows, keys, values, count, what):
    """What the last outer product added is marked, to four digits and with its sign; zeros are not."""
    for f, row in enumerate(rows[:-1]):
        added = (
            [*(keys[count - 1, f] * values[count - 1]), keys[count - 1, f]]
            if count
            else [torch.tensor(0.0)] * (len(row["cells"]) - 2)
        )
        for cell, number in zip(row["cells"][2:], added, strict=True):
            if number == 0:
                assert cell["ins"] is None, what
            else:
                assert cell["ins"].startswith("+" if number > 0 else "−"), what
                assert_printed(cell["ins"], [float(number)], 4, what=f"{what}, added")


def results_are(state, output, read_out, numerator, denominator, count, noise, what):
    slow, fast = state["cards"][:2]
    if bool(output.isnan().all()):
        assert slow[0] == fast[0] == "Unavailable" and slow[1] is None
        reason = "no key is visible" if count == 0 else "the denominator φ(q)·z is exactly zero"
        assert reason in state["reason"], what
        for words in ('"nan"NaN', '"zero"0', '"raise"ValueError: undefined result'):
            assert words in state["reason"], what
    else:
        assert state["reason"] is None, what
        # Where weights cancel, an output carries the relative error of its denominator.
        error = noise / abs(float(denominator)) * float(output.abs().max())
        for card, want in ((slow, output), (fast, read_out)):
            cell_is(
                {"bars": None, "text": card[0], "value": card[1]}, want, noise=error, what=f"{what}, output"
            )
    for card in (slow, fast):
        above, below = card[2].split(" / ")
        assert_printed(above, numerator.tolist(), noise=noise * 10, what=f"{what}, card")
        assert_printed(below, [float(denominator)], noise=noise, what=f"{what}, card")


# ---------------------------------------------------------------------------------------------------------
# The worked examples, as a person reads them
# ---------------------------------------------------------------------------------------------------------


def outputs(page):
    return [card.inner_text() for card in page.locator("#results .card .number").all()]


def choose(page, query=None, prefix=None):
    if query is not None:
        page.locator("#queries input").nth(query).check(force=True)
    if prefix is not None:
        page.locator("#prefix").fill(str(prefix))


def test_four_exact_keys(visit):
    page = visit("?preset=exact")
    for i, query in enumerate([(1, 0), (0, 1), (1, 1), (2, -1)]):
        choose(page, query=i)
        want = CASES[f"identity-q{query}"]
        slow, fast, _ = outputs(page)
        assert slow == fast
        assert_printed(slow, [want["output"]])
        small = page.locator("#results .card.fast .small").inner_text()
        assert small == f"{want['numerator']} / {str(want['denominator']).replace('-', '−')}"
        state = [float(data.get_attribute("value")) for data in page.locator("#running td.state data").all()]
        assert state == want["S"]


def test_the_first_key_of_the_general_preset(visit):
    page = visit("?preset=general&map=elu%2B1&prefix=1")
    want = CASES["general-preset-prefix-1-elu"]
    assert outputs(page)[:2] == ["1", "1"] and want["output"] == 1.0
    assert page.locator("#results .card.slow .small").inner_text() == "5 / 5"
    assert page.locator("#prefix-value").inner_text() == "keys 1 to 1 of 4"


def test_all_keys_negative(visit):
    page = visit("?preset=negative&map=relu")
    assert CASES["all-negative-relu"]["output"] is None
    assert outputs(page)[:2] == ["Unavailable", "Unavailable"]
    reason = page.locator("#results .unavailable")
    assert "Unavailable: the denominator φ(q)·z is exactly zero" in reason.inner_text()
    assert [code.inner_text() for code in reason.locator("dt").all()] == ['"nan"', '"zero"', '"raise"']
    nan, zero, refusal = (each.inner_text() for each in reason.locator("dd").all())
    assert (nan, zero) == ("NaN", "0") and refusal.startswith("ValueError: undefined result")
    page.locator("#c-map").select_option("elu+1")
    page.wait_for_selector("#results .unavailable", state="detached")
    for shown in outputs(page)[:2]:
        assert_printed(shown, [CASES["all-negative-elu"]["output"]])


def test_the_running_example_is_causal_attention(visit):
    page = visit("?preset=running&map=elu%2B1")
    for t in range(4):
        choose(page, query=t, prefix=t + 1)
        slow, fast, soft = outputs(page)
        for shown in (slow, fast):
            assert_printed(shown, CASES["elu-causal-normalised"]["outputs"][t])
        assert_printed(soft, CASES["softmax-causal"]["outputs"][t])
        choose(page, prefix=4)
        assert_printed(outputs(page)[1], CASES["elu-full-normalised"]["outputs"][t])


def test_the_arithmetic_of_the_notes(visit):
    page = visit("?n=1024&r=64&e=64")
    rows = page.locator("#cost tbody tr").all()
    cells = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    numbers = [[int(text.replace(",", "")) for text in row[1:3]] for row in cells]
    want = CASES["state-arithmetic"]
    assert numbers[0] == [want["quadratic_scores"], want["linear_passes"]]
    assert numbers[2] == [want["quadratic_scores"], want["state_scalars"]]
    assert numbers[1] == [1024**2 * 128, 2 * 1024 * 64 * 65]
    for row, (slow, fast) in zip(cells, numbers, strict=True):
        assert parsed(row[3].removesuffix(" ×"))[0] == pytest.approx(slow / fast, rel=5e-3)


# ---------------------------------------------------------------------------------------------------------
# The other panels
# ---------------------------------------------------------------------------------------------------------


def answers(panel, query):
    """What the library gives for the parameters of an address."""
    return json.loads(answer(panel, parse_qsl(query)))


def tables(page, panel):
    """The text of every cell, by row; those of closed details too."""
    rows = page.locator(f"#{panel} > .body tbody tr").all()
    return [[cell.text_content() for cell in row.locator("th, td").all()] for row in rows]


def printed(texts, numbers, digits):
    for text, number in zip(texts, numbers, strict=True):
        if number is None:
            assert text == "–"
        else:
            assert_printed(text, [float(number)], digits)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "qnorm=0.5&knorm=2&angle=135&kind=trig&orthogonal=no",
        "qnorm=4&knorm=4&angle=0&kind=optimal&calibrated=yes",
    ],
)
def test_approximation(visit, query):
    page, want = visit(f"?{query}"), answers("approximation", query)
    rows = tables(page, "approximation")
    assert [int(row[0]) for row in rows] == [width["m"] for width in want["widths"]]
    for row, width in zip(rows, want["widths"], strict=True):
        printed(row[1:], (width["mean"], width["deviation"], width["predicted"]), 4)
    assert_printed(page.locator("#approximation data.truth").inner_text(), [want["truth"]])
    at_most = "" if want["exact"] else ", at most"
    assert f"predicted{at_most}" == page.locator("#approximation th[scope=col]").last.text_content()
    drawn = page.locator("#approximation svg g .dot").count()
    assert drawn == len(want["widths"]) * 32  # every draw is a mark, outside the picture too
    everything = [x for width in want["widths"] for x in width["estimates"]]
    outside = sum(not -1 <= float(x) <= 3 for x in everything)
    assert page.locator("#approximation svg .dot.out").count() == outside


@pytest.mark.parametrize(
    "query", ["", "memory=favor%2B&pairs=24&passes=4&beta=0.5&decay=0.8", "memory=identity&pairs=64"]
)
def test_capacity_and_overwriting(visit, query):
    page, want = visit(f"?{query}"), answers("capacity", query)
    rules = ("sum", "delta", "gated delta")
    for row, one in zip(tables(page, "capacity"), want["maps"], strict=True):
        assert row[:2] == [one["name"], str(one["features"])]
        printed(row[2:], [*(one[rule] for rule in rules), one["bound"]], 3)
    want = answers("overwriting", query)
    for row, write in zip(tables(page, "overwriting"), want["writes"], strict=True):
        name, value = row[0].split(" ← ")
        assert name == write["key"] and parsed(value)[0] == write["value"]
        for i, key in enumerate("abc"):
            cells = row[1 + 4 * i : 5 + 4 * i]
            printed(cells[:1], [write["wanted"][key]], 6)
            printed(cells[1:], [write["reads"][rule][key] for rule in rules], 3)


# ---------------------------------------------------------------------------------------------------------
# How a number is printed
# ---------------------------------------------------------------------------------------------------------

PRINTED = {
    "0": "0", "1": "1", "-1.5": "−1.5", "1000": "1000", "999.9999": "1000", "0.0001": "0.0001",
    "0.000099": "9.9 × 10⁻⁵",
    "123.456789": "123.457", "-0.000012345": "−1.234 × 10⁻⁵", "0.1": "0.1", "-0": "0",
}  # fmt: skip


def test_numbers_are_printed_as_people_read_them(visit):
    """Six digits, a power of ten where that is shorter; a minus sign, not a hyphen."""
    page = visit(f"?q=1&k={';'.join(PRINTED)}&v={';'.join('1' for _ in PRINTED)}&map=identity")
    keys = [data.inner_text() for data in page.locator("#rescan td.key data").all()]
    assert keys == list(PRINTED.values())
    page = visit("?q=1000,1000&k=1000,1000&v=1000&map=identity")
    state = [data.inner_text() for data in page.locator("#running td.state data").all()]
    assert state == ["1 × 10⁶", "1 × 10⁶"]
