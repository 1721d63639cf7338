"""The page as one file: opens without a network, shows what the server shows, whole or not at all."""

import dataclasses
import json
import re
import sys
import time

import pytest
from explorer_browser import quiet

pytest.importorskip("typer")

from reassoc._errors import InputError
from reassoc.cli._app import run
from reassoc.explorer import controls, page, panels
from reassoc.explorer.export import export
from reassoc.explorer.panels import PANELS
from reassoc.explorer.presets import PRESETS

exporting = sys.modules["reassoc.explorer.export"]
NOT_HELD = "This file does not hold an answer for these settings. For any settings, run: reassoc explore"


def reduce_grids(monkeypatch, most):
    """At most so many places for each slider, the first and the default among them."""
    for name, panel in PANELS.items():
        few = tuple(
            each if each.words and most > 1 else dataclasses.replace(
                each, grid=tuple(dict.fromkeys((each.default, *each.grid[:-1][: most - 1])))
            )
            for each in panel.controls
        )  # fmt: skip
        few = tuple(dataclasses.replace(c, grid=tuple(sorted(c.grid, key=c.values.index))) for c in few)
        monkeypatch.setitem(PANELS, name, panel._replace(controls=few))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file with all that menus offer, and two places for each slider: seconds instead of a minute."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduce_grids(monkeypatch, 2)
        file = tmp_path_factory.mktemp("exported") / "explorer.html"
        export(file)
    return file


@pytest.fixture()
def reduced(monkeypatch):
    """One setting for each panel, to see how a file is written."""
    reduce_grids(monkeypatch, 1)


class Reader:
    """Opens the file without a network, and judges at the end as Visitor does."""

    def __init__(self, browser):
        self.browser, self.contexts, self.requests, self.said = browser, [], [], []

    def open(self, file, query="", **options):
        context = self.browser.new_context(**options)
        self.contexts.append(context)
        context.set_offline(True)
        context.on("request", lambda request: self.requests.append(request.url))
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(file.as_uri() + query)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    def leave(self):
        for context in self.contexts:
            context.close()
        assert self.requests and not [
            url[:200] for url in self.requests if not url.startswith(("file:", "data:"))
        ]
        assert self.said == []


@pytest.fixture()
def disk(browser):
    reader = Reader(browser)
    yield reader.open
    reader.leave()


SHOWN = """() => [...document.querySelectorAll("main .body")]
.map((each) => [...each.querySelectorAll("td, th, .number, .small, .remark, dd")]
  .filter((part) => !part.closest("details")).map((part) => part.textContent)
  .filter((text) => !/on this machine|reassoc explore|own numbers/.test(text)))"""


def test_the_file_shows_what_the_server_shows(disk, visit, exported):
    """Several settings of every panel, set by hand in both: the same words and numbers."""
    file, live = disk(exported), visit()
    steps = [
        {}, {"preset": "negative"}, {"map": "elu+1"}, {"preset": "mixed", "map": "favor+"}, {"map": "dpfp"},
        {"kind": "trig", "orthogonal": "no"}, {"calibrated": "yes", "memory": "favor+"},
        {"preset": "hostile"},
    ]  # fmt: skip
    for step in steps:
        seen = []
        for shown in (file, live):
            for name, value in step.items():
                shown.locator(f"#c-{name}").select_option(value)
            quiet(shown)
            seen.append(shown.evaluate(SHOWN))
        assert seen[0] == seen[1], step
        assert sum(map(len, seen[0])) > 150


def test_every_slider_has_an_answer_at_every_place(disk, exported):
    """Each slider from end to end, the others where they stand; what the page shows is in the file."""
    page = disk(exported)
    page.locator("#c-map").select_option("favor+")
    for slider in page.locator("input[type=range]").all():
        if not slider.is_visible():
            continue
        name = slider.get_attribute("id")
        for place in range(int(slider.get_attribute("max")) + 1):
            slider.fill(str(place))
            quiet(page)
            assert page.locator(".alert:visible").count() == 0, (name, place)
    n = int(page.locator("output[for=c-n]").inner_text().replace(",", ""))
    assert page.locator("#cost tbody tr").first.locator("td").nth(1).inner_text() == f"{n**2:,}"


def test_every_preset_and_map(disk, exported):
    page = disk(exported)
    for preset in PRESETS:
        for map_ in next(c for c in PANELS["reassociation"].controls if c.name == "map").values:
            page.locator("#c-preset").select_option(preset)
            page.locator("#c-map").select_option(map_)
            quiet(page)
            assert page.locator(".alert:visible").count() == 0
            want = json.loads(panels.answer("reassociation", [("preset", preset), ("map", map_)]))
            last = want["prefixes"][-1]
            numbers = [
                data.get_attribute("value") for data in page.locator("#running td.normalizer data").all()
            ]
            assert [float(x) for x in numbers] == [float(x) for x in last["z"]]


