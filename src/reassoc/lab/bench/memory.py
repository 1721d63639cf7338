"""Peak memory of a call, in a process of its own: what is freed before must not hide what is needed.

One helper process imports everything once and forks for each case; it never computes itself, so a fork
finds no threads. In the fork the kernel's high-water mark of resident memory is reset just before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..._memory import forget_peak, resident
from .contenders import Contender
from .gate import arranged, cotangent, perform
from .inputs import make_inputs
from .peers import load_peers
from .settings import Settings

Case = tuple[str, str, int]  # contender, direction, length
PATIENCE = 120  # seconds for one case
WARM = 128  # tokens of the call that warms up: code and threads are nobody's memory
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from reassoc.lab.bench.memory import serve; serve()"
)


def measure_memory(
    settings: Settings, cases: list[Case], progress: Callable[[int], None] | None = None
) -> tuple[list[int | None], str]:
    """Peak bytes beyond inputs and results of each case, ``None`` where not measured; and why not.

    Results are the output, or for ``backward`` the output and all gradients.
    """
    if not sys.platform.startswith("linux"):
        return [None] * len(cases), f"memory is not measured on {sys.platform}: it needs Linux's /proc"
    found: list[int | None] = []
    why = ""
    command = [sys.executable, "-c", _START, json.dumps(sys.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as helper:
        try:
            assert helper.stdin is not None and helper.stdout is not None
            json.dump({"settings": settings.to_json(), "cases": cases}, helper.stdin)
            helper.stdin.close()
            for line in helper.stdout:
                answer = json.loads(line)
                found.append(answer.get("bytes"))
                why = answer.get("why", why)
                if progress is not None:
                    progress(len(found))
        finally:
            helper.kill()
    if len(found) < len(cases):
        why = why or "the process that measures memory ended early"
    return found + [None] * (len(cases) - len(found)), why


def serve() -> None:
    """The helper process: a request on standard input, a line of JSON for each case."""
    from .run import contenders_of

    torch.set_num_threads(1)  # a thread pool would not survive the forks: they would wait for it forever
    request = json.load(sys.stdin)
    load_peers()  # once, for all forks

    def measure(name: str, direction: str, length: int) -> int:
        settings = Settings.from_json(request["settings"])
        torch.set_num_threads(settings.threads)
        contender = next(c for c in contenders_of(settings)[0] if c.name == name)
        return peak(contender, settings, direction, length)

    for case in request["cases"]:
        print(json.dumps(_in_fork(functools.partial(measure, *case))), flush=True)


def _in_fork(measure: Callable[[], int]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            answer: dict[str, Any] = {"bytes": measure()}
        except BaseException as error:
            answer = {"why": f"memory: {type(error).__name__}: {error}".splitlines()[0]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"why": "memory: a case was killed (out of memory or time)"}


def peak(contender: Contender, settings: Settings, direction: str, length: int) -> int:
    """Peak resident bytes of one call in this process, without inputs and results."""
    call, _ = _call(contender, settings, direction, min(length, WARM))
    call()
    call, known = _call(contender, settings, direction, length)
    gc.collect()
    _trim()
    before = resident("VmRSS")
    forget_peak()
    results = call()
    most = resident("VmHWM")
    # The output counts as a result of backward too, though it is freed by then.
    size = sum(t.numel() * t.element_size() for t in results) + (known if direction == "backward" else 0)
    return max(0, most - before - size)


def _call(
    contender: Contender, settings: Settings, direction: str, length: int
) -> tuple[Callable[[], tuple[torch.Tensor, ...]], int]:
    ready = contender.ready(make_inputs(settings, contender.problem, length), direction)
    weight = arranged(cotangent(settings, length), ready)
    return lambda: perform(ready, direction, weight), weight.numel() * weight.element_size()


def _trim() -> None:
    """Give freed memory back to the system, or the call would use it unseen."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: then less is kept back
        ctypes.CDLL(None).malloc_trim(0)
