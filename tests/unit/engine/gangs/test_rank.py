"""A rank's process ends when nothing more can come through its pipe."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe


def test_it_ends_with_the_process_that_has_its_pipe() -> None:
    parent_end, child_end = Pipe()
    command = [sys.executable, "-m", "maskserve_engine.gangs.rank", str(child_end.fileno())]
    rank = subprocess.Popen(command, pass_fds=(child_end.fileno(),))
    try:
        child_end.close()
        parent_end.close()
        assert rank.wait(timeout=60) == 0
    finally:
        rank.kill()


def test_a_call_that_cannot_be_read_ends_the_process() -> None:
    parent_end, child_end = Pipe()
    command = [sys.executable, "-m", "maskserve_engine.gangs.rank", str(child_end.fileno())]
    rank = subprocess.Popen(command, pass_fds=(child_end.fileno(),), stderr=subprocess.PIPE)
    try:
        parent_end.send_bytes(b"no pickle")
        _, errors = rank.communicate(timeout=60)
    finally:
        rank.kill()
        parent_end.close()
        child_end.close()
    assert rank.returncode == 1
    assert b"UnpicklingError" in errors
