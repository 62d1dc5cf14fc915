"""A load whose every answer is judged: right, wrong, an error, or none at all."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as http_aio
from PIL import Image
from tritonclient.utils import InferenceServerException

from maskserve_harness.probing.calls import Grpc, decode, reason, tensors

Pixels = npt.NDArray[np.uint8]
PATIENCE_S = 60.0
"""An edit without an answer by then is lost."""
_AGAIN_S = 0.2
"""What a client waits after an error."""
_PROMPTS = ("a red star", "a blue circle", "a green square")


@dataclass(frozen=True, slots=True)
class Known:
    """An edit whose answer is known."""

    inputs: dict[str, bytes]
    answer: Pixels


@dataclass(slots=True)
class Tally:
    """How edits ended."""

    sent: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    left: int = 0
    """Their client went away on purpose."""
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """Of those that were answered."""
    worst: int = 0
    """Levels of 255 by which an answer was off at most."""

    def to_json(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "right": self.right,
            "wrong": self.wrong,
            "worst_levels": self.worst,
            "lost": self.lost,
            "left": self.left,
            "errors": dict(self.errors.most_common()),
            "p50_s": round(float(np.percentile(self.seconds, 50)), 3) if self.seconds else None,
            "p95_s": round(float(np.percentile(self.seconds, 95)), 3) if self.seconds else None,
        }


def known_edits(urls: Sequence[str], side: int, steps: int, count: int = 6) -> list[Known]:
    """Reproducible edits and their answers, the same from every worker.

    Args:
        urls: gRPC ports of the workers themselves.
        side: pixels of a picture.
        steps: denoising steps.
        count: of the edits.

    Raises:
        RuntimeError: two workers answer one edit differently.
    """
    made = []
    for number in range(count):
        inputs = _inputs(number, side, steps)
        answers = []
        for url in urls:
            client = Grpc(url)
            try:
                answers.append(decode(client.edit(inputs, PATIENCE_S)[0]))
            finally:
                client.close()
        if any(_levels(answer, answers[0]) for answer in answers):
            raise RuntimeError(f"edit {number} is answered differently by {', '.join(urls)}")
        made.append(Known(inputs, answers[0]))
    return made


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


class JudgedLoad:
    """Clients that send one edit after the other; use it as an async context manager.

    Args:
        grpc_url: of the router; half of the clients use it.
        http_url: the others do.
        edits: to choose from.
        clients: how many.
        leaving: share of the edits whose client goes away before the answer.
    """

    def __init__(
        self,
        grpc_url: str,
        http_url: str,
        edits: Sequence[Known],
        clients: int,
        leaving: float = 0.0,
    ) -> None:
        self._urls = (grpc_url, http_url)
        self._edits, self._clients, self._leaving = edits, clients, leaving
        self.tally = Tally()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> JudgedLoad:
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """No further edits; those under way are waited for."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        dice = random.Random(number)
        use_grpc = number % 2 == 0
        kind = grpc_aio if use_grpc else http_aio
        while not self._stop.is_set():
            # A new connection after each error, as a client that starts anew has.
            async with kind.InferenceServerClient(self._urls[0 if use_grpc else 1]) as client:
                module = triton_grpc if use_grpc else triton_http
                while not self._stop.is_set():
                    if not await self._one(client, module, dice):
                        break
            await asyncio.sleep(_AGAIN_S)

    async def _one(self, client: Any, module: Any, dice: random.Random) -> bool:
        """One edit; False if the client is to connect anew."""
        edit = dice.choice(self._edits)
        tally, begin = self.tally, time.monotonic()
        tally.sent += 1
        call = asyncio.ensure_future(client.infer("edit", tensors(module, edit.inputs)))
        if dice.random() < self._leaving:
            await asyncio.wait((call,), timeout=dice.uniform(0.0, 0.5))
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                tally.left += 1
                return False
        try:
            answer = await asyncio.wait_for(call, PATIENCE_S)
        except (TimeoutError, asyncio.TimeoutError):
            tally.lost += 1
            return False
        except InferenceServerException as error:
            tally.errors[_short(reason(error))] += 1
            return False
        except Exception as error:
            tally.errors[type(error).__name__] += 1
            return False
        off = _levels(decode(answer.as_numpy("IMAGE")[0]), edit.answer)
        tally.worst = max(tally.worst, off)
        tally.right += off == 0  # reproducible edits: their pixels are equal, not near
        tally.wrong += off > 0
        tally.seconds.append(time.monotonic() - begin)
        return True


def _short(text: str) -> str:
    """An error's kind: texts of the transport name ports."""
    return text.split(":", 1)[0][:60]