def test_the_address_works_from_disk(disk, exported):
    page = disk(exported, "?preset=negative&map=relu&prefix=2")
    assert page.locator("#prefix-value").inner_text() == "keys 1 to 2 of 3"
    assert page.locator("#results .unavailable").is_visible()
    page.locator("#prefix").fill("1")
    assert page.url.endswith("?preset=negative&map=relu&prefix=1")
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator("#prefix-value").inner_text() == "keys 1 to 1 of 3"


@pytest.mark.parametrize("query", ["?n=17", "?n=nan", "?n=%3Cscript%3Ealert(1)%3C/script%3E", "?n=__proto__"])
def test_what_the_file_does_not_hold_is_said(disk, exported, query):
    page = disk(exported, query)
    assert page.locator("#cost > .alert").inner_text() == NOT_HELD
    assert page.locator("#capacity > .body").is_visible()
    page.locator("#c-n").fill("2")
    quiet(page)
    assert page.locator("#cost > .alert").is_hidden() and page.locator("#cost > .body").is_visible()


def test_own_numbers_need_the_program(disk, exported):
    page = disk(exported)
    page.locator("summary", has_text="of your own").click()
    assert "run reassoc explore" in page.locator("#editor").inner_text()
    page = disk(exported, "?q=1,2&k=1,2&v=1")
    assert page.locator("#reassociation > .alert").inner_text() == NOT_HELD


def test_the_file_stands_alone(tmp_path, reduced):
    """Every setting of the grid (a smaller one: the whole takes most of a minute), nothing from elsewhere."""
    file = tmp_path / "explorer.html"
    assert run(["explore", "--export", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|iframe|link|object)[^>]+(src|href)=[\"'](?!data:)", text)
    assert "@import" not in text and "url(" not in text.split("</style>")[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy and "http" not in policy
    setup = json.loads(re.search(r'<script type="application/json" id="setup">(.*?)</script>', text)[1])
    for name, panel in PANELS.items():
        wanted = {controls.key(settings) for settings in controls.grid(panel.controls)}
        assert set(setup["answers"][name]) == wanted
        first = controls.key(controls.settle(panel.controls, {}))
        assert setup["answers"][name][first] == json.loads(panels.answer(name, []))
    assert not [sign for sign in (str(tmp_path), "/root/", "/home/", "Traceback") if sign in text]


# ---------------------------------------------------------------------------------------------------------
# Writing it, with a grid of a few settings
# ---------------------------------------------------------------------------------------------------------


def test_the_same_command_gives_the_same_bytes(tmp_path, monkeypatch, reduced):
    count = export(tmp_path / "one.html")
    panels._answer.cache_clear()
    assert export(tmp_path / "two.html") == count
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert count == sum(len(list(controls.grid(panel.controls))) for panel in PANELS.values())
    assert {path.name for path in tmp_path.iterdir()} == {"one.html", "two.html"}


def test_progress_goes_through_everything(tmp_path, reduced):
    seen = []
    count = export(tmp_path / "file.html", progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(count)) and {total for _, total, _ in seen} == {count}
    assert [name for _, _, name in seen] == sorted((name for _, _, name in seen), key=list(PANELS).index)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError, UnicodeEncodeError])
def test_nothing_half_written_is_left(tmp_path, monkeypatch, reduced, error):
    (tmp_path / "old.html").write_text("as it was")

    def broken(about):
        if error is UnicodeEncodeError:  # fails once the file is open
            return "half of it \ud800"
        raise error

    monkeypatch.setattr(exporting, "whole", broken)
    for name in ("old.html", "new.html"):
        with pytest.raises(error):
            export(tmp_path / name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.html": "as it was"}


def test_times_of_ones_own_go_into_the_file(tmp_path, reduced):
    bench = json.loads(page.resources.files("reassoc.explorer").joinpath("bench.json").read_text())
    bench["machine"]["processor"] = "My <processor> & more"
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    export(tmp_path / "file.html", tmp_path)
    setup = re.search(r'id="setup">(.*?)</script>', (tmp_path / "file.html").read_text())[1]
    assert "<" not in setup and json.loads(setup)["measured"]["about"].startswith("My <processor> & more")
    (tmp_path / "file.html").unlink()
    (tmp_path / "bench.json").write_text("{")
    with pytest.raises(InputError, match=r"^--bench: .* holds no readable results"):
        export(tmp_path / "file.html", tmp_path)
    assert not (tmp_path / "file.html").exists()


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, capsys, reduced):
    monkeypatch.chdir(tmp_path)
    assert run(["explore", "--export", "Page.HTM"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and re.fullmatch(
        r"[\d,]+ computed settings in Page\.HTM \(\d+\.\d MB\); open it in a browser\.\n", out
    )
    assert {path.name for path in tmp_path.iterdir()} == {"Page.HTM"}
    start = time.perf_counter()
    for wrong in ("page.txt", "page", "folder/", "missing/page.html", "."):
        assert run(["explore", "--export", wrong]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, (wrong, err)
    assert time.perf_counter() - start < 5
    (tmp_path / "taken.html").mkdir()
    assert run(["explore", "--export", "taken.html"]) == 2
    assert "taken.html" in capsys.readouterr().err
