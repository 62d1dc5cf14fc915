"""A rank's process ends when nothing more can come through its pipe."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe


def test_it_ends_with_the_process_that_has_its_pipe() -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "maskserve_engine.gangs.rank", str(theirs.fileno())]
    rank = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    try:
        theirs.close()
        ours.close()
        assert rank.wait(timeout=60) == 0
    finally:
        rank.kill()


def test_a_call_that_cannot_be_read_ends_the_process() -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "maskserve_engine.gangs.rank", str(theirs.fileno())]
    rank = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
    try:
        ours.send_bytes(b"no pickle")
        _, said = rank.communicate(timeout=60)
    finally:
        rank.kill()
        ours.close()
        theirs.close()
    assert rank.returncode == 1
    assert b"UnpicklingError" in said
