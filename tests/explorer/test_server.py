"""What the server answers to whom: hostile requests get one line, other machines and other sites nothing."""

import contextlib
import json
import socket
import threading
from urllib.parse import quote, urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import uvicorn
from explorer_process import ask

from reassoc._errors import InputError
from reassoc.explorer import page, panels, server
from reassoc.explorer.panels import PANELS, answer

SCRIPT = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
PARAMETERS = sorted({c.name for panel in PANELS.values() for c in panel.controls} | {"q", "k", "v"})
# Signs of an answer that says what is none of the visitor's business.
LEAKS = ("Traceback", 'File "', ".py", "site-packages", "/usr", "/tmp", "/home", "reassoc.explorer", "Error:")


def message(found, status):
    """The one line of a refusal."""
    assert found.status == status, (found.status, found.text[:300])
    assert found.seconds < 1
    assert found.headers["content-type"].startswith("application/json")
    assert found.headers["x-content-type-options"] == "nosniff"
    body = found.json()
    assert list(body) == ["error"] and isinstance(body["error"], str)
    line = body["error"]
    assert 5 < len(line) < 600 and line.isprintable(), line
    assert not [sign for sign in LEAKS if sign in line], line
    return line


def alive(explorer):
    found = ask(explorer, "/api/cost?n=64")
    assert found.status == 200 and found.json()["counts"]["pairs"] == 4096


# ---------------------------------------------------------------------------------------------------------
# What it gives
# ---------------------------------------------------------------------------------------------------------


def test_the_page_and_its_parts(explorer):
    found = ask(explorer, "/")
    assert found.status == 200 and found.headers["content-type"] == "text/html; charset=utf-8"
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for name, kind in [
        (page.STYLE, "text/css"),
        *((f"{module}.js", "text/javascript") for module in page.MODULES),
    ]:
        part = ask(explorer, f"/static/{name}")
        assert part.status == 200 and part.headers["content-type"].startswith(kind), name
        assert part.text == page.asset(name)
    stored = {path.name for path in page.resources.files("reassoc.explorer").joinpath("static").iterdir()}
    assert stored == {page.STYLE, "index.html", *(f"{module}.js" for module in page.MODULES)}


@pytest.mark.parametrize("panel", PANELS)
def test_answers_are_those_of_the_panel(explorer, panel):
    found = ask(explorer, f"/api/{panel}")
    assert found.status == 200 and found.headers["content-type"] == "application/json"
    assert found.text == answer(panel, [])
    assert (
        found.headers["referrer-policy"] == "no-referrer"
        and "access-control-allow-origin" not in found.headers
    )


def test_head_gives_no_body(explorer):
    found = ask(explorer, "/api/cost", method="HEAD")
    assert found.status == 200 and found.text == ""


# ---------------------------------------------------------------------------------------------------------
# Hostile requests
# ---------------------------------------------------------------------------------------------------------

NONSENSE = {
    "huge": "1e308", "endless": "1e999", "minus endless": "-1e999", "nan": "nan", "infinity": "inf",
    "long": "9" * 5000,
    "script": quote(SCRIPT), "image": quote(IMAGE), "nul": "%00", "surrogate": "%ED%A0%80",
    "no utf-8": "%ff%fe",
    "half a percent": "%", "no hexadecimal": "%zz", "lines": "a%0d%0aSet-Cookie:%20a=b", "a list": "[1]",
    "an object": "%7B%7D",
    "a path": "../../etc/passwd", "words": "true", "other digits": quote("١٢"),
    "raw quotes": "'\"`", "a template": "${7*7}%7B%7B7*7%7D%7D",
}  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_in_every_parameter(explorer, text):
    for name in PARAMETERS:
        panel = next((p for p, it in PANELS.items() if name in {*(c.name for c in it.controls), *it.tables}))
        given = {"map": "favor+"} if name in ("m", "seed") else {"map": "dpfp"} if name == "nu" else {}
        given |= dict.fromkeys("qkv", "1,2") | {"v": "1"} if name in "qkv" else {}
        query = "&".join(f"{key}={quote(value)}" for key, value in given.items() if key != name)
        line = message(ask(explorer, f"/api/{panel}?{query}&{name}={text}"), 400)
        assert line.startswith(name), line
    alive(explorer)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("x=1", "unknown parameter 'x'; known: "),
        ("%00=1", "unknown parameter"),
        (f"{quote(SCRIPT)}=1", "unknown parameter"),
        ("%ED%A0%80=1", "unknown parameter"),
        ("n=64&n=64", "n is given twice"),
        ("n=64&r=8&n=128", "n is given twice"),
        ("n=64;r=8", "n must be a number"),
        ("n", "n must be a number"),
        ("n=", "n must be a number"),
        ("N=64", "unknown parameter 'N'"),
        ("__proto__=1", "unknown parameter"),
        ("n=" + "6" * 400_000, "the parameters may take 262,144 characters, got 400,002"),
        ("&".join(f"a{i}=1" for i in range(10_000)), "unknown parameter 'a0'"),
        ("n=64&" * 20_000, "n is given twice"),
    ],
)
def test_nonsense_around_parameters(explorer, query, words):
    assert words in message(ask(explorer, f"/api/cost?{query}"), 400)
    alive(explorer)


