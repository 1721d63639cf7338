"""The report and its figures: whole, self-contained, escaped, the same bytes twice."""

import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from reassoc.lab import Results, answers
from reassoc.lab import figures as figures_module
from reassoc.lab.figures import plots, write_figures
from reassoc.lab.measure import SEED_COLUMNS
from reassoc.lab.report import write_report

NAN, INF = float("nan"), float("inf")
HOSTILE = "<script>alert(1)</script>"
# A dollar sign would be a formula to matplotlib; the letters are in no font of its own.
AWKWARD = 'm&m "q" $x_{$ \u4e2d\ud800 {0} %s'


def results(heads, *, model=HOSTILE, seeds=(0, 1), provenance=None, site=HOSTILE):
    """Results of one site by hand. ``heads``: map, features, error per head, predicted, observed variance."""
    head_rows, seed_rows = [], []
    for name, features, errors, predicted, observed in heads:
        about = {"site": site, "model": model, "layer": 0, "causal": True, "map": name, "features": features}
        for head, error in enumerate(errors):
            cost = {"operations_per_token": 260 * features, "state_bytes": 132 * features}
            over = {
                "output_error": error,
                "predicted_relative_variance": predicted,
                "observed_relative_variance": observed,
                "output_squared_bias": NAN if observed != observed else error**2 - 0.01,
                "output_variance": observed,
            }
            head_rows.append(about | {"head": head} | cost | over)
            for seed in seeds:
                seed_rows.append(about | {"head": head, "seed": seed} | dict.fromkeys(SEED_COLUMNS, error))
    manifest = {
        "format": "reassoc-fidelity-1",
        "versions": {"reassoc": "0.1.0", "torch": "2.6.0"},
        "machine": {},
        "input": {"name": HOSTILE, "sha256": "ab" * 32, "provenance": provenance or {"by": HOSTILE}},
        "sites": {
            site: {
                "model": model, "layer": None, "causal": True, "scale": 0.2, "query_heads": [0, 1],
                "key_heads": [0, 1], "sequence_lengths": [7, 9], "head_size": 32, "value_size": 32,
            },
        },
        "seeds": list(seeds),
        "target_error": 0.1,
    }  # fmt: skip
    return Results(seed_rows, head_rows, manifest)


def ordinary(model=HOSTILE):
    return results(
        [
            ("mean", 1, [0.9, 0.8], NAN, NAN),
            ("elu+1", 32, [0.7, 0.05], NAN, NAN),
            ("trig:calibrated", 64, [INF, NAN], 1e200, 3e190),
            ("trig:calibrated", 128, [NAN, NAN], INF, NAN),
            ("favor+", 64, [0.8, 0.9], 1e30, 1e-9),
            ("favor+", 128, [0.0, 1e12], 5.0, 0.4),
            ("favor++:calibrated", 64, [0.04, 0.06], 0.2, 0.1),
            ("favor++:calibrated", 128, [0.02, 0.03], 0.1, 0.05),
        ],
        model=model,
    )


SMALL = {
    "one head, one seed, one width": lambda: results([("favor+", 64, [0.3], 2.0, NAN)], seeds=(0,)),
    "only the mean": lambda: results([("mean", 1, [0.9], NAN, NAN)]),
    "no random map": lambda: results(
        [("relu", 32, [0.3, 0.4], NAN, NAN), ("dpfp-2", 128, [0.2, 0.1], NAN, NAN)]
    ),
    "nothing but NaN": lambda: results([("favor+", 64, [NAN, NAN], NAN, NAN)]),
    "nothing but infinity": lambda: results([("favor+", 64, [INF], INF, INF), ("relu", 8, [INF], NAN, NAN)]),
    "nothing but zero": lambda: results([("favor+:iid", 64, [0.0], 0.0, 0.0), ("exp", 8, [0.0], NAN, NAN)]),
    "many heads": lambda: results([("favor+", 64, [0.1 + i / 50 for i in range(60)], 1.0, 1.0)]),
    "awkward names": lambda: results([("relu", 8, [0.5], NAN, NAN)], model=AWKWARD, site=AWKWARD * 9),
}


class Page(HTMLParser):
    """Collects elements with attributes, text outside of style, and whether tags are balanced."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder, figures and text of the report of ordinary results."""
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    found = ordinary()
    drawn = write_figures(found, folder)
    path = write_report(found, folder, f"reassoc fidelity --input '{HOSTILE}'", drawn)
    assert path == folder / "report.html"
    return folder, drawn, path.read_text()


def test_report_loads_nothing(written):
    page = Page(written[2])
    assert page.open == []
    assert not {tag for tag, _ in page.elements} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "img",
    }
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "xlink:href", "src", "action", "data", "srcset"):
                assert value.startswith("#"), value
    style = re.search(r"<style>(.*?)</style>", written[2], re.S)[1]
    assert "url(" not in style and "@import" not in style


