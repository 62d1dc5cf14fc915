"""Names of templates, of the clients of requests, and of cached activations.

If API keys identify clients, a router puts the client's scope before the request id:
`k3f0…!my-edit`. A worker treats it as any id, so two clients may use the same name at a time and
cannot cancel each other's edits. From the second try on, the router appends the number of the try:
`my-edit~2`. The worker that gets it may still run the first try, which the router gave up before
the worker did. META has neither part. A registered template has scopes as its owners. The name of a
cached activation contains everything that its values depend on (design §4 "Key").
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

TEMPLATE_ID = re.compile(r"[0-9a-f]{16,64}")


_SIGHT_DIGITS = 32


def template_id(pixels: npt.NDArray[np.uint8], colour: bytes = b"", unseen: bytes = b"") -> str:
    """Return the name of a template: 32 hexadecimal digits over its size, decoded RGB pixels and
    colours, and 32 more over the part that no model sees, if any.

    Two files of the same picture (such as PNG and lossless WebP) are the same template.

    Args:
        pixels: uint8 [H, W, 3], the decoded, upright source.
        colour: meaning of the numbers (`imaging.colour.Colour.identity`); empty for sRGB.
        unseen: what only responses have of it: its transparency and low bytes.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"maskserve.templ")
    digest.update(f"{pixels.shape[0]}x{pixels.shape[1]}:".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    digest.update(colour)
    visible_id = digest.hexdigest()
    return (
        visible_id + hashlib.blake2b(unseen, digest_size=16).hexdigest() if unseen else visible_id
    )


def entries_id(template: str) -> str:
    """Return the prefix that names of templates with the same entries share."""
    return template[:_SIGHT_DIGITS]


def sharing(template: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` whose templates share the entries of `template`."""
    shared_id = entries_id(template)
    return [name for name in names if entries_id(name) == shared_id]


SCOPE = re.compile(r"[0-9a-z]{1,32}")
NO_SCOPE = ""
"""Scope of edits that came without a router, or through one without keys: they may use every
template."""
SHARED = "shared"
"""Owner that stands for every client."""


def scoped(scope: str, name: str) -> str:
    """The request id that a worker is given for a client's `name`."""
    return f"{scope}!{name}" if scope else name


def scope_of(request_id: str) -> str:
    """The scope of an id that a worker was given; NO_SCOPE if it has none."""
    return request_id.rpartition("!")[0]


def try_id(request_id: str, number: int) -> str:
    """The id of an edit's first, second … try."""
    return f"{request_id}~{number}" if number > 1 else request_id


def edit_of(request_id: str) -> str:
    """The id of an edit by that of one of its tries."""
    return request_id.partition("~")[0]


def name_of(request_id: str) -> str:
    """The client's own name of an id that a worker was given."""
    return edit_of(request_id).rpartition("!")[2]


LAYOUT_VERSION = 2
"""Raised whenever the content or form of entries changes."""


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """Properties that determine the entries of one primed template."""

    model_revision: str
    pixels_id: str
    """Digest of the template's pixels at model resolution."""
    noise_seed: int
    """Seed of the template's own noise."""
    priming_prompt: str
    guidance: float | None
    text_tokens: int
    dtype: str
    entry_kind: str
    entry_format: str
    entry_halves: int = 1
    """2: both passes of guided steps have entries of their own."""
    layout_version: int = LAYOUT_VERSION
    adapters: str = ""
    """Digest of the adapters that change the model's activations; empty without any."""

    def digest(self) -> str:
        """32 hexadecimal digits; the name under which entries are stored."""
        fields = asdict(self)
        if not self.adapters:
            del fields["adapters"]  # entries from before there were any keep their names
        text = json.dumps(fields, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class Anchor:
    """A timestep whose activations are cached."""

    sigma: float
    timestep: float
    input_scale: float = 1.0


STILL = Anchor(0.0, 0.0, 0.0)
"""Anchor of pictures that do not depend on the row: every step can read their keys and values
(`Semantics.exact`). Its scale equals no other, so that no step takes it for its nearest."""


def anchor_steps(sigmas: Sequence[float], stride: int) -> list[int]:
    """Return the steps of a schedule whose timesteps are anchors: of every `stride` steps the one
    in their middle, by sigma.

    Args:
        sigmas: sigma of each step, falling.
        stride: steps that share an anchor; the last group may be smaller.
    """
    chosen = []
    for first in range(0, len(sigmas), stride):
        served = range(first, min(first + stride, len(sigmas)))
        middle = (sigmas[served[0]] + sigmas[served[-1]]) / 2
        chosen.append(min(served, key=lambda i: abs(sigmas[i] - middle)))
    return chosen


def cover(anchors: tuple[Anchor, ...], tolerance: float) -> tuple[Anchor, ...]:
    """Anchors with as many added that every sigma from 0 to 1 has one within `tolerance`.

    Anchors are taken from one schedule, but serve the steps of any: without this, an edit of few
    steps could find a primed template with nothing near enough. Flow matching: timestep is
    1000 x sigma and inputs are not scaled.
    """
    sigmas = sorted((anchor.sigma for anchor in anchors), reverse=True)
    added: list[float] = []
    # Beyond both ends there is nothing: as if an anchor's reach ended just outside them.
    for above, below in zip((1.0 + tolerance, *sigmas), (*sigmas, -tolerance), strict=True):
        missing = math.ceil(round((above - below) / (2 * tolerance), 9)) - 1
        gap = (above - below) / (missing + 1)
        added += [above - gap * (i + 1) for i in range(missing)]
    extra = (Anchor(sigma, 1000.0 * sigma) for sigma in added)
    return tuple(sorted((*anchors, *extra), reverse=True))


def nearest_anchor(
    anchors: tuple[Anchor, ...], sigma: float, timestep: float, tolerance: float
) -> Anchor | None:
    """The anchor closest in sigma, or None when none is within `tolerance` or none scales alike.

    Not the schedule but the model's inputs decide whether an entry fits: a step of any schedule
    may use it. Ties go to the larger sigma.
    """
    best: Anchor | None = None
    for anchor in anchors:
        if abs(anchor.timestep - timestep) > tolerance * 1000.0 or anchor.input_scale != 1.0:
            continue
        distance = abs(anchor.sigma - sigma)
        if distance <= tolerance and (
            best is None or (distance, -anchor.sigma) < (abs(best.sigma - sigma), -best.sigma)
        ):
            best = anchor
    return best


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The form of an adapter's name: it can lead to no other folder."""
