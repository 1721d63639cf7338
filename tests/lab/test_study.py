"""What a study writes: whole, self-contained, escaped, the same bytes twice; and on a terminal."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import typer
from typer.main import get_command

from reassoc.cli._command import command
from reassoc.cli._show_study import show_study
from reassoc.lab._page import columns, tag
from reassoc.lab._plot import new_figure, styled
from reassoc.lab._progress import progress_bar
from reassoc.lab._study import Section, Study, write_study
from reassoc.lab.figures import Plot

NAN, INF = float("nan"), float("inf")
HOSTILE = '<script>alert(1)</script> & "q" $x_{$'


@styled
def drawing():
    figure = new_figure(3)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label=HOSTILE)
    axes.set_title(HOSTILE)
    return figure


def study(**changes):
    rows = [
        {"map": HOSTILE, "pairs": 20, "loss": 0.123456789, "limit": None},
        {"map": "elu+1", "pairs": 40, "loss": NAN, "limit": INF},
    ]
    cells = [HOSTILE, "20", tag("span", HOSTILE, class_="warn")]
    about = {
        "name": "trial", "title": f"What about {HOSTILE}?", "lead": HOSTILE,
        "answer": [f"First {HOSTILE}", f"Second {HOSTILE}"], "rows": rows,
        "manifest": {
            "versions": {"torch": HOSTILE}, "machine": {"threads": 1}, "settings": {"bad": [NAN, -INF]},
        },
        "sections": [
            Section(HOSTILE, HOSTILE, columns("<map, pairs, <loss"), [("chosen", cells)]),
            Section("Words alone", "A paragraph."),
        ],
        "figures": [
            Plot("line", HOSTILE, HOSTILE, HOSTILE, drawing()), Plot("more", "", "T", "C", drawing()),
        ],
        "definitions": [(HOSTILE, HOSTILE)], "limits": [HOSTILE], "more": {"curves": [{"step": 1, "x": INF}]},
    }  # fmt: skip
    return Study(**(about | changes))


class Page(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_everything_is_written_escaped_and_in_order(tmp_path):
    path = write_study(study(), tmp_path / "new" / "folder", f"reassoc trial {HOSTILE}")
    assert path == tmp_path / "new" / "folder" / "report.html"
    names = {str(p.relative_to(path.parent)) for p in path.parent.rglob("*") if p.is_file()}
    assert names == {
        "report.html", "trial.csv", "curves.csv", "trial.json",
        *(f"figures/{name}.{kind}" for name in ("line", "more") for kind in ("png", "svg")),
    }  # fmt: skip
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page
    parsed = Page(page)
    assert parsed.open == []
    text = "".join(parsed.text)
    assert (
        text.count(HOSTILE) >= 12
    )  # title, lead, answers, sections, cells, captions, words, limits, command
    assert text.index("First") < text.index("Second") < text.index("A paragraph.")
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in parsed.elements:
        assert name not in ("script", "link", "img", "iframe")
        for key, value in attributes.items():
            if key.endswith("href"):
                assert value.startswith("#") and value[1:] in ids


def test_numbers_in_the_files(tmp_path):
    write_study(study(), tmp_path, "reassoc trial")
    with (tmp_path / "trial.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["map", "pairs", "loss", "limit"], [HOSTILE, "20", "0.123457", ""], ["elu+1", "40", "", "inf"],
        ]  # fmt: skip

    def refuse(word):
        raise AssertionError(word)

    whole = json.loads((tmp_path / "trial.json").read_text(), parse_constant=refuse)
    assert whole["command"] == "reassoc trial" and whole["settings"] == {"bad": ["nan", "-inf"]}
    assert whole["rows"][1]["limit"] == "inf" and "curves" not in whole
    assert (tmp_path / "curves.csv").read_text() == "step,x\n1,inf\n"
    assert whole["answer"] == study().answer


def test_the_same_study_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_study(study(), tmp_path / name, "reassoc trial")
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) == 8
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_failure_leaves_the_earlier_results(tmp_path, monkeypatch):
    write_study(study(), tmp_path, "reassoc trial")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("reassoc.lab.figures.save", fail)
    with pytest.raises(MemoryError):
        write_study(study(title="another", rows=[{"x": 1}]), tmp_path, "reassoc other")
    monkeypatch.undo()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_study(study(title="another"), tmp_path, "reassoc other")
    monkeypatch.undo()
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {p.name for p in before}
    assert (tmp_path / "report.html").read_bytes() == before[tmp_path / "report.html"]
    assert (tmp_path / "trial.json").read_bytes() == before[tmp_path / "trial.json"]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_study(study(), tmp_path / "file", "reassoc trial")


def test_terminal_shows_the_answer_and_whole_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [("", ["x" * 60, "1", tag("b", "<&>")]), ("", ["[bold]y", "2", "line\nbreak\x1b[31m"])]
    wide = Section("Wide", "", columns("<name of the map, number of pairs, <what was seen"), lines)
    show_study(study(sections=[wide, Section("Words alone", "A paragraph.")]))
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    assert out.index("First") < out.index("Second") < out.index("Wide")
    assert "x" * 60 in out and "[bold]y" in out and "<&>" in out and "line?break?[31m" in out
    assert all(word in out for word in ("name", "map", "pairs", "seen"))


def test_no_progress_without_a_terminal(capsys):
    with progress_bar("trial") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_command_says_what_differs_from_the_defaults(tmp_path, capsys):
    app = typer.Typer()

    @app.command()
    def trial(
        context: typer.Context,
        keys: Path = typer.Option(None),
        pairs: str = typer.Option(None),
        max_steps: int = typer.Option(5),
        closed: bool = typer.Option(True, "--closed/--open"),
        quick: bool = typer.Option(False, "--quick"),
        out: Path = typer.Option(Path("trial")),
    ):
        typer.echo(command(context))

    def said(*arguments):
        get_command(app).main(args=list(arguments), prog_name="x", standalone_mode=False)
        return capsys.readouterr()[0].strip()

    assert said() == said("--max-steps", "5", "--out", str(tmp_path)) == "reassoc trial"
    assert said("--keys", str(tmp_path / "a b.safetensors"), "--pairs", "1,2", "--max-steps", "7") == (
        "reassoc trial --keys 'a b.safetensors' --pairs 1,2 --max-steps 7"
    )
    assert said("--open", "--quick") == "reassoc trial --open --quick"
