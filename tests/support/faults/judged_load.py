"""Edits with known answers, sent to a router. An answer is right, wrong, an error, or missing."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_benchmarks.soak.visitor import DONE, Unexpected
from maskserve_benchmarks.triton_calls import (
    CLIENT_CANCELLED,
    CLIENT_TIMEOUT,
    Answer,
    Grpc,
    Http,
    decode,
    reason,
)

Pixels = npt.NDArray[np.uint8]
PATIENCE_S = 60.0
"""Seconds after which an edit without an answer is lost."""
_AGAIN_S = 0.2
"""Seconds that a client waits after an error."""
WRONG, LOST, LEFT = "wrong", "lost", "left"
_PROMPTS = ("a red star", "a blue circle", "a green square")


@dataclass(frozen=True, slots=True)
class Known:
    """An edit whose answer is known."""

    inputs: dict[str, bytes]
    answer: Pixels


@dataclass(slots=True)
class Tally:
    """The outcomes of edits. Clients report them from their threads."""

    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def book(self, kind: str, end: str, seconds: float) -> None:
        with self.lock:
            self.ends[end] += 1

    def complain(self, kind: str, problem: str) -> None:
        self.book(kind, WRONG, 0.0)

    @property
    def errors(self) -> dict[str, int]:
        """Numbers of errors by their messages to clients."""
        known = (DONE, WRONG, LOST, LEFT)
        return {end: number for end, number in self.ends.items() if end not in known}


def known_edits(urls: Sequence[str], side: int, steps: int, count: int = 6) -> list[Known]:
    """Reproducible edits and their answers, which are the same from every worker.

    Args:
        urls: gRPC ports of the workers themselves.
        side: pixels of a picture.
        steps: denoising steps.
        count: of the edits.

    Raises:
        RuntimeError: two workers answer one edit differently.
    """
    edits = []
    for number in range(count):
        inputs = _inputs(number, side, steps)
        answers = []
        for url in urls:
            with closing(Grpc(url)) as client:
                answers.append(decode(client.edit(inputs, PATIENCE_S)[0]))
        if any(_levels(answer, answers[0]) for answer in answers):
            raise RuntimeError(f"edit {number} is answered differently by {', '.join(urls)}")
        edits.append(Known(inputs, answers[0]))
    return edits


def _levels(one: Pixels, other: Pixels) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def _inputs(number: int, side: int, steps: int) -> dict[str, bytes]:
    rng = np.random.default_rng(number % 3)
    image = np.kron(rng.integers(0, 256, (8, 8, 3), np.uint8), np.ones((side // 8,) * 2 + (1,)))
    mask = np.zeros((side, side), np.uint8)
    half = side // 2
    mask[half // 2 : half, (number % 2) * half : (number % 2) * half + half // 2] = 255
    settings = {"seed": number, "num_inference_steps": steps, "reproducible": True}
    return {
        "IMAGE": _png(image.astype(np.uint8)),
        "MASK": _png(mask),
        "PROMPT": _PROMPTS[number % len(_PROMPTS)].encode(),
        "SETTINGS": json.dumps(settings).encode(),
    }


def _png(pixels: Pixels) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@dataclass(slots=True)
class Customer:
    """A client of a router that sends known edits. It connects anew after an error."""

    rng: random.Random
    edits: Sequence[Known]
    tally: Tally
    grpc_url: str
    http_url: str
    use_http: bool
    http: Http = field(init=False)
    grpc: Grpc = field(init=False)

    def open(self) -> None:
        self.http, self.grpc = Http(self.http_url, PATIENCE_S), Grpc(self.grpc_url)

    def close(self) -> None:
        self.http.close()
        self.grpc.close()

    def edit(self, call: Callable[[Known], Answer]) -> str:
        """Run one edit and return its outcome, by the picture or by the error.

        Raises:
            Unexpected: the picture differs from the known answer.
        """
        edit = self.rng.choice(self.edits)
        try:
            image, _ = call(edit)
        except Exception as error:
            # A new connection after each error, as a restarted client has.
            self.close()
            time.sleep(_AGAIN_S)
            self.open()
            why = reason(error)
            return {CLIENT_CANCELLED: LEFT, CLIENT_TIMEOUT: LOST}.get(why, _short(why))
        off = _levels(decode(image), edit.answer)
        if off:  # reproducible edits have equal pixels, not similar ones
            raise Unexpected(f"an answer is off by {off} levels")
        return DONE


def stay(customer: Customer) -> str:
    """Run an edit whose client waits for the answer."""

    def send(edit: Known) -> Answer:
        if customer.use_http:
            return customer.http.edit(edit.inputs)
        return customer.grpc.edit(edit.inputs, PATIENCE_S)

    return customer.edit(send)


def leave(customer: Customer) -> str:
    """Run an edit whose client leaves, unless the answer comes first."""
    patience_s = customer.rng.uniform(0.02, 0.5)

    def send(edit: Known) -> Answer:
        if customer.use_http:
            with closing(Http(customer.http_url, patience_s)) as hasty:
                return hasty.edit(edit.inputs)
        pending = customer.grpc.begin(edit.inputs, PATIENCE_S)
        time.sleep(patience_s)
        pending.call.cancel()
        return pending.wait(PATIENCE_S)

    end = customer.edit(send)
    return LEFT if end == LOST and customer.use_http else end


def _short(text: str) -> str:
    """The kind of an error. Texts of the transport contain ports, which are removed."""
    return text.split(":", 1)[0][:60]
