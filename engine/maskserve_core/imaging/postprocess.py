"""The last model of the ensemble: lay the edited pixels over the source and encode the answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_core.contracts.postprocess_context import PostprocessContext
from maskserve_core.contracts.request import EditRequest
from maskserve_core.imaging.colour import Colour
from maskserve_core.imaging.images import (
    NO_LIMITS,
    Size,
    decode_raster,
    encode_image,
    resize_part,
    to_base64,
)


def finish_edit(pixels: npt.NDArray[np.uint8], context: PostprocessContext) -> bytes:
    """The answer's IMAGE bytes.

    Where the paste weight is 0 the answer is the decoded source bit for bit (as long as the
    output format is lossless); where it is 255 it is the model's output, brought to the source's
    size by Lanczos and into its colours; between, the two are mixed. The answer says what its
    numbers mean as the source did.

    Args:
        pixels: RGB uint8 [h, w, 3] at the model's size.
        context: what preprocess knew of the edit.
    """
    request = EditRequest.from_json(context.request)
    out, weights = source_and_weights(context, request.source_size)
    colour, box = Colour.unpack(context.colour), weights.getbbox()
    if box is not None:  # only what is pasted is resized
        left, top, right, bottom = box
        edited = resize_part(Image.fromarray(pixels), request.source_size, box)
        edited = colour.painted(edited)
        part = Image.fromarray(np.asarray(weights)[top:bottom, left:right])
        # Pillow's paste mixes in integers, exact at 0 and at 255.
        out.paste(edited, (left, top), mask=part)
    asked = request.settings
    encoded = encode_image(np.asarray(out), asked.output_format, asked.output_quality, colour)
    return to_base64(encoded) if asked.output_encoding == "base64" else encoded


def source_and_weights(context: PostprocessContext, size: Size) -> tuple[Image.Image, Image.Image]:
    """The source (RGB) and the paste weights (L) of an edit, at the source's (height, width)."""
    if context.decoded:
        shape = (size[1], size[0])
        source = Image.frombytes("RGB", shape, context.source)
        return source, Image.frombytes("L", shape, context.paste)
    source = decode_raster(bytes(context.source), "source", NO_LIMITS).image.convert("RGB")
    return source, decode_raster(bytes(context.paste), "paste", NO_LIMITS).image
