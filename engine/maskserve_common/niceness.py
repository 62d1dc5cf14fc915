"""Who gives way to whom on the processors of a host, and how far.

Linux shares a processor between threads by niceness: beside one thread of 0, a thread of 5 gets a
quarter, one of 10 a tenth. Only steps and what every edit passes have the niceness of their
process: encoder, decoder, fronts, small pictures, and the router's loop. Any user may raise a
niceness, and none may lower it.
"""

from __future__ import annotations

import os
import threading
from enum import IntEnum


class Niceness(IntEnum):
    """How much nicer than its process each kind of work is."""

    EDITS = 0
    READING = 5
    """The router's reading of long requests."""
    LARGE_PICTURES = 10
    """Pictures above two megapixels in `preprocess` and `postprocess`. Not nicer: beside a worker
    that is always busy on the processor, a photo would take minutes."""
    OPERATIONS = 10
    """Operations, and the priming of results. To register 49 megapixels takes half a second of a
    processor."""
    PAGE = 10


def give_way(role: Niceness) -> None:
    """Give the calling thread the niceness of its role, or that of its creator if it is nicer."""
    process = os.getpriority(os.PRIO_PROCESS, os.getpid())
    thread = threading.get_native_id()  # on Linux a thread has a niceness of its own
    inherited = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(inherited, min(19, process + role)))
