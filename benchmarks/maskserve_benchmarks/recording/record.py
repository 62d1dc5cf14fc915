"""Take a record: digests of the responses of a worker to the fixed edits."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.perf.server import Server
from maskserve_benchmarks.recording.comparison import PICTURE, pixels_of
from maskserve_benchmarks.recording.edits import TEMPLATES, Case
from maskserve_benchmarks.triton_calls import Answer, Grpc, Http, Stream

Record: TypeAlias = dict[str, dict[str, Any]]
"""Name of an edit or operation → its answer, as JSON values."""

_STATUS_VARIES = frozenset(
    ("worker", "sequence", "wall_ns", "monotonic_ns", "age_s", "costs", "pricing", "memory")
)
"""Keys of the status record that differ between runs: names, times, costs of steps, and memory."""
_SETTLE_S = 0.3
"""Longer than the 250 ms after which a worker rewrites its status at the latest."""
_SETTLE_LIMIT_S = 120.0


class Recorder:
    """Sends the edits to one worker, one at a time. Nothing else may run on the worker, not even
    priming.

    The worker must have just started, because its earlier edits decide what is cached.
    """

    def __init__(
        self,
        server: Server,
        cases: Callable[[Sequence[str]], list[Case]],
        say: Callable[[str], None],
    ) -> None:
        self._cases = cases
        self._grpc, self._http = Grpc(server.grpc), Http(server.http)
        self._stream_url, self._say = server.grpc, say

    def take(self) -> Record:
        """Return the record of all operations and edits.

        Raises:
            TimeoutError: the worker stays busy or silent.
            InferenceServerException: the worker refuses the templates.
        """
        record: Record = {"status before": self._status()}
        names = []
        for number, picture in enumerate(TEMPLATES):
            answer = record[f"register {number}"] = self._register(picture.image)
            names.append(str(answer["template_id"]))
        for case in self._cases(names):
            self._settle()
            record[case.name] = {
                "inputs": _inputs_digest(case),
                **_answer_or_error(self._edit, case),
            }
            self._say(f"{len(record):3} {case.name}")
        record["status after"] = self._status()
        record["templates"] = self._grpc.control("templates")
        # The second `evict` is of a template that has left; there is no operation `reboot`.
        for op in ("pin", "unpin", "evict", "evict again", "reboot"):
            call = partial(self._grpc.control, template_id=names[0])
            record[op] = _answer_or_error(call, op.split()[0])
        return record

    def close(self) -> None:
        self._grpc.close()
        self._http.close()

    def _edit(self, case: Case) -> dict[str, Any]:
        if case.protocol == "stream":
            return self._stream(case)
        client = self._http if case.protocol == "http" else self._grpc
        return answer_digest(client.edit(case.inputs))

    def _stream(self, case: Case) -> dict[str, Any]:
        """Return the final answer, with the earlier events by kind and step."""
        events: dict[str, Any] = {}
        with closing(Stream(self._stream_url)) as stream:
            stream.send(case.inputs)
            while True:
                answer = stream.next()
                digest = answer_digest(answer)
                meta = digest["meta"]
                if meta["event"] == "final":
                    return {**digest, "events": events}
                events[f"{meta['event']} {meta['step']}"] = digest

    def _register(self, image: bytes) -> dict[str, Any]:
        answer = self._grpc.control("register", image=base64.b64encode(image).decode())
        self._settle()
        return {**answer, **self._grpc.control("prime", template_id=answer["template_id"])}

    def _status(self) -> dict[str, Any]:
        """Return the worker's status without the keys that vary."""
        self._settle()
        status = self._grpc.control("status")
        counters = {k: v for k, v in status["counters"].items() if "seconds" not in k}
        stable_fields = {key: value for key, value in status.items() if key not in _STATUS_VARIES}
        return {**stable_fields, "counters": counters}

    def _settle(self) -> None:
        """Wait until no row runs or waits: after a template's second edit the worker primes it."""
        end, quiet_since = time.monotonic() + _SETTLE_LIMIT_S, time.monotonic()
        while time.monotonic() - quiet_since < _SETTLE_S:
            status = self._grpc.control("status")
            if status["running"] or status["waiting"] or status["in_flight"]:
                quiet_since = time.monotonic()
            if time.monotonic() > end:
                raise TimeoutError("the worker stays busy; a record needs it alone")
            time.sleep(_SETTLE_S / 6)


def _answer_or_error(call: Callable[[Any], dict[str, Any]], argument: Any) -> dict[str, Any]:
    """Return what `call` returns, or the message of the error with which the worker refuses it."""
    try:
        return call(argument)
    except InferenceServerException as error:
        return {"error": error.message()}


def answer_digest(answer: Answer) -> dict[str, Any]:
    """Return an answer as digests of its IMAGE and of the pixels in it, and META without the keys
    that vary.
    """
    image, meta = answer
    stable_meta = {k: v for k, v in meta.items() if k != "worker" and not k.endswith("_ms")}
    digest: dict[str, Any] = {"image": _sha(image), "meta": stable_meta}
    if image:
        is_file = image[:1] in b"\x89\xffR"  # first bytes of PNG, JPEG and WebP; else base64
        raw = image if is_file else base64.b64decode(image)
        digest[PICTURE] = base64.b64encode(raw).decode()
        pixels = pixels_of(digest)
        digest["pixels"] = f"{pixels.shape} {_sha(pixels.tobytes())}"
    return digest


def _inputs_digest(case: Case) -> str:
    """Return a digest that is equal if two records sent the same edit."""
    return _sha(json.dumps([_sha(case.inputs[name]) for name in sorted(case.inputs)]).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