def test_anchors_exist_and_ids_are_unique(written):
    page = Page(written[2])
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for value in attributes.values():
            for target in re.findall(r"^#(.+)$|url\(#([^)]+)\)", value or ""):
                assert "".join(target) in ids


def test_what_comes_from_files_is_escaped(written):
    assert HOSTILE not in written[2]
    text = "".join(Page(written[2]).text)
    assert text.count(HOSTILE) >= 5  # model, site, input, provenance, command


def test_answers_are_in_the_report(written):
    text = "".join(Page(written[2]).text)
    (answer,) = answers(ordinary())
    for sentence in answer.sentences:
        assert sentence.removeprefix(f"{HOSTILE}: ")[1:] in text
    assert "Choose favor++:calibrated at 64 features" in text
    hopeless = results([("relu", 8, [0.5], NAN, NAN)])
    assert "None of these will do" in "".join(Page(page_of(hopeless)).text)
    assert "none: train or keep softmax" in page_of(hopeless)


def page_of(found):
    from reassoc.lab.report import render

    return render(found, "reassoc fidelity", plots(found))


def test_an_error_just_beyond_the_target_is_not_rounded_into_it():
    page = page_of(results([("relu", 8, [0.1019], NAN, NAN)]))
    assert "<td>0.102</td>" in page


def test_figures_are_png_and_svg(written):
    folder, drawn, page = written
    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {f"{plot.name}.{kind}" for plot in drawn for kind in ("png", "svg")}
    assert all(re.fullmatch(r"[a-z-]+\.script-alert-1-script\.(png|svg)", name) for name in names)
    kinds = {
        "error-by-features",
        "heads",
        "error-by-cost",
        "bias-and-variance",
        "predicted-variance",
        "gradients",
    }
    assert {plot.name.split(".")[0] for plot in drawn} == kinds
    for plot in drawn:
        assert (folder / "figures" / f"{plot.name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (folder / "figures" / f"{plot.name}.svg").read_text()
        assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>") and "<script" not in svg
        assert plot.caption[:40] in "".join(Page(page).text)
    assert page.count("<svg ") == len(drawn)


def test_the_same_results_give_the_same_bytes(written, tmp_path):
    folder = written[0]
    drawn = write_figures(ordinary(), tmp_path)
    write_report(ordinary(), tmp_path, f"reassoc fidelity --input '{HOSTILE}'", drawn)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 1 + 2 * len(drawn)
    for name in files:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_users_matplotlib_settings_neither_change_figures_nor_are_changed(written):
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        assert plots(ordinary())[0].png == written[1][0].png
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", SMALL)
def test_odd_results(name):
    page = page_of(SMALL[name]())
    parsed = Page(page)
    assert parsed.open == [] and HOSTILE not in page
    assert not {"nan", "inf", "-inf", "None"} & set(re.findall(r"<t[hd][^>]*>([^<]*)", page))
    page.encode()


def test_synthetic_input_has_figures_of_norm_and_length():
    axes = {HOSTILE: {"norm": 2.0, "length": 64}}
    found = results(
        [("mean", 1, [0.9], NAN, NAN), ("favor+", 64, [0.5], 1.0, 1.0)], model="synthetic",
        provenance={"kind": "synthetic", "axes": axes},
    )  # fmt: skip
    names = {plot.name for plot in plots(found)}
    assert {"error-by-norm.synthetic", "error-by-length.synthetic"} <= names


def test_models_that_share_a_file_name_keep_their_figures_apart():
    first, second = (results([("relu", 8, [0.5], NAN, NAN)], model=m) for m in ("a/b", "a b"))
    both = Results(first.seeds + second.seeds, first.heads + second.heads, first.manifest)
    names = [plot.name for plot in plots(both)]
    assert len(set(names)) == len(names)


def test_a_failure_leaves_the_old_report(written, tmp_path, monkeypatch):
    found = results([("relu", 8, [0.5], NAN, NAN)])
    (tmp_path / "report.html").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_report(found, tmp_path, "reassoc fidelity")
    with pytest.raises(OSError, match="No space"):
        write_figures(found, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "report.html").read_text() == "old"
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["report.html"]


def test_no_figure_is_written_if_one_cannot_be_drawn(tmp_path, monkeypatch):
    drawn = []

    def second_fails(figure, kind):
        drawn.append(kind)
        if len(drawn) == 2:
            raise MemoryError
        return b""

    monkeypatch.setattr(figures_module, "save", second_fails)
    with pytest.raises(MemoryError):
        write_figures(results([("relu", 8, [0.5], NAN, NAN)]), tmp_path)
    assert list(tmp_path.rglob("*")) == []


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_report(results([("relu", 8, [0.5], NAN, NAN)]), tmp_path / "file", "reassoc fidelity")
