"""The documentation builds without a warning, is whole, and opens from disk without the network."""

import importlib
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from filelock import FileLock

for needed in ("sphinx", "furo", "myst_parser", "typer", "transformers"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = ("reassoc", "reassoc.feature_maps", "reassoc.rules", "reassoc.nn", "reassoc.hf", "reassoc.lab")
# Elements that load what their attribute names; an <a> does not.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of pages; built once, however many processes run the tests."""
    shared = tmp_path_factory.getbasetemp()
    if shared.name.startswith("popen-"):  # one of several processes: theirs is a common parent
        shared = shared.parent
    out, log = shared / "documentation", shared / "documentation.log"
    with FileLock(shared / "documentation.lock"):
        if not log.exists():
            build = subprocess.run(
                [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", DOCS, out],
                capture_output=True, text=True, timeout=180,
            )  # fmt: skip
            log.write_text(build.stderr if build.returncode else "")
    if said := log.read_text():
        pytest.fail(said, pytrace=False)
    return out


@pytest.fixture(scope="module")
def pages(built):
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


class Page(HTMLParser):
    """What a page loads, where it leads, which places in it can be led to."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.places, self.formulas, self.styles = [], [], set(), 0, ""
        self._style = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.places |= {found[name] for name in ("id", "name") if found.get(name)}
        self.formulas += tag == "math"
        self.styles += found.get("style") or ""
        self._style = tag == "style"
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        # A link element with these relations names a page, and loads nothing.
        pointer = {"next", "prev", "index", "search", "canonical", "author"} & set(
            (found.get("rel") or "").split()
        )
        if tag in LOADS and found.get(LOADS[tag]) and not pointer:
            self.loads.append(found[LOADS[tag]])
        self.loads += [part.split()[0] for part in (found.get("srcset") or "").split(",") if part.strip()]

    def handle_data(self, data):
        if self._style:
            self.styles += data

    def handle_endtag(self, tag):
        self._style = False


def loaded_by(styles):
    return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", styles)


def external(target):
    return "//" in target.partition("?")[0] and not target.startswith("data:")


def test_it_builds_and_the_pages_are_there(pages, built):
    wanted = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    wanted = {path for path in wanted if path.parts[0] != "_build"}
    assert wanted <= {path.relative_to(built) for path in pages}
    assert len(wanted) > 15


def test_nothing_is_loaded_from_elsewhere(pages, built):
    found = []
    for path, page in pages.items():
        for target in [*page.loads, *loaded_by(page.styles)]:
            if external(target):
                found.append((path.name, target))
            elif not target.startswith("data:"):
                assert (path.parent / unquote(urldefrag(target.partition("?")[0])[0])).exists(), (
                    path,
                    target,
                )
    for path in built.rglob("*.css"):
        found += [
            (path.name, target) for target in loaded_by(path.read_text(encoding="utf-8")) if external(target)
        ]
    for path in built.rglob("*.js"):
        calls = re.findall(
            r"""(?:fetch|import|importScripts|Worker|open)\(\s*["'`](?:\w+["'`]\s*,\s*["'`])?(https?:[^"'`]*)""",
            path.read_text(encoding="utf-8"),
        )
        found += [(path.name, target) for target in calls]
    assert not found


def test_what_the_check_of_loads_finds():
    """The pages have no such thing, so the check itself is checked."""
    assert loaded_by("a{background:url('https://x.org/a.png')} @import \"//y.org/b.css\";") == [
        "https://x.org/a.png", "//y.org/b.css",
    ]  # fmt: skip
    assert external("https://x.org/a.png") and external("//y.org/b.css")
    assert not external("_static/a.css?v=1//2")
    assert not external("data:image/svg+xml;utf8,<svg xmlns='http://w3.org'>")


def test_formulas_are_mathml(pages, built):
    """Wherever Markdown has a formula, the page has <math>, and no dollar sign is left of it."""
    for path in DOCS.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        count = len(re.findall(r"\$\$.+?\$\$|(?<!\$)\$[^$\n]+\$(?!\$)", text, flags=re.DOTALL))
        if count and "_build" not in path.parts:
            assert pages[built / path.relative_to(DOCS).with_suffix(".html")].formulas >= count, path
    assert sum(page.formulas for page in pages.values()) > 10


def test_every_public_name_is_in_the_reference(pages):
    places = set().union(*(page.places for path, page in pages.items() if path.parent.name == "reference"))
    wanted = []
    for name in MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or ("Sum", "Decay", "Delta", "GatedDelta")
        wanted += [f"{name}.{attribute}" for attribute in public]
    assert len(wanted) > 80
    assert not [name for name in wanted if name not in places and f"module-{name}" not in places]


def test_every_command_is_in_the_reference(built):
    from typer.main import get_command

    from reassoc.cli._app import app

    text = (built / "reference" / "cli.html").read_text(encoding="utf-8")

    def single(words, command):
        inner = getattr(command, "commands", {})
        found = [each for word, c in inner.items() for each in single(f"{words} {word}".strip(), c)]
        return found or [(words, command)]

    for name, command in single("", get_command(app)):
        assert f">reassoc {name}<" in text
        for option in command.params:
            assert option.opts[0] in text, (name, option.opts)


def test_links_lead_somewhere(pages, built):
    gone = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, place = urldefrag(link)
            target = (path.parent / unquote(file)).resolve() if file else path
            missed = place and target in pages and unquote(place) not in pages[target].places
            if missed or not target.is_file():
                gone.append((path.name, link))
    assert not gone
    assert sum(len(page.links) for page in pages.values()) > 500


def test_it_opens_from_disk(pages, built):
    """In a real browser, with searching: no error, no request but for files."""
    browser = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    problems = []
    with browser.sync_playwright() as started:
        window = started.chromium.launch(executable_path=chromium)
        page = window.new_page(viewport={"width": 390, "height": 844})
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "data:")) else problems.append(asked.url),
        )
        for path in pages:
            page.goto(path.as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, f"{path.name} is wider than a phone"
        page.goto((built / "search.html").as_uri() + "?q=linear_attention")
        page.wait_for_selector("#search-results ul.search li", timeout=20_000)
        window.close()
    assert not problems
