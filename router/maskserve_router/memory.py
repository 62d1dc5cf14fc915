"""How this process keeps its memory."""

from __future__ import annotations

import ctypes

# malloc.h of glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 2**20


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next picture, and no more.

    By default each block of a picture's size is fetched from the kernel and given back: its pages
    are faulted in and zeroed for every copy. Kept, passing a picture on takes half the CPU time.
    Larger blocks are still given back, and what is kept lies in two arenas, not in one for each
    thread: else what somebody sent once stays for good. Other C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_ARENA_MAX, 2)
    mallopt(_MMAP_THRESHOLD, 8 * _MIB)
    mallopt(_TRIM_THRESHOLD, 64 * _MIB)
    mallopt(_TOP_PAD, 16 * _MIB)
