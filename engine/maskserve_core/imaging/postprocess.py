"""The last model of the ensemble: lay the edited pixels over the source and encode the answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_core.contracts.postprocess_context import PostprocessContext
from maskserve_core.contracts.request import EditRequest
from maskserve_core.imaging.canvas import grown
from maskserve_core.imaging.colour import Colour
from maskserve_core.imaging.images import (
    NO_LIMITS,
    as_mode,
    decode_raster,
    encode_image,
    resize_part,
    to_base64,
)
from maskserve_core.imaging.provenance import Mark, Unsigned
from maskserve_core.imaging.safety import Check, let_pass

_PLAIN = Unsigned()


def finish_edit(
    pixels: npt.NDArray[np.uint8],
    context: PostprocessContext,
    mark: Mark = _PLAIN,
    check: Check | None = None,
) -> bytes:
    """The answer's IMAGE bytes.

    Where the paste weight is 0 the answer is the decoded source bit for bit (as long as the
    output format is lossless), its transparency too; where it is 255 it is the model's output,
    opaque, brought to the source's size by Lanczos and into its colours; between, the two are
    mixed. The answer says what its numbers mean as the source did.

    Args:
        pixels: RGB uint8 [h, w, 3] at the model's size.
        context: what preprocess knew of the edit.
        mark: how the answer says that it was edited.
        check: whether it may be answered.

    Raises:
        Refused: it may not.
        EngineFailed: it cannot be signed.
    """
    request = EditRequest.from_json(context.request)
    out, weights = source_and_weights(context, request)
    source = out.copy() if check is not None else out
    colour, box = Colour.unpack(context.colour), weights.getbbox()
    if box is not None:  # only what is pasted is resized
        left, top, right, bottom = box
        y, x = (0, 0) if request.window is None else request.window[:2]
        inside = left - x, top - y, right - x, bottom - y
        edited = colour.painted(resize_part(Image.fromarray(pixels), request.seen_size, inside))
        part = Image.fromarray(np.asarray(weights)[top:bottom, left:right])
        # Pillow's paste mixes in integers, exact at 0 and at 255.
        out.paste(as_mode(edited, out.mode), (left, top), mask=part)
    asked = request.settings
    if check is not None:
        let_pass(check, source, request.prompt, out)
    encoded = encode_image(
        np.asarray(out), asked.output_format, asked.output_quality, colour, mark.xmp
    )
    encoded = mark.sign(encoded, asked.output_format, box or (0, 0, *out.size))
    return to_base64(encoded) if asked.output_encoding == "base64" else encoded


def source_and_weights(
    context: PostprocessContext, request: EditRequest
) -> tuple[Image.Image, Image.Image]:
    """The canvas (RGB or RGBA) and the paste weights (L) of an edit, at the answer's size."""
    left, top, right, bottom = margins = request.settings.expand
    height, width = request.source_size
    mode = "RGBA" if request.alpha else "RGB"
    if context.decoded:
        size = (width - left - right, height - top - bottom)
        source = Image.frombytes(mode, size, context.source)
        weights = Image.frombytes("L", (width, height), context.paste)
    else:
        raster = decode_raster(bytes(context.source), "source", NO_LIMITS)
        source = raster.image.convert("RGB")
        if request.alpha and raster.alpha is not None:
            source.putalpha(raster.alpha)
        weights = decode_raster(bytes(context.paste), "paste", NO_LIMITS).image
    if any(margins):
        source = Image.fromarray(grown(np.asarray(source), margins))
    return source, weights
