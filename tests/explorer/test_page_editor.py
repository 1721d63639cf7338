"""Numbers of a visitor's own: typed, added, removed, and wrong."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from explorer_browser import quiet


def test_typing_numbers(visit):
    page = visit("?preset=exact")
    page.locator("summary", has_text="of your own").click()
    box = page.get_by_label("value 1", exact=False).first
    box.click()
    box.press("Control+a")
    page.keyboard.type("-1.5")
    quiet(page)
    assert box.input_value() == "-1.5" and page.evaluate("() => document.activeElement.value") == "-1.5"
    assert parse_qs(urlsplit(page.url).query)["v"] == ["-1.5;-2;1;4"]
    assert page.locator("#results .card.fast .number").inner_text() == "0"  # (2 * -1.5 + 2 + 1) / 2
    assert page.locator("#preset-note").inner_text().startswith("Numbers of your own")
    page.locator("#c-preset").select_option("general")
    quiet(page)
    assert not {"q", "k", "v"} & set(parse_qs(urlsplit(page.url).query))
    assert page.get_by_label("value 1", exact=False).first.input_value() == "1"


def test_rows_come_and_go(visit):
    page = visit("?preset=exact")
    page.locator("summary", has_text="of your own").click()
    page.get_by_role("button", name="Add a key").click()
    quiet(page)
    assert page.locator("#rescan tbody tr").count() == 5 + 1
    assert (
        page.locator("#prefix").get_attribute("max") == "5" and page.locator("#prefix").input_value() == "5"
    )
    page.get_by_role("button", name="Remove key 1", exact=True).click()
    quiet(page)
    assert parse_qs(urlsplit(page.url).query)["k"] == ["-1,2;1,-1;0,3;0,3"]
    assert parse_qs(urlsplit(page.url).query)["v"] == ["-2;1;4;4"]
    page.get_by_role("button", name="Add a query").click()
    quiet(page)
    assert page.locator("#queries input").count() == 5
    for _ in range(4):
        page.get_by_role("button", name="Remove query 1", exact=True).click()
    quiet(page)
    assert page.locator("#queries input").count() == 1
    assert page.get_by_role("button", name=re.compile("Remove query")).count() == 0  # one must stay
    for _ in range(12):
        page.get_by_role("button", name="Add a key").click()
    quiet(page)
    assert (
        page.get_by_role("button", name="Add a key").is_disabled()
        and page.locator("#prefix").get_attribute("max") == "16"
    )
    assert page.locator("#reassociation > .alert").is_hidden()


@pytest.mark.parametrize("text", ["", "1e9", "-1001"])
def test_a_wrong_entry_changes_nothing(visit, text):
    page = visit("?preset=exact")
    page.locator("summary", has_text="of your own").click()
    before = page.locator("#results").inner_text()
    box = page.get_by_label("key 2, entry 1", exact=True)
    box.fill(text)
    quiet(page)
    assert box.evaluate("(each) => each.matches(':invalid')")
    assert page.locator("#results").inner_text() == before and urlsplit(page.url).query == "preset=exact"
    # Another entry must not carry the wrong one along.
    page.get_by_label("key 1, entry 1", exact=True).fill("5")
    quiet(page)
    assert page.locator("#reassociation > .alert").is_hidden()
    assert page.locator("#reassociation > .body").is_visible()
    box.fill("7")
    quiet(page)
    assert parse_qs(urlsplit(page.url).query)["k"] == ["5,1;7,2;1,-1;0,3"]
