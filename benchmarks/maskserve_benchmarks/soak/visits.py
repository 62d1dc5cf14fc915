"""Visits that end well: every kind of edit, the life of a template, requests for the status.

A visit returns its outcome (`done`, or an error's code) and raises Unexpected if that outcome is
wrong.
"""

from __future__ import annotations

import base64
import time

from maskserve_benchmarks.soak.visitor import (
    DONE,
    Unexpected,
    Visitor,
    check,
    distance,
    must,
    must_refuse,
    operate,
)
from maskserve_benchmarks.triton_calls import Stream

_REPRODUCIBLE = 4
"""Number of different edits that are repeated."""
_PRIMING_S = 60.0


def hot(visitor: Visitor) -> str:
    """Edit a picture that many visitors edit; it is cached most of the time."""
    visitor.edit(visitor.rng.choice(visitor.album.hot), visitor.settings())
    return DONE


def churn(visitor: Visitor) -> str:
    """Edit a picture of a pool that does not fit the cache: its entries evict those of another."""
    visitor.edit(visitor.album.warm(visitor.rng), visitor.settings())
    return DONE


def fresh(visitor: Visitor) -> str:
    """Edit a new picture until its template is primed, then leave it."""
    picture = visitor.album.fresh(visitor.rng)
    for _ in range(visitor.rng.randint(1, 3)):
        visitor.edit(picture, visitor.settings())
    return DONE


def require(visitor: Visitor) -> str:
    """Wait for priming; the edit must be a hit."""
    fetch = visitor.rng.choice((visitor.album.warm, visitor.album.fresh))
    _, meta = visitor.edit(fetch(visitor.rng), visitor.settings(cache="require"))
    if meta["cache"] != "hit":
        raise Unexpected(f"cache: require ended as {meta['cache']}")
    return DONE


def reproducible(visitor: Visitor) -> str:
    """Check that an edit gives the same picture as before, whatever happened to its template."""
    number = visitor.rng.randrange(_REPRODUCIBLE)
    picture = visitor.album.hot[number]
    fixed = visitor.settings(reproducible=True, seed=number, num_inference_steps=4)
    settings = {k: v for k, v in fixed.items() if not k.startswith("mask_")}
    settings["output_format"] = "png"
    inputs = {**visitor.inputs(picture, settings), "PROMPT": b"a red star"}
    answer = must(lambda: visitor.grpc.edit(inputs))
    pixels = check(picture, settings, answer)
    level_distance = distance(pixels, visitor.keepsakes.first(number, pixels))
    if level_distance:
        raise Unexpected(
            f"a reproducible edit came back {level_distance} levels apart; META {answer[1]}"
        )
    return DONE


def dense(visitor: Visitor) -> str:
    visitor.edit(visitor.rng.choice(visitor.album.hot), visitor.settings(cache="off"))
    return DONE


def odd(visitor: Visitor) -> str:
    """Edit a picture of any size from one pixel on, with any share of it masked."""
    visitor.edit(visitor.album.odd(visitor.rng), visitor.settings())
    return DONE


def stream(visitor: Visitor) -> str:
    """Check that progress and previews arrive in order, followed by one final answer."""
    picture = visitor.rng.choice(visitor.album.hot)
    preview_every = visitor.rng.choice((0, 2, 3))
    settings = visitor.settings(progress=True, preview_every=preview_every)
    events = Stream(visitor.grpc_url)
    try:
        events.send(visitor.inputs(picture, settings))
        last = {"progress": 0, "preview": 0}
        while True:
            image, meta = answer = must(events.next)
            if meta["event"] == "final":
                check(picture, settings, answer)
                return DONE
            if meta["step"] <= last[meta["event"]] or bool(image) != (meta["event"] == "preview"):
                raise Unexpected(f"after {last} came {meta} with {len(image)} bytes of image")
            last[meta["event"]] = meta["step"]
    finally:
        events.close()


def largest(visitor: Visitor) -> str:
    """Make the largest edits, dense and cached, with previews: resources that grow to the largest
    need grow here.
    """
    picture = visitor.album.largest
    for _ in range(2):
        visitor.edit(picture, visitor.settings(output_format="png"))
    events = Stream(visitor.grpc_url)
    try:
        events.send(visitor.inputs(picture, visitor.settings(preview_every=1, cache="off")))
        while must(events.next)[1]["event"] != "final":
            pass
    finally:
        events.close()
    return DONE


def template(visitor: Visitor) -> str:
    """Use a template by name from start to end: register, prime, edit, pin, evict, remove."""
    rng, grpc = visitor.rng, visitor.grpc
    picture = visitor.album.fresh(rng)
    registration = operate(grpc, "register", image=base64.b64encode(picture.image).decode())
    name = registration["template_id"]
    if rng.random() < 0.5:
        visitor.edit(picture, visitor.settings(template_id=name))
    end = time.monotonic() + _PRIMING_S
    while operate(grpc, "prime", template_id=name)["state"] == "priming":
        if time.monotonic() > end:
            raise Unexpected(f"template {name} is not primed within {_PRIMING_S:g} s")
        time.sleep(0.1)
    pinned = rng.random() < 0.5
    if pinned:
        operate(grpc, "pin", template_id=name)
    visitor.edit(picture, visitor.settings(template_id=name, cache="require"))
    if pinned and rng.random() < 0.5:  # else the eviction unpins it
        operate(grpc, "unpin", template_id=name)
    operate(grpc, "evict", template_id=name)
    evicted_inputs = visitor.inputs(picture, visitor.settings(template_id=name))
    must_refuse(lambda: grpc.edit(evicted_inputs), "TEMPLATE_NOT_FOUND", "SETTINGS.template_id")
    return DONE


def look(visitor: Visitor) -> str:
    """Make the requests of dashboards and operators."""
    for op in visitor.rng.sample(("status", "templates", "heartbeat"), 2):
        operate(visitor.grpc, op)
    return DONE
