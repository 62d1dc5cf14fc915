"""The first model of the ensemble: from a client's four tensors to the model's arrays.

Everything that can be refused without running the model is refused here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_core.config import Config
from maskserve_core.contracts.facts import ModelFacts
from maskserve_core.contracts.keys import template_id
from maskserve_core.contracts.request import EditRequest
from maskserve_core.contracts.settings import EditSettings, parse_settings
from maskserve_core.errors import InvalidRequest, TemplateNotFound
from maskserve_core.imaging.geometry import model_size, resize
from maskserve_core.imaging.images import Decoded, came_as_text, decode_image, decode_mask
from maskserve_core.imaging.masks import build_masks
from maskserve_core.imaging.png import encode_png
from maskserve_core.imaging.validation import (
    check_output,
    check_prompt,
    check_settings,
    with_defaults,
)

FindTemplate = Callable[[str], bytes | None]
"""Reads the encoded image that was registered under an id; None when the id names nothing."""


@dataclass(frozen=True, slots=True)
class PreparedEdit:
    """Outputs of the preprocess model (maskserve_core.contracts.tensors)."""

    pixels: npt.NDArray[np.uint8]
    """PIXELS: RGB [h, w, 3] at the model's size."""
    edit_mask: npt.NDArray[np.uint8]
    """EDIT_MASK: [h, w] at the model's size, 255 edits."""
    request: EditRequest
    """REQUEST, with the worker's defaults, seed and id filled in."""
    source: bytes
    """The source image, encoded as it came or was registered."""
    paste: bytes
    """8-bit PNG at the source's size, weights of the edited pixels."""


def prepare_edit(
    image: bytes,
    mask: bytes,
    prompt: bytes,
    settings: bytes,
    facts: ModelFacts,
    config: Config,
    find_template: FindTemplate | None = None,
    accepted_ns: int = 0,
) -> PreparedEdit:
    """Check one edit and bring it to the model's resolution.

    Args:
        image: the IMAGE tensor's bytes; empty when SETTINGS.template_id names a template.
        mask: MASK.
        prompt: PROMPT.
        settings: SETTINGS.
        facts: of the served model.
        config: of this worker.
        find_template: reads a registered template; None when the worker keeps none.
        accepted_ns: time.time_ns() when a front took the edit; 0: now.

    Raises:
        InvalidRequest: naming the field.
        TemplateNotFound: SETTINGS.template_id names nothing that is kept.
    """
    accepted_ns, start = accepted_ns or time.time_ns(), time.perf_counter()
    asked = parse_settings(settings)
    check_settings(asked, facts, config)
    text = check_prompt(prompt, config)
    source, source_id = _source(image, asked, config, find_template)
    check_output(asked, source.size)
    size, pixels = _at_model_size(source, facts)
    masks = build_masks(
        decode_mask(mask, "MASK", config.limits, source.size),
        source.size,
        size,
        asked.mask_mode,
        asked.mask_dilate,
        asked.mask_feather,
    )
    if asked.output_encoding == "auto":
        encoding = "base64" if came_as_text(mask) else "raw"
        asked = replace(asked, output_encoding=encoding)
    complete = with_defaults(asked, facts, config)
    assert complete.seed is not None
    assert complete.request_id is not None
    paste = encode_png(masks.paste)
    taken_ms = (time.perf_counter() - start) * 1e3
    request = EditRequest(
        request_id=complete.request_id,
        prompt=text,
        settings=complete,
        seed=complete.seed,
        template_id=source_id,
        source_size=source.size,
        model_size=size,
        accepted_ns=accepted_ns,
        pixels_id=source_id if source.size == size else template_id(pixels),
        timings_ms={"preprocess": round(taken_ms, 3)},
    )
    return PreparedEdit(pixels, _for_model(masks.edit, facts), request, source.encoded, paste)


@dataclass(frozen=True, slots=True)
class PreparedTemplate:
    """A template without an edit, as the encoder takes it."""

    pixels: npt.NDArray[np.uint8]
    """PIXELS: RGB [h, w, 3] at the model's size."""
    edit_mask: npt.NDArray[np.uint8]
    """EDIT_MASK: [h, w], empty."""
    request: EditRequest
    """REQUEST of an edit with the worker's default settings and an empty prompt."""


def prepare_template(encoded: bytes, facts: ModelFacts, config: Config) -> PreparedTemplate:
    """A registered image as its edits will see it, so that it can be primed ahead of them.

    Raises:
        InvalidRequest: the image cannot be used.
    """
    source = decode_image(encoded, "OP.image", config.limits)
    size, pixels = _at_model_size(source, facts)
    name = template_id(source.pixels)
    complete = with_defaults(EditSettings(), facts, config)
    assert complete.seed is not None
    assert complete.request_id is not None
    request = EditRequest(
        request_id=complete.request_id,
        prompt="",
        settings=complete,
        seed=complete.seed,
        template_id=name,
        source_size=source.size,
        model_size=size,
        accepted_ns=time.time_ns(),
        pixels_id=name if source.size == size else template_id(pixels),
    )
    return PreparedTemplate(pixels, np.zeros(size, np.uint8), request)


def _at_model_size(
    source: Decoded, facts: ModelFacts
) -> tuple[tuple[int, int], npt.NDArray[np.uint8]]:
    """The model's size for this source, and the source's pixels at it."""
    size = model_size(source.size, facts.native_resolution, facts.size_multiple)
    if source.size == size:
        return size, source.pixels
    return size, np.asarray(resize(Image.fromarray(source.pixels), size))


def _for_model(edit: npt.NDArray[np.uint8], facts: ModelFacts) -> npt.NDArray[np.uint8]:
    """The edit mask as the model should be given it.

    Inpaint semantics sample the mask once per latent, and would lose what is thinner than one: its
    mask is grown to whole latents. What is pasted stays as the client drew it.
    """
    if facts.semantics != "inpaint":
        return edit
    side = facts.vae_scale_factor
    height, width = edit.shape
    cells = edit.reshape(height // side, side, width // side, side).max(axis=(1, 3))
    return np.repeat(np.repeat(cells, side, axis=0), side, axis=1)


def _source(
    image: bytes, settings: EditSettings, config: Config, find_template: FindTemplate | None
) -> tuple[Decoded, str]:
    """The source and its template id: from IMAGE, or from the template that the settings name."""
    named = settings.template_id
    if image or named is None:
        if not image:
            raise InvalidRequest(
                "IMAGE", "is empty", "an image, or SETTINGS.template_id of a registered template"
            )
        source = decode_image(image, "IMAGE", config.limits)
        found = template_id(source.pixels)
        if named is not None and named != found:
            raise InvalidRequest(
                "SETTINGS.template_id", "is not the digest of IMAGE", f"{found}, or IMAGE empty"
            )
        return source, found
    kept = find_template(named) if find_template is not None else None
    if kept is None:
        raise TemplateNotFound(f"SETTINGS.template_id: {named} is not registered here")
    return decode_image(kept, "IMAGE", config.limits), named
