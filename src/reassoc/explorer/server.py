"""The page on this machine: loopback only, every request capped, no stack trace in an answer."""

from __future__ import annotations

import contextlib
import errno
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .._errors import InputError
from .._threads import use_threads
from . import page
from .panels import PANELS, answer

HOST = "127.0.0.1"
PORT = 8420
LONGEST = 1 << 18  # characters of a query string
_TYPES = {".js": "text/javascript", ".css": "text/css"}


def serve(
    port: int = PORT,
    *,
    bench: Path | None = None,
    open_browser: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until interrupted.

    Args:
        port: on the loopback address; 0 takes a free one. bench: folder of `reassoc bench` whose times to
            show. open_browser: open the page once it is there. say: gets the address, and what goes wrong.

    Raises:
        InputError: the port is taken or not allowed, or ``bench`` holds no results.
    """
    app = application(bench)
    with _bound(port) as listening:
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        say(f"Explorer: {address}  (Ctrl-C ends it)")
        # The socket listens already: a request before the server runs waits.
        if open_browser and not webbrowser.open(address):
            say("No browser could be opened here: open that address yourself.")
        options: dict[str, Any] = {"log_level": "warning", "h11_max_incomplete_event_size": 2 * LONGEST}
        # Tensors here are tiny: waking a second thread costs more than it brings. Ctrl-C is how it ends.
        with use_threads(1), contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, http="h11", **options)).run(sockets=[listening])


def application(bench: Path | None = None) -> Starlette:
    """The application, for a server of one's own.

    Raises:
        InputError: ``bench`` holds no results.
    """
    documents, suffix = _documents()
    text, policy = page.served(page.setup(bench) | {"documents": suffix})

    async def index(request: Request) -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    routes = [
        Route("/", index),
        Route("/static/{name}", _static),
        Route("/api/{panel}", _api),
        *([Mount("/docs", StaticFiles(directory=documents, html=True))] if documents else []),
    ]
    # Another site that resolves its own name to this machine must not read answers.
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    handlers: Any = {404: _refused, 405: _refused, 500: _failed}
    return Starlette(routes=routes, middleware=[guard, Middleware(_Headers)], exception_handlers=handlers)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in {page.STYLE, *(f"{module}.js" for module in page.MODULES)}:
        return _refused(request, None)
    return Response(page.asset(name), media_type=_TYPES[Path(name).suffix])


async def _api(request: Request) -> Response:
    # Computed here and not in a thread: one at a time is what this machine can do, and none takes long.
    name = request.path_params["panel"]
    if name not in PANELS:
        return _refused(request, None)
    query = request.scope["query_string"].decode("ascii", "replace")
    try:
        if len(query) > LONGEST:
            raise InputError(f"the parameters may take {LONGEST:,} characters, got {len(query):,}")
        found = answer(name, parse_qsl(query, keep_blank_values=True, errors="replace"))
    except InputError as error:
        return JSONResponse({"error": " ".join(str(error).split())}, status_code=400)
    return Response(found, media_type="application/json")


def _refused(request: Request, error: Exception | None) -> Response:
    status = getattr(error, "status_code", 404)
    known = "/, " + ", ".join(f"/api/{name}" for name in PANELS)
    words = {404: f"there is nothing at this address; there are {known}", 405: "only GET is answered"}
    return JSONResponse({"error": words[status]}, status_code=status)


def _failed(request: Request, error: Exception) -> Response:
    message = "this is a defect of the explorer; what happened is in the terminal that runs it"
    return JSONResponse({"error": message}, status_code=500)


class _Headers:
    """What every answer carries."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def dressed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        await self.app(scope, receive, dressed)


def _documents() -> tuple[Path | None, str]:
    """The folder of the documentation, and how its pages end: built, else as written, else none."""
    root = Path(__file__).parents[3] / "docs"
    for folder, suffix in ((root / "_build" / "html", ".html"), (root, ".md")):
        if (folder / f"concepts/cost{suffix}").is_file():
            return folder, suffix
    return None, ""


def _bound(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        why = "is in use" if taken else "cannot be used"
        raise InputError(f"--port: {port} {why}; name another, or 0 for any that is free") from None
    return listening
