"""The benchmark as a whole: gate before clock, limits, memory, resuming, and what is written."""

import csv
import dataclasses
import json
import re
import sys

import pytest
import torch

pytest.importorskip("matplotlib")

from reassoc.lab.bench import Problem, Settings, bench, forget_parts, write_tables
from reassoc.lab.bench import ceilings as ceilings_module
from reassoc.lab.bench import memory as memory_module
from reassoc.lab.bench import run as run_module
from reassoc.lab.bench.contenders import Ready, ours, plain, softmax
from reassoc.lab.bench.figures import write_figures
from reassoc.lab.bench.memory import measure_memory, peak
from reassoc.lab.bench.report import render, write_report

SUM = Problem("elu+1", "sum")
TINY = Settings(
    lengths=(16, 40), problems=(SUM,), peers=(), heads=2, head_dim=8, value_dim=8, repeats=2, limit=60.0,
    directions=("forward", "backward", "step"),
)  # fmt: skip
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(
        run_module, "measure_ceilings", lambda s: {"flops": 1e11, "flops_from": "a test", "bytes": 1e10}
    )
    monkeypatch.setattr(ceilings_module, "COPIED", 1 << 16)


@pytest.fixture()
def no_memory(monkeypatch):
    monkeypatch.setattr(run_module, "measure_memory", lambda s, cases, progress: ([None] * len(cases), "off"))


def run(settings=TINY, contenders=None, **options):
    given = [ours(settings, SUM, "auto"), softmax(settings), plain(settings)]
    return bench(settings, contenders=given if contenders is None else contenders, **options)


def wrong(settings, name="planted"):
    """Fast, and a thousandth off."""
    base = ours(settings, SUM, "auto")

    def prepare(inputs):
        ready = base.prepare(inputs)
        return ready._replace(run=lambda: 1.001 * ready.run())

    return dataclasses.replace(
        base, name=name, kind="peer", prepare=prepare, directions=("forward", "backward")
    )


def test_every_contender_is_judged_timed_and_compared():
    results = run()
    assert len(results.rows) == 2 * (3 + 3 + 2)  # the yardstick has no step
    for row in results.rows:
        assert row["status"] == "measured" and row["error"] <= row["budget"] and row["reason"] == ""
        assert len(row["samples"]) == TINY.repeats and row["calls"] >= 1
        assert 0 < row["lower"] <= row["seconds"] <= row["upper"]
        assert row["share"] == pytest.approx(row["flops"] / row["seconds"] / 1e11)
        assert (row["held"] > 0) == (row["direction"] == "step")
    assert len(results.ratios) == 2 * (2 + 2 + 1) and all(r["ratio"] > 0 for r in results.ratios)
    assert len(results.crossovers) == 2 + 2 + 1
    state, cache = (
        [r["held"] for r in results.rows if r["direction"] == "step" and r["contender"] == name]
        for name in ("elu+1 sum", "softmax (SDPA)")
    )
    assert state[0] == state[1] and cache[1] > cache[0]  # constant, and growing


def test_the_speed_of_a_wrong_result_is_nowhere(tmp_path):
    calls = []
    planted = wrong(TINY)
    prepare = planted.prepare
    planted = dataclasses.replace(planted, prepare=lambda i: calls.append(0) or prepare(i), exact=True)
    results = run(contenders=[ours(TINY, SUM, "auto"), softmax(TINY), planted])
    rows = [row for row in results.rows if row["contender"] == "planted"]
    assert len(rows) == 4 == len(calls)  # judged once each, never prepared for the clock
    for row in rows:
        assert row["status"] == "wrong" and "not timed" in row["reason"] and row["error"] > row["budget"]
        empty = (
            "samples",
            "seconds",
            "lower",
            "upper",
            "share",
            "calls",
            "memory",
            "flops",
            "share_of_limit",
        )
        assert all(row[name] is None for name in empty)
    pairs = [pair for pair in results.ratios if pair["other"] == "planted"]
    assert len(pairs) == 4 and all(p["ratio"] is None and p["status"] == "wrong" for p in pairs)
    assert not [c for c in results.crossovers if c["other"] == "planted"]

    write_tables(results, tmp_path, "reassoc bench")
    with (tmp_path / "bench.csv").open() as file:
        written = [line for line in csv.DictReader(file) if line["contender"] == "planted"]
    assert len(written) == 4 and all(line["status"] == "wrong" and line["seconds"] == "" for line in written)
    page = render(results, "reassoc bench", [])
    cells = re.findall(r"<tr><th[^>]*>planted</th>.*?</tr>", page)
    assert len(cells) == 4 and all("wrong" in cell for cell in cells)
    assert page.count('<span class="warn">wrong</span>') == 8  # four ratios, four times
    assert "planted, forward, 16: relative error" in page


