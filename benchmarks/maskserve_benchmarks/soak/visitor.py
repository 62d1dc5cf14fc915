"""A client of the soak: its connections, its random settings, and its checks of answers."""

from __future__ import annotations

import base64
import json
import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maskserve_benchmarks.soak.pictures import Album, Picture, Pixels
from maskserve_benchmarks.triton_calls import Answer, Grpc, Http, decode, reason

DONE = "done"
PROMPTS = ("a red star", "a blue circle", "a green square on white", "ein gelbes Dreieck, größer")
FORMATS = ("png", "png", "png", "png", "webp", "jpeg")


class Unexpected(Exception):
    """An unexpected answer; the message names the answer and what was expected."""


@dataclass(slots=True)
class Keepsakes:
    """First pictures of reproducible edits, for comparison with later ones; all visitors share
    them.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    pictures: dict[int, Pixels] = field(default_factory=dict)

    def first(self, number: int, pixels: Pixels) -> Pixels:
        """Return the first picture kept under the number, which may be this one."""
        with self.lock:
            return self.pictures.setdefault(number, pixels)


@dataclass(slots=True)
class Visitor:
    """One client in one thread."""

    rng: random.Random
    album: Album
    keepsakes: Keepsakes
    grpc_url: str
    http_url: str
    long_steps: int
    """Steps of an edit that will be stopped."""
    grpc: Grpc = field(init=False)
    http: Http = field(init=False)

    def open(self) -> None:
        self.grpc, self.http = Grpc(self.grpc_url), Http(self.http_url)

    def close(self) -> None:
        self.http.close()
        self.grpc.close()

    def settings(self, **fixed: Any) -> dict[str, Any]:
        """Return settings of an edit, random except for `fixed`; the request id is always new."""
        rng = self.rng
        drawn_settings: dict[str, Any] = {
            "request_id": uuid.UUID(int=rng.getrandbits(128)).hex,
            "num_inference_steps": rng.randint(2, 8),
            "output_format": rng.choice(FORMATS),
        }
        if rng.random() < 0.7:
            drawn_settings["seed"] = rng.randrange(2**32)
        if rng.random() < 0.2:
            drawn_settings["output_encoding"] = "base64"
        if rng.random() < 0.2:
            drawn_settings |= {"mask_dilate": rng.randint(0, 8), "mask_feather": rng.randint(0, 8)}
        if rng.random() < 0.2:
            drawn_settings["priority"] = rng.randint(-2, 2)
        return {**drawn_settings, **fixed}

    def inputs(self, picture: Picture, settings: dict[str, Any]) -> dict[str, bytes]:
        """Return the four tensors of an edit; a template id in the settings replaces the image."""
        image = b"" if "template_id" in settings else picture.image
        if image and self.rng.random() < 0.1:
            image = base64.b64encode(image)
        return {
            "IMAGE": image,
            "MASK": picture.mask,
            "PROMPT": self.rng.choice(PROMPTS).encode(),
            "SETTINGS": json.dumps(settings).encode(),
        }

    def edit(self, picture: Picture, settings: dict[str, Any]) -> tuple[Pixels, dict[str, Any]]:
        """Send an edit over gRPC or HTTP that must succeed; return its pixels and META.

        Raises:
            Unexpected: it failed, or the answer is wrong.
        """
        inputs = self.inputs(picture, settings)
        send = self.http.edit if self.rng.random() < 0.4 else self.grpc.edit
        answer = must(lambda: send(inputs))
        return check(picture, settings, answer), answer[1]


def must(call: Callable[[], Answer]) -> Answer:
    """Return the answer of a call that must succeed.

    Raises:
        Unexpected: the call failed.
    """
    try:
        return call()
    except Exception as error:
        raise _unexpected("an answer", error) from None


def outcome(call: Callable[[], Answer], *codes: str) -> str:
    """Return how a call ended that may succeed or fail with one of `codes`.

    Raises:
        Unexpected: it failed for another reason.
    """
    try:
        call()
    except Exception as error:
        why = reason(error)
        if why in codes:
            return why
        raise _unexpected(" or ".join(("an answer", *codes)), error) from None
    return DONE


def must_refuse(call: Callable[[], Any], code: str, field: str = "") -> str:
    """Check that a call is refused with `code` and that the message names `field`; return the code.

    Raises:
        Unexpected: the call was not refused in this way.
    """
    try:
        call()
    except Exception as error:
        if reason(error) == code and f"[{code}] {field}" in str(error):
            return code
        raise _unexpected(f"[{code}] {field}", error) from None
    raise Unexpected(f"[{code}] {field} expected, but it was answered")


def operate(grpc: Grpc, op: str, **fields: Any) -> dict[str, Any]:
    """Run an operation of `control` that must succeed; return its result.

    Raises:
        Unexpected: the operation failed.
    """
    try:
        return grpc.control(op, **fields)
    except Exception as error:
        raise Unexpected(f"control {op}: {error}") from None


def check(picture: Picture, settings: dict[str, Any], answer: Answer) -> Pixels:
    """Check a final answer and return its pixels.

    Raises:
        Unexpected: the answer does not match the settings, or it changes pixels outside the mask.
    """
    image, meta = answer
    if meta["event"] != "final" or meta["request_id"] != settings["request_id"]:
        raise Unexpected(f"the final answer of {settings['request_id']} expected, but: {meta}")
    if "seed" in settings and meta["seed"] != settings["seed"]:
        raise Unexpected(f"seed {settings['seed']} asked, {meta['seed']} used")
    if settings.get("output_encoding") == "base64":
        image = base64.b64decode(image, validate=True)
    pixels = decode(image)
    if pixels.shape != picture.pixels.shape:
        raise Unexpected(f"{picture.pixels.shape} was edited, {pixels.shape} came back")
    if settings["output_format"] != "jpeg":
        reach = settings.get("mask_dilate", 0) + settings.get("mask_feather", 0) + 1
        differ = picture.differs_outside(pixels, reach if reach > 1 else 0)
        if differ:
            raise Unexpected(f"{differ} pixels outside the mask differ; META {meta}")
    return pixels


def distance(a: Pixels, b: Pixels) -> int:
    """Return the largest difference between two pictures' values."""
    return int(np.abs(a.astype(np.int16) - b).max())


def _unexpected(expected: str, error: Exception) -> Unexpected:
    error_text = str(error)[:300] or reason(error)
    return Unexpected(f"{expected} expected, but: {error_text}")
