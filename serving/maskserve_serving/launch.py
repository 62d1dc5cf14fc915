"""Executes tritonserver or the router so that it ends when the supervisor dies.

Run as `python launch.py PARENT_PID PROGRAM ARGUMENTS…`. A supervisor that is killed cannot stop its
processes, so the kernel kills them (PR_SET_PDEATHSIG, which exec keeps). Not SIGTERM: Triton would
lose the edits in flight as well, and would hold clients and ports for 10 s.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# TRITON-2.51: it puts twice a form's body on the stack of the thread that reads it, and a frame for
# each level of nested JSON: with the usual 8 MiB, a form of 4 MB crashes it. This is address space:
# untouched pages take no memory.
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
