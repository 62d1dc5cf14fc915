"""Become tritonserver or the router, and end when the supervisor dies.

Run as `python launch.py PARENT_PID PROGRAM ARGUMENTS…`. A supervisor that is killed cannot stop
what it runs, so the kernel is asked to kill it then (PR_SET_PDEATHSIG, which exec keeps). Told
to stop, Triton would lose the edits in flight too, but hold clients and ports for 10 s.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# TRITON-2.51: twice a form's body is put on the stack of the thread that reads it, and a frame for
# each level of nested JSON: with the usual 8 MiB a form of 4 MB kills it. This is address space:
# what is not touched takes no memory.
_STACK_BYTES = 512 * 2**20


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the supervisor died before the worker began")
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY:
        most = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (max(soft, most), hard))
    # For the models' processes (maskserve_common.liveness.SERVER_PID).
    os.environ["MASKSERVE_SERVER_PID"] = str(os.getpid())
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
