"""The page for everybody: screen readers, dark mode, a phone, and a keyboard alone."""

import itertools
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from explorer_browser import REFUSED, open_details, quiet

PHONE = {"viewport": {"width": 360, "height": 800}, "has_touch": True}
OWN = "?q=1,2;0,1&k=1,2;3,4&v=1;2&map=elu%2B1"
UNAVAILABLE = "?preset=negative&map=relu"
WRONG = "?preset=nothing&n=7e9&qnorm=nan&memory=x&beta=2&zzz=1"


# ---------------------------------------------------------------------------------------------------------
# For everybody
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def axe():
    """Its script, which nothing on the page loads: the browser is told to run it."""
    package = pytest.importorskip("axe_playwright_python")
    return Path(package.__file__).with_name("axe.min.js").read_text() + ";undefined"


SIGHTS = {"as it opens": "", "own numbers": OWN, "unavailable": UNAVAILABLE, "alerts": WRONG}


@pytest.mark.parametrize("sight", SIGHTS)
def test_axe_finds_nothing(visit, axe, sight):
    page = visit(SIGHTS[sight], expected=REFUSED if sight == "alerts" else None)
    open_details(page)
    if sight == "unavailable":
        assert page.locator("#results .unavailable").is_visible()
    if sight == "alerts":
        assert page.locator(".alert:visible").count() == 6
    page.evaluate(axe)
    for scheme, width in itertools.product(("light", "dark"), (1280, 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        assert len(found["passes"]) > 20  # it did look
        wrong = [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]]
        assert wrong == [], (scheme, width)


# Whatever reaches out of the window without a box of its own that scrolls.
BEYOND = """() => {
  const width = document.documentElement.clientWidth;
  return [document.documentElement.scrollWidth, [...document.querySelectorAll("body *")].filter((each) => {
    const box = each.getBoundingClientRect();
    // A caption for screen readers is clipped to nothing, wherever it stands.
    return box.width > 1 && box.height > 1 && (box.right > width + 0.5 || box.left < -0.5)
    && !each.closest(".scroll, clipPath, [clip-path], .skip");
  }).map((each) => each.outerHTML.slice(0, 120)), [...document.querySelectorAll(".scroll")]
  .filter((each) => {
    const box = each.getBoundingClientRect();
    return box.right > width + 0.5 || box.left < -0.5 || (each.scrollWidth > each.clientWidth
    && getComputedStyle(each).overflowX !== "auto");
  }).length];
}"""
WIDE = {
    **SIGHTS,
    "wide numbers": "?q=-999.125,-999.125,-999.125,-999.125&k="
    + ";".join(["-999.125,999.125,-0.0625,1e-9"] * 16)
    + "&v=" + ";".join(["-999.125,999.125,-1e-9"] * 16) + "&map=dpfp&nu=3",
    "the largest counts": "?n=1048576&r=1024&e=1024&memory=identity&pairs=64&decay=0.5",
    "an enormous estimate": "?kind=trig&qnorm=4&knorm=4&angle=180",
    "a long word": "?preset=" + "W" * 300 + "&" + "M" * 300 + "=1",
}  # fmt: skip


@pytest.mark.parametrize("sight", WIDE)
def test_nothing_overflows(visit, sight):
    page = visit(WIDE[sight], expected=REFUSED, **PHONE)
    open_details(page)
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 50)))")
        scrolled, beyond, boxes = page.evaluate(BEYOND)
        assert scrolled <= width and beyond == [] and boxes == 0, width


def test_charts_have_words(visit):
    page = visit()
    open_details(page)
    charts = page.locator("figure svg[role=img]").all()
    assert len(charts) == 6
    for chart in charts:
        assert len(chart.get_attribute("aria-label")) > 40
        paths = [path.get_attribute("d") for path in chart.locator("path").all()]
        assert paths and not [d for d in paths if re.search("NaN|Infinity|undefined", d or "")]


@pytest.mark.parametrize(
    "query",
    [
        "?kind=trig&qnorm=4&knorm=4&angle=180",
        "?kind=optimal&qnorm=4&knorm=4&angle=0",
        "?qnorm=0&knorm=0&orthogonal=no",
        "?memory=identity&pairs=64&decay=0.5&beta=0.1&passes=32",
    ],
)
def test_enormous_numbers_can_be_drawn(visit, query):
    page = visit(query)
    drawn = page.evaluate(
        """() => [...document.querySelectorAll("figure svg *")]
          .flatMap((each) => [...each.attributes].map((a) => a.value))"""
    )
    assert len(drawn) > 500
    assert not [text for text in drawn if re.search(r"NaN|Infinity|undefined|(?<![.\d])\d{7}", text)]


# ---------------------------------------------------------------------------------------------------------
# The keyboard
# ---------------------------------------------------------------------------------------------------------

# What a control is called here: enough to tell one from the next.
NAMED = """(each) => each.id || each.getAttribute("aria-label") || each.textContent.trim().slice(0, 40)"""


def focused(page):
    return page.evaluate(f"() => {{ const named = {NAMED}; return named(document.activeElement); }}")


def test_every_control_is_reached_by_tab(visit):
    page = visit("?preset=general&map=favor%2B")
    open_details(page)
    wanted = page.evaluate(f"""() => [...document
      .querySelectorAll("a[href], button, select, input, summary, .scroll")]
      .filter((each) => !each.disabled && each.checkVisibility() && (each.type !== "radio" || each.checked))
      .map({NAMED})""")
    assert len(wanted) > 60
    page.locator("body").focus()
    reached = []
    for _ in range(len(wanted)):
        page.keyboard.press("Tab")
        reached.append(focused(page))
    assert reached == wanted
    assert page.evaluate("() => document.activeElement.matches(':focus-visible')")


def test_the_first_tab_skips_to_the_panels(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the first panel"
    box = page.locator("a.skip").bounding_box()
    assert box["x"] >= 0 and box["y"] >= 0
    page.keyboard.press("Enter")
    assert page.url.endswith("#reassociation")


def test_arrow_keys_move_sliders_and_queries(visit):
    page = visit("?preset=general")
    page.locator("#prefix").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#prefix-value").inner_text() == "keys 1 to 3 of 4"
    page.keyboard.press("Home")
    assert page.locator("#prefix-value").inner_text() == "no key of 4"
    assert page.locator("#prefix").get_attribute("aria-valuetext") == "no key of 4"
    assert "no key is visible" in page.locator("#results").inner_text()
    page.keyboard.press("End")
    before = page.locator("#results").inner_text()
    page.locator("#queries input").first.focus()
    page.keyboard.press("ArrowRight")
    assert urlsplit(page.url).query == "preset=general&query=1"
    assert (
        page.locator("#queries input").nth(1).is_checked() and page.locator("#results").inner_text() != before
    )
    assert page.evaluate("() => document.activeElement.value") == "1"  # still there to move on
    page.locator("#c-n").focus()
    page.keyboard.press("ArrowRight")
    quiet(page)
    assert page.locator("output[for=c-n]").inner_text() == "2,048"
    assert page.locator("#cost tbody tr").first.locator("td").nth(1).inner_text() == "4,194,304"