def test_one_who_fails_stops_nobody():
    def boom(inputs):
        raise RuntimeError("no such\nkernel")

    failing = dataclasses.replace(wrong(TINY, "failing"), prepare=boom)
    results = run(contenders=[ours(TINY, SUM, "auto"), failing])
    rows = [row for row in results.rows if row["contender"] == "failing"]
    assert rows and all(row["status"] == "skipped" for row in rows)
    assert rows[0]["reason"] == "failed: RuntimeError: no such"
    assert all(row["status"] == "measured" for row in results.rows if row["contender"] == "elu+1 sum")


def test_what_would_take_too_long_is_left_out_before_it_is_run():
    seen = []
    base = softmax(TINY)

    def prepare(inputs):
        seen.append(inputs.query.shape[2])
        return base.prepare(inputs)

    slow = dataclasses.replace(base, prepare=prepare)
    settings = dataclasses.replace(TINY, lengths=(8, 8192), directions=("forward",), limit=0.1)
    (short, long) = bench(settings, contenders=[slow]).rows
    assert short["status"] == "measured"
    known = min(short["samples"])
    if known * 1024**2 > 0.1:  # quadratic: 1024 times the tokens
        assert long["status"] == "skipped" and "the limit is 0.1 s" in long["reason"]
        assert long["seconds"] is None and set(seen) == {8}


def test_limits_go_by_the_power_of_each(monkeypatch):
    row = {}
    known = {"softmax (SDPA)": (100, 0.01), "elu+1 sum": (100, 0.01)}
    settings = dataclasses.replace(TINY, limit=0.5)
    for contender, direction, fits in (
        (softmax(settings), "forward", False),  # 100 times
        (softmax(settings), "step", True),  # 10 times
        (ours(settings, SUM, "auto"), "forward", True),
    ):
        assert run_module._affordable(contender, settings, direction, 1000, known, row) is fits


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    seen = []
    base = ours(TINY, SUM, "auto")
    looking = dataclasses.replace(
        base, prepare=lambda i: seen.append(torch.get_num_threads()) or base.prepare(i)
    )
    run(dataclasses.replace(TINY, threads=before + 1, directions=("forward",)), [looking])
    assert set(seen) == {before + 1} and torch.get_num_threads() == before


def test_bidirectional_has_no_steps_and_delta_rules_say_why():
    settings = dataclasses.replace(TINY, causal=False)
    delta = Problem("identity", "delta")
    results = bench(settings, contenders=[ours(settings, SUM, "auto"), ours(settings, delta, "auto")])
    assert {row["direction"] for row in results.rows} == {"forward", "backward"}
    by = {row["contender"]: row for row in results.rows}
    assert by["elu+1 sum"]["status"] == "measured"
    assert by["identity delta"]["status"] == "skipped" and "causal" in by["identity delta"]["reason"]


def test_an_interrupted_run_continues(monkeypatch, tmp_path, no_memory):
    original, cells = run_module._cell, []

    def cell(contenders, settings, direction, length, known, report):
        if len(cells) == 3:
            raise KeyboardInterrupt
        cells.append((direction, length))
        return original(contenders, settings, direction, length, known, report)

    monkeypatch.setattr(run_module, "_cell", cell)
    with pytest.raises(KeyboardInterrupt):
        bench(TINY, resume=tmp_path)
    (folder,) = tmp_path.glob(".unfinished-*")
    assert len(list(folder.glob("*ward-*.json"))) == 3
    first = json.loads((folder / "forward-16.json").read_text())
    (folder / "forward-40.json").write_text("{")  # damaged
    cells.clear()
    monkeypatch.setattr(run_module, "_cell", lambda *a: cells.append((a[2], a[3])) or original(*a))
    results = bench(TINY, resume=tmp_path)
    assert cells == [("forward", 40), ("backward", 40), ("step", 16), ("step", 40)]
    assert [r["samples"] for r in results.rows[: len(first)]] == [r["samples"] for r in first]
    cells.clear()
    bench(dataclasses.replace(TINY, seed=1), resume=tmp_path)  # another run shares nothing
    assert len(cells) == 6
    forget_parts(tmp_path, results)
    assert not folder.exists() and len(list(tmp_path.glob(".unfinished-*"))) == 1