def test_ten_thousand_keys(explorer):
    k, v = ";".join(["1,2"] * 10_000), ";".join(["1"] * 10_000)
    line = message(ask(explorer, f"/api/reassociation?q=1,2&k={k}&v={v}"), 400)
    assert line == "k: at most 16 rows, got 10,000"


@pytest.mark.parametrize("size", [600_000, 3_000_000])
def test_an_address_that_is_too_long_for_any_server(explorer, size):
    """Not even read to its end: the connection is answered or closed, and the next one is served."""
    try:
        found = ask(explorer, "/api/cost?n=" + "6" * size)
    except OSError:
        pass
    else:
        assert found.status in (400, 414) and found.seconds < 1
        assert "\n" not in found.text.strip() and not [sign for sign in LEAKS if sign in found.text]
    alive(explorer)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/api/cost", "/static/main.js"])
def test_only_reading(explorer, method, path):
    found = ask(explorer, path, method=method, body=b"n=64" if method != "TRACE" else None)
    assert message(found, 405) == "only GET is answered"


def test_bodies_do_not_matter(explorer):
    assert message(ask(explorer, "/api/cost", method="POST", body=b"x" * 1_000_000), 405)
    found = ask(explorer, "/api/cost?n=64", body=b'{"n": 128}', headers={"Content-Type": "application/json"})
    assert found.status == 200 and found.json()["counts"]["pairs"] == 4096
    alive(explorer)


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/api", "/api/", "/api/nothing", "/api/cost/more", "/static", "/static/",
        "/static/index.html",
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py",
        "/static/..%5c..%5cserver.py", "/static/%00",
        "/static//etc/passwd", "/static/main.js%00.css", "/../../etc/passwd", "//etc/passwd", "/%ff",
        "/api/%ED%A0%80",
        f"/api/{quote(SCRIPT)}", f"/{quote(IMAGE)}", "/docs/../pyproject.toml",
        "/docs/%2e%2e/pyproject.toml",
        "/docs/..%2f..%2fpyproject.toml", "/docs/../../../../../../etc/passwd",
        "/docs/%2e%2e/%2e%2e/etc/passwd", "/docs/nothing",
        "/docs//etc/passwd", "/docs/%00", "/api/cost\x00", "/" + "a" * 10_000, "/docs/" + "a" * 10_000,
        "/docs/" + "a/" * 5_000, "/docs/\udcff",
    ],
)  # fmt: skip
def test_nothing_else_is_there(explorer, path):
    found = ask(explorer, path)
    assert found.status in (400, 404), (found.status, found.text[:200])
    assert found.seconds < 1 and "root:" not in found.text and "[project]" not in found.text
    if found.headers.get("content-type", "").startswith("application/json"):  # else h11 refused it unread
        assert "there is nothing at this address" in message(found, 404)
    else:
        assert found.text == "Invalid HTTP request received."
    alive(explorer)


