"""`reassoc explore`: what it says, how it ends, and one line for every mistake."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from reassoc.cli._app import run

PROGRAM = "from reassoc.cli import main; main()"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """80 columns; no stray files."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def refused(capsys, *arguments):
    """The one line on standard error; nothing is served."""
    assert run(["explore", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reassoc: ") and err.count("\n") == 1, err
    return err


def test_help_tells_enough(capsys):
    assert run(["explore", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.replace("│", " ").split())
    for option in ("--port", "--open", "--bench", "--export"):
        assert f"{option} " in words, option
    for said in (
        "on this machine", "nobody else can reach it", "Ctrl-C", "0 takes a free one", "default: 8420",
        "reassoc bench",
        "reassoc explore --open", "reassoc explore --export explorer.html", "from another machine",
    ):  # fmt: skip
        assert said in words, said


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
@pytest.mark.parametrize("arguments", [[], ["--export", "page.html"]], ids=["serve", "export"])
def test_what_to_install_is_said(package, arguments, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(capsys, *arguments) == "reassoc: explore needs: pip install 'reassoc[explore]'\n"
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert refused(capsys, "--port", port).startswith(f"reassoc: --port: {port} is in use; name another")


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999999999999", "http", ""])
def test_what_is_no_port(capsys, port):
    assert "port" in refused(capsys, "--port", port)


def test_a_bench_that_is_none(capsys, tmp_path):
    assert "holds no bench.json; run: reassoc bench --out missing" in refused(capsys, "--bench", "missing")
    for text in ("{", "[]", "[" * 100_000, json.dumps({"rows": "<script>"}), '{"rows": NaN}'):
        (tmp_path / "bench.json").write_text(text)
        for more in ([], ["--export", "page.html"]):
            assert "holds no readable results of reassoc bench" in refused(capsys, "--bench", ".", *more)
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json"}


@pytest.mark.parametrize("file", ["page", "page.txt", "page.html.gz", "."])
def test_an_export_is_html(capsys, file):
    assert f"--export: name a file that ends in .html, got {file}" in refused(capsys, "--export", file)


@pytest.mark.parametrize("file", ["missing/page.html", "folder.html"])
def test_an_export_that_cannot_be_written(capsys, tmp_path, file):
    (tmp_path / "folder.html").mkdir()
    assert file.split("/")[0] in refused(capsys, "--export", file)


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminated"])
def test_it_ends_quietly(end):
    """Address on standard output, then nothing more; the port is free again."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "explore", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ,
        "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line.startswith("Explorer: http://127.0.0.1:") and line.endswith("/  (Ctrl-C ends it)\n")
            port = int(line.split(":")[3].split("/")[0])
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.1 200"
            process.send_signal(end)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (out, err) == ("", "")
    assert process.returncode == (0 if end == signal.SIGINT else -signal.SIGTERM)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_the_browser_is_opened_at_the_address(monkeypatch, capsys):
    from reassoc.explorer import server

    opened = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: None)
    for arguments, times in ((["--port", "0"], 0), (["--port", "0", "--open"], 1)):
        assert run(["explore", *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == "" and len(opened) == times
    assert opened[0] in out
