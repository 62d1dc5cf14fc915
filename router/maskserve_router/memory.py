"""Settings of glibc's allocator for the router."""

from __future__ import annotations

import ctypes

# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 2**20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next picture, within limits.

    By default, a block of a picture's size is fetched from the kernel and given back each time, and
    its pages are faulted in and zeroed for every copy. Larger blocks are still given back. All
    threads share two arenas, so that one large request does not hold memory for ever. Other C
    libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_ARENA_MAX, 2)
    mallopt(_MMAP_THRESHOLD, 8 * _MIB)
    mallopt(_TRIM_THRESHOLD, 64 * _MIB)
    mallopt(_TOP_PAD, 16 * _MIB)
