"""Become tritonserver, and be told to stop when the supervisor dies.

Run as `python launch.py PARENT_PID PROGRAM ARGUMENTS…`: a supervisor that is killed cannot stop its
workers, so the kernel is asked to send them SIGTERM then (PR_SET_PDEATHSIG, which exec keeps).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the supervisor died before the worker began")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
