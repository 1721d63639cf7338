"""Addresses that somebody else made up, and answers that do not come: a message, and nothing else."""

from urllib.parse import quote, urlsplit

import pytest
from explorer_browser import GONE, REFUSED, open_details, quiet

from reassoc.explorer.panels import PANELS

MARKUP = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "javascript:alert(1)",
]
NAMES = [
    *(control.name for panel in PANELS.values() for control in panel.controls),
    "q",
    "k",
    "v",
    "query",
    "prefix",
]


@pytest.mark.parametrize("text", MARKUP)
def test_markup_stays_text(visit, text):
    """In every parameter at once, in tables, and as the name of one."""
    # An image that is not there would be asked for; a script that runs would open a dialog: both are seen.
    everything = "&".join(f"{name}={quote(text)}" for name in dict.fromkeys(NAMES))
    for query in (f"?{everything}", f"?query={quote(text)}&{quote(text)}=1"):
        page = visit(query, expected=REFUSED)
        open_details(page)
        injected = page.evaluate(
            "() => document.querySelectorAll('body script:not([type=module]), img, [onerror]').length"
        )
        assert injected == 0
        alerts = " ".join(each.inner_text() for each in page.locator(".alert:visible").all())
        assert text.split("(")[0][:9] in alerts  # shown as it is
        assert "\n" not in alerts and "Traceback" not in alerts


@pytest.mark.parametrize(
    ("query", "panel", "words"),
    [
        ("?n=nan", "cost", "n must be a number such as 0.5 or -2e-3, got 'nan'"),
        (
            "?map=tanh",
            "reassociation",
            "map must be one of identity, elu+1, relu, trig, favor+, dpfp; got 'tanh'",
        ),
        ("?query=99", "reassociation", "query must be a whole number from 0 to 3; the address says '99'"),
        (
            "?prefix=1e999",
            "reassociation",
            "prefix must be a whole number from 0 to 4; the address says '1e999'",
        ),
        ("?q=1&k=2", "reassociation", "q, k and v go together; missing: v"),
        ("?beta=0.01", "overwriting", "beta must lie between 0.1 and 1, got '0.01'"),
        (
            "?hello=1&constructor=2",
            "page",
            "The address names what this page does not know: hello, constructor.",
        ),
        ("?n=%ED%A0%80", "cost", "n must be a number such as"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(visit, query, panel, words):
    page = visit(query, expected=REFUSED)
    alert = page.locator(f"#{panel} > .alert")
    assert alert.is_visible() and words in alert.inner_text()
    assert alert.get_attribute("role") == "alert"
    others = {"reassociation", "cost", "approximation", "capacity", "overwriting"} - {panel}
    if panel == "page":
        assert all(page.locator(f"#{other} > .body").is_visible() for other in others)
    else:
        assert page.locator(f"#{panel} > .body").is_hidden()
        assert page.locator(f"#{'cost' if panel != 'cost' else 'capacity'} > .body").is_visible()


def test_a_wrong_address_can_be_mended_on_the_page(visit):
    page = visit("?n=7e9&map=tanh&query=99", expected=REFUSED)
    page.locator("#c-n").fill("3")
    page.locator("#c-preset").select_option("general")
    quiet(page)
    assert page.locator("#cost > .alert").is_hidden() and page.locator("#cost > .body").is_visible()
    assert (
        page.locator("#reassociation > .alert").is_hidden()
        and page.locator("#reassociation > .body").is_visible()
    )


def test_ten_thousand_keys_in_the_address(visit):
    many = ";".join(["1,2"] * 10_000)
    page = visit(f"?q=1,2&k={many}&v={';'.join('1' for _ in range(10_000))}", expected=REFUSED)
    assert page.locator("#reassociation > .alert").inner_text() == "k: at most 16 rows, got 10,000"
    assert page.locator("#cost > .body").is_visible()


def test_a_server_that_is_gone_is_said_so(visit):
    page = visit(expected=GONE)
    page.context.route("**/api/**", lambda route: route.abort())
    page.locator("#c-n").fill("3")
    quiet(page)
    assert (
        page.locator("#cost > .alert").inner_text()
        == "The explorer does not answer. Is reassoc explore still running?"
    )
    page.context.unroute("**/api/**")
    page.locator("#c-n").fill("4")
    quiet(page)
    assert page.locator("#cost > .body").is_visible() and page.locator("#cost > .alert").is_hidden()


def test_the_answers_of_a_burst_are_those_of_its_end(visit):
    """Many changes while one question is on its way: what stands there at last is what was asked last."""
    page = visit()
    page.evaluate("""() => { const slider = document.getElementById("c-n");
      const move = (place) => { slider.value = place; slider.dispatchEvent(new Event("input")); };
      for (let place = 0; place <= 16; place++) move(place);
      move(5); }""")
    quiet(page)
    assert page.locator("#cost tbody tr").first.locator("td").nth(1).inner_text() == f"{512**2:,}"
    assert urlsplit(page.url).query == "n=512"
