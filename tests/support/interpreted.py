"""Programs with interpreted kernels in the Triton language, which need no GPU."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import pytest

_TIMEOUT_S = 240
_PRELOADED = ["torch._dynamo", "triton", "maskserve_engine.families.unet.surroundings"]
"""Modules that programs import; each would take some seconds. Our operations load torch's compiler
when they are called.
"""


def run_interpreted(program: str, *args: str) -> None:
    """Run a Python program, and fail if it fails.

    It runs in a separate process: a kernel's definition selects the interpreter, and inductor must
    not see it.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = _server().Process(target=_run, args=(sender, program, args), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(_TIMEOUT_S), f"it runs for more than {_TIMEOUT_S} s"
        failure = receiver.recv()
    except EOFError:
        process.join()
        failure = f"it ended with {process.exitcode}"
    finally:
        process.kill()
    assert not failure, failure


@cache
def _server() -> ForkServerContext:
    """A server that forks processes with the interpreter. It has already imported the
    slow modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def _run(answer: Connection, program: str, args: tuple[str, ...]) -> None:
    sys.argv = ["-c", *args]
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:
        answer.send(traceback.format_exc()[-3000:])
    else:
        answer.send("")
