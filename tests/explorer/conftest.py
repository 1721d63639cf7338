"""One explorer as a process of its own, as people run it; one browser per file of tests."""

import socket

import pytest
from explorer_browser import Visitor, launched
from explorer_process import running


@pytest.fixture(scope="session")
def explorer():
    """Address of `reassoc explore`; the end of the session is its Ctrl-C."""
    for needed in ("typer", "starlette", "uvicorn"):
        pytest.importorskip(needed)
    with running() as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    """Chromium. Closed after each file: Playwright holds the event loop of its thread while it is open."""
    with launched() as chromium:
        yield chromium


@pytest.fixture()
def visit(browser, explorer):
    """Opens the explorer with parameters; at the end nothing may have been said, or fetched elsewhere."""
    visitor = Visitor(browser, explorer)
    yield visitor.visit
    visitor.leave()


@pytest.fixture(scope="session")
def elsewhere():
    """An address of this machine that is not loopback, or the test is skipped."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses a route; sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    return address