def test_files_hold_everything(tmp_path):
    results = run(dataclasses.replace(TINY, directions=("forward", "step")))
    results.rows[0]["error"] = float("nan")
    write_tables(results, tmp_path / "new", "reassoc bench --lengths 16,40")
    figures = write_figures(results, tmp_path / "new")
    report = write_report(results, tmp_path / "new", "reassoc bench --lengths 16,40", figures)
    whole = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert whole["command"] == "reassoc bench --lengths 16,40" and whole["format"] == "reassoc-bench-1"
    assert set(whole) >= {
        "versions",
        "machine",
        "settings",
        "peers",
        "ceilings",
        "ratios",
        "crossovers",
        "rows",
    }
    assert len(whole["rows"][1]["samples"]) == 2 and whole["rows"][0]["error"] == "nan"
    assert whole["machine"]["processor"] and whole["versions"]["torch"] == torch.__version__
    names = {p.name for p in (tmp_path / "new" / "figures").iterdir()}
    assert names == {
        f"{what}.{way}.{kind}"
        for what in ("ratios", "times", "share-of-peak") for way in ("forward", "step")
        for kind in ("png", "svg")
    }  # fmt: skip
    with (tmp_path / "new" / "ratios.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(results.ratios) and float(lines[0]["ratio"]) > 0
    page = report.read_text(encoding="utf-8")
    assert "reassoc bench --lengths 16,40" in page and "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<svg") == 6 and page.index('<h2 id="ratios"') < page.index('<h2 id="times"')
    assert "Nothing was left out." in page


@linux
def test_peak_memory_is_what_a_call_needs_beyond_inputs_and_results():
    settings = dataclasses.replace(TINY, threads=torch.get_num_threads())
    base = ours(settings, SUM, "auto")
    size = 48 << 20

    def greedy(inputs):
        q = inputs.query

        def run():
            if q.shape[2] > 16:
                scratch = torch.ones(size // 4)
                return q + scratch[:1]
            return q + 1

        return Ready(run, inputs.tensors)

    found = peak(dataclasses.replace(base, prepare=greedy), settings, "forward", 200)
    assert 0.97 * size <= found < 1.25 * size  # the kernel counts in batches of pages

    def lavish(inputs):  # its result is as large, and is not counted
        return Ready(lambda: torch.ones(size // 4), inputs.tensors)

    assert peak(dataclasses.replace(base, prepare=lavish), settings, "forward", 16) < size // 4


@linux
def test_memory_is_measured_in_another_process():
    settings = dataclasses.replace(TINY, lengths=(1024,), directions=("forward",))
    cases = [("softmax (SDPA)", "forward", 1024), ("elu+1 sum", "backward", 1024), ("nobody", "forward", 16)]
    steps = []
    sizes, why = measure_memory(settings, cases, steps.append)
    assert sizes[2] is None and "StopIteration" in why  # one that fails stops nobody
    assert 0 <= sizes[0] < 8 << 20 and 64 << 10 < sizes[1] < 64 << 20
    assert steps == [1, 2, 3]


def test_where_memory_cannot_be_measured_it_is_said(monkeypatch):
    monkeypatch.setattr(memory_module.sys, "platform", "darwin")
    sizes, why = measure_memory(TINY, [("a", "forward", 16)])
    assert sizes == [None] and "not measured on darwin" in why


@linux
def test_a_helper_that_dies_leaves_nothing_hanging(monkeypatch):
    monkeypatch.setattr(memory_module, "_START", "raise SystemExit(3)")
    sizes, why = measure_memory(TINY, [("a", "forward", 16)])
    assert sizes == [None] and "ended early" in why
