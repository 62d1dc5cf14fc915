"""A process that reads headers like `HeaderProcess` and fails or hangs on some of them."""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection

import msgspec

from maskserve_lora.header_process import HeaderDescription

if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    pipe.recv_bytes()
    pipe.send_bytes(b"ready")
    while True:
        try:
            task = msgspec.msgpack.decode(pipe.recv_bytes())
        except EOFError:
            break
        if task["head"] == b"slow":
            time.sleep(600)
        if task["head"] == b"dead":
            sys.exit(1)
        pipe.send_bytes(msgspec.msgpack.encode(HeaderDescription(rank=7)))
