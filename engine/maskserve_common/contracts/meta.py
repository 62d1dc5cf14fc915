"""The META tensor: description of an event of an edit (design §3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maskserve_common.contracts.keys import name_of
from maskserve_common.contracts.request import EditRequest
from maskserve_common.errors import MaskserveError

STAGES = ("preprocess", "encode", "prepare", "queue", "denoise", "decode", "postprocess")
"""Stages of an edit at its worker, in order; handovers between them count in none."""
TIMINGS = (*STAGES, "load_stall")
"""Keys of `timings_ms`; `load_stall` is a part of `denoise`."""

NEW = "new"
"""A field that stays inside the worker: what cannot be the doing of the edit's key
(`maskserve_triton.key_history`)."""


def event_meta(event: str, step: int, steps: int, request_id: str) -> bytes:
    """META of a `progress` or `preview` event."""
    name = name_of(request_id)
    return _dump({"event": event, "step": step, "steps": steps, "request_id": name})


def failed_meta(error: MaskserveError, request_id: str) -> bytes:
    """META of the `failed` event. It stays inside the worker: the front answers with the error.

    TRITON-2.51: an ensemble never ends in which a step fails while an earlier response is under way
    in a later step. So what ends an edit early crosses it as a response like any other.
    """
    values = {"event": "failed", "step": 0, "steps": 0, "request_id": request_id}
    return _dump({**values, "error": str(error)})


def final_meta(
    request: EditRequest,
    worker: str,
    model: str,
    engine: Mapping[str, Any],
    taken_ms: Mapping[str, float],
) -> bytes:
    """Return META of the `final` event, as the denoiser sends it.

    Args:
        request: the edit.
        worker: name of this worker.
        model: name of the served model.
        engine: values from the engine, which win over others.
        taken_ms: milliseconds of the stages between `request` and `engine`.
    """
    timings = {**request.timings_ms, **taken_ms, **engine.get("timings_ms", {})}
    values = {
        "event": "final",
        "request_id": name_of(request.request_id),
        "seed": request.seed,
        "worker": worker,
        "model": model,
        "kind": request.kind,
        "template_id": request.template_id,
        "warnings": request.warnings,
        **_window(request),
        **engine,
        "decoded": 1.0,
        "decode_batch": 1,
        "timings_ms": {name: round(float(timings.get(name, 0.0)), 3) for name in TIMINGS},
    }
    values["template_id"] = values["template_id"] or None  # without a source
    values.setdefault("steps", 0)
    values.setdefault("step", values["steps"])
    return _dump(values)


def _window(request: EditRequest) -> dict[str, Any]:
    """The part of the picture that the model saw, in its pixels, and at which scale."""
    if request.window is None:
        return {}
    top, left, height, width = request.window
    scale = round(request.model_size[0] / height, 4)
    return {"window": {"box": [left, top, left + width, top + height], "scale": scale}}


def with_timing(meta: bytes, name: str, milliseconds: float) -> bytes:
    """Return META with the time of one more of the TIMINGS, which was 0; only the final event has
    these.

    The bytes are spliced: reading and writing the JSON would show in the time of an edit, in
    processes that have waited for the denoiser and whose caches are cold.
    """
    head, slot, tail = meta.rpartition(b'"%b":0.0' % name.encode())
    return b"%b%b%.3f%b" % (head, slot[:-3], milliseconds, tail) if slot else meta


def with_decoded(meta: bytes, *, share: float = 1.0, batch: int = 1) -> bytes:
    """Add the way of decoding to the META of a final event.

    Args:
        meta: META; it says so far that the whole picture was decoded, alone.
        share: share of the picture that was decoded.
        batch: pictures that were decoded in one call.
    """
    head, slot, tail = meta.rpartition(b'"decoded":1.0,"decode_batch":1')
    fields = b'"decoded":%.3f,"decode_batch":%d' % (share, batch)
    return b"%b%b%b" % (head, fields, tail) if slot else meta


def with_slack(meta: bytes, due_ms: int, taken_ms: float) -> bytes:
    """Add to the META of a final event how the edit met its due time.

    Args:
        meta: META of the pipeline.
        due_ms: due time, in milliseconds after acceptance.
        taken_ms: milliseconds from acceptance to the answer.
    """
    slack = round(due_ms - taken_ms, 3)
    slo = "met" if slack >= 0.0 else "late"
    return b'%b,"slack_ms":%.3f,"slo":"%b"}' % (meta[:-1], slack, slo.encode())


def with_result(meta: bytes, template_id: str | None) -> bytes:
    """META of a final event that names the template which its picture is kept as; None: it could
    not be kept.
    """
    encoded_id = b"null" if template_id is None else b'"%b"' % template_id.encode()
    return b'%b,"result_template_id":%b}' % (meta[:-1], encoded_id)


def meta_for_client(meta: bytes, values: Mapping[str, Any], *, insists: bool) -> bytes:
    """Return META of a final event as its client gets it. Data that is cached because of another
    key's edits is reported as if this edit had made it; times stay as measured.

    Args:
        meta: META of the event.
        values: its values, as the pipeline gave them.
        insists: whether the edit waits for its template, so that META says `hit` in any case.
    """
    new = values.get(NEW)
    if not new:
        return meta
    fields = json.loads(meta)
    del fields[NEW]
    encoded = fields.get("encoded", {})
    for name in new:
        if encoded.get(name):
            encoded[name] = "made"
    if "template" in new and "masked" in encoded:
        encoded["masked"] = "whole"
    if "cache" in new:
        fields["decoded"] = 1.0
        if fields.get("cache") == "hit" and not insists:
            for name in ("drift", "dense_steps"):
                fields.pop(name, None)
            fields["cache"], fields["cache_tier"], fields["cache_bytes"] = "miss", "", {}
            fields["kinds"] = {"dense": sum(fields.get("kinds", {}).values())}
            fields["computed_tokens"] = fields["steps"] * fields["total_tokens"]
    return _dump(fields)


def _dump(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
