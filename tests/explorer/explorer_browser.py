"""Pages of the explorer in a real browser, and their numbers read back as a person reads them."""

import contextlib
import math
import re
import shutil

import pytest

# As root and without a network; the rest keeps the browser's own services silent.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
# What the browser itself says of requests that fail: the page shows a message, and goes on.
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
GONE = "Failed to load resource: net::ERR_FAILED"
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# Resolves when all panels have answered what was asked of them.
QUIET = """
async function quiet() {
  const busy = () => document.querySelector("[aria-busy]") || !document.documentElement.dataset.ready;
  while (busy()) await new Promise((resolve) => setTimeout(resolve, 1));
}
"""


@contextlib.contextmanager
def launched():
    """Chromium of this machine; the test is skipped without it."""
    api = pytest.importorskip("playwright.sync_api")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """Opens pages and remembers what they asked for and complained of."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address
        self.contexts, self.requests, self.said, self.expected = [], [], [], set()

    def visit(self, query="", *, expected=None, **options):
        """A page of its own context. expected: what the browser may say, because that is the point."""
        self.expected.add(expected)
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.contexts.append(context)
        context.on("request", lambda request: self.requests.append(request.url))
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(self.address + query)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    def leave(self):
        """Close everything, then judge."""
        for context in self.contexts:
            context.close()
        allowed = (self.address, "data:")
        assert not [url[:200] for url in self.requests if not url.startswith(allowed)]
        assert not [text for text in self.said if text not in self.expected]


def quiet(page):
    """Wait until nothing is asked any more."""
    page.evaluate(f"async () => {{ {QUIET} await quiet(); }}")


def open_details(page):
    """Show what is folded away."""
    page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")


def parsed(text):
    """(Number, whether a power of ten) of a printed number; infinities and NaN as they are."""
    text = text.strip().lstrip("+").replace("−", "-")
    if text in ("∞", "-∞", "NaN"):
        return float(text.replace("∞", "inf")), False
    if match := re.fullmatch(r"(-?\d+(?:\.\d+)?) × 10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", text):
        return float(f"{match[1]}e{match[2].translate(SUPERSCRIPTS)}"), True
    assert re.fullmatch(r"-?\d+(\.\d+)?", text), f"not a number as the page prints them: {text!r}"
    return float(text), False


def entries(text):
    """The numbers of a printed vector, "(1, −2)" or "1"."""
    return text.strip().removeprefix("(").removesuffix(")").split(", ")


def assert_printed(text, want, digits=6, noise=0.0, what=""):
    """What is printed is `want` to half a unit of the last digit.

    digits: significant ones; a power of ten has three fewer after its point. noise: below it, two
    computations of the same number may differ in everything. Answers travel with nine digits.
    """
    texts, numbers = entries(text), list(want)
    assert len(texts) == len(numbers), (what, text, want)
    for each, number in zip(texts, numbers, strict=True):
        got, raised = parsed(each)
        if not math.isfinite(number):
            assert str(got) == str(number), (what, each, number)
            continue
        if abs(number) <= noise:
            assert abs(got) <= 2 * noise, (what, each, number)
            continue
        shown = max(1, digits - 3) + 1 if raised else digits
        unit = 10.0 ** (math.floor(math.log10(abs(number))) - shown + 1) if number else 0.0
        assert abs(got - number) <= unit / 2 + 1e-8 * abs(number) + noise, (what, each, number)