def test_a_slash_too_many_leads_back_here(explorer):
    found = ask(explorer, "/api/cost/?n=64", headers={"X-Forwarded-Host": "example.com"})
    assert found.status == 307 and found.headers["location"] == f"{explorer}api/cost?n=64"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /api/cost?n=\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    ],
    ids=range(10),
)  # fmt: skip
def test_what_is_not_even_http(explorer, raw):
    place = urlsplit(explorer)
    with socket.create_connection((place.hostname, place.port), timeout=5) as connection:
        connection.settimeout(1)
        with contextlib.suppress(OSError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(65536):
                found += part
            assert found == b"" or found.startswith(b"HTTP/1.1 4"), found[:200]
            assert b"Traceback" not in found
    alive(explorer)


def test_many_at_once(explorer):
    """Requests wait for each other; none is lost."""
    found = []
    threads = [
        threading.Thread(
            target=lambda i=i: found.append(ask(explorer, f"/api/capacity?passes=32&pairs={i}").status)
        )
        for i in (1, 2, 4, 8, 16, 32, 64)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * len(threads)


@pytest.mark.parametrize("panel", PANELS)
def test_the_most_work_that_can_be_asked_for(explorer, panel):
    most = {
        "reassociation": {"q": ";".join(["9,9,9,9"] * 8), "k": ";".join(["9,9,9,9"] * 16),
        "v": ";".join(["9,9,9"] * 16), "map": "dpfp", "nu": "3"},
        "cost": {"n": "1048576", "r": "1024", "e": "1024"},
        "approximation": {"kind": "optimal", "orthogonal": "no", "calibrated": "yes", "qnorm": "4",
        "knorm": "4", "angle": "0"},
        "capacity": {"passes": "32", "pairs": "64", "memory": "favor+", "beta": "0.35"},
        "overwriting": {"memory": "dpfp-2"},
    }[panel]  # fmt: skip
    query = "&".join(f"{name}={quote(value, safe=',;')}" for name, value in most.items())
    found = ask(explorer, f"/api/{panel}?{query}")
    assert found.status == 200 and found.seconds < 3
    assert len(found.text) < 200_000
    found.json()


# ---------------------------------------------------------------------------------------------------------
# Who may ask
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "attacker.localhost.example",
        "127.0.0.1.example.com",
        "10.0.0.1",
        "",
        "[::1]",
        "0.0.0.0",
    ],
)
def test_a_name_that_is_not_this_machine_is_refused(explorer, host):
    """Another site whose name leads here (DNS rebinding) must not read answers."""
    for path in ("/", "/api/cost", "/docs/index.md"):
        found = ask(explorer, path, headers={"Host": host})
        assert found.status == 400 and "pairs" not in found.text and "reassoc" not in found.text
        assert "\n" not in found.text.strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_both_names_of_this_machine(explorer, host):
    assert ask(explorer, "/api/cost", headers={"Host": f"{host}:{urlsplit(explorer).port}"}).status == 200


def test_other_machines_cannot_connect(explorer, elsewhere):
    port = urlsplit(explorer).port
    with pytest.raises(OSError):
        socket.create_connection((elsewhere, port), timeout=2).close()
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        pass  # so the port is the right one


def test_the_socket_is_bound_to_loopback():
    with server._bound(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_or_none():
    with server._bound(0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(InputError, match=f"^--port: {port} is in use; name another"):
            server.serve(port, say=pytest.fail)
    for port in (-1, 65536, 10**30):
        with pytest.raises(InputError, match=f"^--port: {port} cannot be used"):
            server.serve(port, say=pytest.fail)


# ---------------------------------------------------------------------------------------------------------
# A defect inside
# ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def threaded():
    """A server in this process, where its parts can be replaced."""
    with server._bound(0) as listening:
        running = uvicorn.Server(uvicorn.Config(server.application(), http="h11", log_level="critical"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            running.should_exit = True
            thread.join()


def test_a_defect_is_said_to_be_one(monkeypatch):
    def broken(given):
        raise RuntimeError("secret of the house")

    monkeypatch.setitem(PANELS, "cost", PANELS["cost"]._replace(compute=broken))
    panels._answer.cache_clear()
    with threaded() as address:
        found = ask(address, "/api/cost")
        assert found.status == 500 and "secret" not in found.text
        assert found.json() == {
            "error": "this is a defect of the explorer; what happened is in the terminal that runs it"
        }
        assert ask(address, "/api/capacity").status == 200
    panels._answer.cache_clear()


def test_documentation_is_linked_only_where_it_lies(tmp_path, monkeypatch):
    """As written beside the package, or as built; an installed package has none."""
    monkeypatch.setattr(server, "_documents", lambda: (None, ""))
    with threaded() as address:
        assert '"documents":""' in ask(address, "/").text
        assert ask(address, "/docs/concepts/cost.md").status == 404
    (tmp_path / "concepts").mkdir()
    (tmp_path / "concepts" / "cost.html").write_text("<p>costs")
    monkeypatch.setattr(server, "_documents", lambda: (tmp_path, ".html"))
    with threaded() as address:
        assert '"documents":".html"' in ask(address, "/").text
        assert ask(address, "/docs/concepts/cost.html").text == "<p>costs"


def test_data_cannot_end_the_element_that_holds_it(tmp_path):
    """A bench of one's own may have been made by somebody else."""
    bench = json.loads(page.resources.files("reassoc.explorer").joinpath("bench.json").read_text())
    bench["command"] = bench["machine"]["processor"] = "</script><script>alert(1)</script><!--"
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    text, policy = page.served(page.setup(tmp_path))
    assert "</script><script>alert" not in text and "<!--<" not in text and "alert(1)" in text
    assert "unsafe-inline" not in policy
