"""What OpenAI's image-edits API adds to an edit over KServe, through the same router.

    python scripts/bench front_doors --json docs/benchmarks/front_doors.json

The worker answers at once with a picture as large as the one that was sent, so nothing hides what
the way costs. Calls of the same image and mask go through the router by KServe's gRPC, by its HTTP
with binary tensors, and by `/v1/images/edits` as a multipart form, in turn: whatever else the
machine does, it does to all three. Requests are made beforehand; answers are read whole, and what
a client makes of them is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image

from maskserve_harness.benchmarks.machine import machine
from maskserve_harness.cluster.fleet import worker
from maskserve_harness.cluster.requests import INFER, OPTIONS, edit_request, picture
from maskserve_harness.cluster.site import RouterSite

SIZES = {"1 KB": 1000, "1.5 MB": 1_500_000}
BAR_MS = 5.0
"""What OpenAI's form may add to KServe's HTTP, as medians, at any size."""
_CALLS = {"1 KB": 300, "1.5 MB": 150}
_SIDE = 64
_BOUNDARY = "a-part-of-a-form"


def main() -> int:
    """Measure, tell, and hold the figure to its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    sizes = measure()
    added = max(figures["openai"] - figures["http"] for figures in sizes.values())
    report = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": machine(),
        "date": date.today().isoformat(),
        "p50_ms": sizes,
        "openai_added_p50_ms": round(added, 3),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    print("| image and answer (p50) | KServe gRPC | KServe HTTP | OpenAI | added | bar |")
    print("|---|---|---|---|---|---|")
    for size, p50 in sizes.items():
        print(
            f"| {size} | {p50['grpc']:.2f} ms | {p50['http']:.2f} ms | {p50['openai']:.2f} ms "
            f"| **{p50['openai'] - p50['http']:.2f} ms** | {BAR_MS:g} ms |"
        )
    print(json.dumps({"openai_added_p50_ms": report["openai_added_p50_ms"]}))
    if added > BAR_MS:
        print(f"MISSED: {added:.1f} ms are added, above {BAR_MS:g}")
        return 1
    return 0


def measure() -> dict[str, dict[str, float]]:
    """Median milliseconds of a call by each way, by size."""
    p50 = {}
    for name, size in SIZES.items():
        image = picture(_SIDE, size)
        with ExitStack() as held:
            address = held.enter_context(worker(answer=image))
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            site = held.enter_context(RouterSite([address], folder))
            channel = held.enter_context(grpc.insecure_channel(site.grpc_url, OPTIONS))
            taken: dict[str, list[float]] = {"grpc": [], "http": [], "openai": []}
            calls = {
                "grpc": _grpc(channel, image),
                "http": _post(site, "/v2/models/edit/infer", *_kserve(image)),
                "openai": _post(site, "/v1/images/edits", *_form(image)),
            }
            for number in range(_CALLS[name] + 5):
                for way, call in calls.items():
                    begin = time.perf_counter()
                    call()
                    if number >= 5:  # the first ones open connections
                        taken[way].append(1e3 * (time.perf_counter() - begin))
        p50[name] = {way: round(statistics.median(times), 3) for way, times in taken.items()}
    return p50


def _mask() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """RGBA, transparent in the middle: what both ways take."""
    mask = np.full((_SIDE, _SIDE, 4), 255, np.uint8)
    mask[16:48, 16:48, 3] = 0
    return mask


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _grpc(channel: grpc.Channel, image: bytes) -> Callable[[], Any]:
    call = channel.unary_unary(INFER)
    request = edit_request(image, _png(_mask()), num_inference_steps=4)
    return lambda: call(request)


def _kserve(image: bytes) -> tuple[bytes, dict[str, str]]:
    """The body and headers of KServe's binary extension."""
    settings = json.dumps({"num_inference_steps": 4}).encode()
    values = {"IMAGE": image, "MASK": _png(_mask()), "PROMPT": b"a red star", "SETTINGS": settings}
    inputs, binary = [], b""
    for name, value in values.items():
        raw = struct.pack("<I", len(value)) + value
        told = {"name": name, "datatype": "BYTES", "shape": [1]}
        inputs.append({**told, "parameters": {"binary_data_size": len(raw)}})
        binary += raw
    head = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    header = json.dumps(head).encode()
    return header + binary, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }


def _form(image: bytes) -> tuple[bytes, dict[str, str]]:
    """The body and headers of OpenAI's form."""
    parts = []
    for name, text in {"prompt": "a red star", "num_inference_steps": "4"}.items():
        parts.append(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode())
    for name, file in {"image": image, "mask": _png(_mask())}.items():
        told = f'Content-Disposition: form-data; name="{name}"; filename="{name}.png"\r\n'
        parts.append(f"{told}Content-Type: image/png\r\n\r\n".encode() + file)
    edge = f"--{_BOUNDARY}\r\n".encode()
    body = b"".join(edge + part + b"\r\n" for part in parts) + f"--{_BOUNDARY}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}


def _post(site: RouterSite, path: str, body: bytes, headers: dict[str, str]) -> Callable[[], bytes]:
    """One call over a connection that stays open; its answer's body."""
    connection = http.client.HTTPConnection(site.http_url, timeout=30)
    connection.connect()
    # Else a small body waits for the receipt of its headers, 40 ms.
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call() -> bytes:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        read = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {read[:300]!r}")
        return read

    return call
