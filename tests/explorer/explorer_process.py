"""`reassoc explore` in a process, and plain requests to it."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple
from urllib.parse import urlsplit

PROGRAM = "from reassoc.cli import main; main()"


@contextlib.contextmanager
def running():
    """The address. Ends by Ctrl-C; whatever was asked meanwhile, no defect may have shown itself."""
    command = [sys.executable, "-c", PROGRAM, "explore", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            line = process.stdout.readline()  # empty if the process ends without one
            found = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert found, line
            yield found[0]
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()
        log.seek(0)
        # uvicorn says one itself: of a request whose body breaks off while it is being answered.
        defects = log.read().split("Exception in ASGI application")[1:]
        assert not [each for each in defects if "h11._util.LocalProtocolError" not in each]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str
    seconds: float

    def json(self):
        return json.loads(self.text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def ask(address, target, method="GET", headers=None, body=None):
    """One request, its target sent as it is."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    # What stands in the way of sending nonsense on purpose.
    connection._validate_path = lambda url: None
    connection._encode_request = lambda request: request.encode("utf-8", "surrogateescape")
    with contextlib.closing(connection):
        start = time.perf_counter()
        connection.request(method, target, body=body, headers=headers or {})
        response = connection.getresponse()
        text = response.read().decode()
        seconds = time.perf_counter() - start
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, text, seconds)
