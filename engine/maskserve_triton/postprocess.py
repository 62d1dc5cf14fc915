"""The last model of the ensemble: lay the edited pixels over the source, where there is a mask, and
encode the answer.
"""

from __future__ import annotations

import json
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops

from maskserve_common.contracts.keys import scope_of
from maskserve_common.contracts.postprocess_context import PostprocessContext
from maskserve_common.contracts.request import EditRequest
from maskserve_common.files.values import Values
from maskserve_common.imaging.colour import Colour
from maskserve_common.imaging.images import (
    NO_LIMITS,
    Pixels,
    as_mode,
    decode_raster,
    encode_image,
    encode_png,
    resize,
    resize_part,
    to_base64,
)
from maskserve_common.imaging.metadata import NOTHING, Metadata
from maskserve_common.imaging.provenance import Mark, Unsigned, has_manifest
from maskserve_common.imaging.safety import Check, require_acceptance
from maskserve_common.imaging.view import grown
from maskserve_common.imaging.whole import middle

_PLAIN = Unsigned()
_RGB, _MODE = 3, "RGB"
Fine: TypeAlias = npt.NDArray[np.uint16]
"""Samples of 16 bits, [H, W, 3 or 4]."""


def finish_edit(
    pixels: npt.NDArray[np.uint8],
    context: PostprocessContext,
    mark: Mark = _PLAIN,
    check: Check | None = None,
) -> bytes:
    """Return the bytes of the response's IMAGE.

    Where the paste weight is 0, the response is the decoded source bit for bit, with its
    transparency, if the output format is lossless. Where it is 255, it is the model's output,
    opaque, resized to the source by Lanczos and converted to its colours. Between, both are mixed.
    If the model draws an alpha, it is multiplied with the weight. The response has the source's
    colour profile and metadata. A PNG has 16 bits if the source has.

    Without a mask, the response is the model's picture.

    Args:
        pixels: RGB uint8 [h, w, 3] at the model's size, or RGBA.
        context: preprocess's record of the edit.
        mark: provenance mark of the response.
        check: the operator's check, which may refuse it.

    Raises:
        Refused: the check refuses it.
        EngineFailed: it cannot be signed.
    """
    request = EditRequest.from_json(context.request)
    if request.kind != "inpaint":
        return _finish_whole(pixels, context, request, mark, check)
    out, weights, fine, metadata = source_and_weights(context, request)
    source = out.copy() if check is not None else out
    colour, box = Colour.unpack(context.colour), weights.getbbox()
    if box is not None:  # only the pasted area is resized
        left, top, right, bottom = box
        y, x = (0, 0) if request.window is None else request.window[:2]
        inside = left - x, top - y, right - x, bottom - y

        def drawn(channels: npt.NDArray[np.uint8]) -> Image.Image:
            return resize_part(Image.fromarray(channels), request.view_size, inside)

        edited = as_mode(colour.painted(drawn(pixels[..., :3])), out.mode)
        part = np.asarray(weights)[top:bottom, left:right]
        if pixels.shape[2] > _RGB:
            alpha = drawn(pixels[..., _RGB])
            part = np.asarray(ImageChops.multiply(Image.fromarray(part), alpha))
        # Pillow's paste mixes in integers, exact at 0 and at 255.
        out.paste(edited, (left, top), mask=Image.fromarray(part))
        if fine is not None:
            _mix(fine[top:bottom, left:right], np.asarray(edited), part)
    settings = request.settings
    if check is not None:
        require_acceptance(check, source, request.prompt, out)
    if fine is not None:
        encoded = encode_png(fine, colour, mark.xmp(request.kind), metadata)
    else:
        encoded = encode_image(
            np.asarray(out),
            settings.output_format,
            settings.output_quality,
            colour,
            mark.xmp(request.kind),
            metadata,
        )
    return _signed(encoded, context, request, mark, box or (0, 0, *out.size))


def _finish_whole(
    pixels: npt.NDArray[np.uint8],
    context: PostprocessContext,
    request: EditRequest,
    mark: Mark,
    check: Check | None,
) -> bytes:
    """Encode the model's picture, without its padding: `finish_edit` of an edit without a mask."""
    settings, pixels = request.settings, middle(pixels, request.source_size)
    opaque = settings.background == "opaque" or settings.output_format == "jpeg"
    drawn = np.ascontiguousarray(pixels[..., :_RGB]) if opaque else pixels
    picture = Image.fromarray(drawn)
    if check is not None:
        require_acceptance(check, _source_for_check(context, picture), request.prompt, picture)
    encoded = encode_image(
        drawn, settings.output_format, settings.output_quality, xmp=mark.xmp(request.kind)
    )
    return _signed(encoded, context, request, mark, (0, 0, *picture.size))


def _source_for_check(context: PostprocessContext, picture: Image.Image) -> Image.Image:
    """Return the source that a check compares a picture with, RGB of the picture's size; black
    without a source, so that all of the picture is new.
    """
    if not context.decoded:
        source = decode_raster(bytes(context.source), "source", NO_LIMITS)
        displayed = source.colour.to_display(as_mode(source.image, "RGB"))
        return resize(displayed, (picture.height, picture.width))
    if not context.source:
        return Image.new(_MODE, picture.size)
    return Image.frombytes(_MODE, picture.size, context.source)


def _signed(
    encoded: bytes,
    context: PostprocessContext,
    request: EditRequest,
    mark: Mark,
    box: tuple[int, int, int, int],
) -> bytes:
    """Return the response of an encoded picture: signed, and as text if the client wants that."""
    settings = request.settings
    file = b"" if context.decoded else bytes(context.source)
    signed_source = file if has_manifest(file) else b""
    encoded = mark.sign(encoded, settings.output_format, box, signed_source, request.kind)
    return to_base64(encoded) if settings.output_encoding == "base64" else encoded


def store_for_run(
    image: bytes, meta: bytes, request: EditRequest, run: str | None, values: Values
) -> bytes:
    """Store the final picture of a workflow's run, if there is one (`run`), and return its
    reference; else return the picture. The front reads results that are kept.
    """
    final = json.loads(meta)["event"] == "final"
    if run is None or not final or request.settings.keep_result:
        return image
    return values.put([image], scope_of(request.request_id), run) or image


class OfSource(NamedTuple):
    """The source's part of an edit's answer."""

    canvas: Image.Image
    """RGB or RGBA, at the answer's size."""
    weights: Image.Image
    """Weights by which the edit is pasted over the canvas, L."""
    fine: Fine | None
    """Canvas of 16 bits, if source and response have them."""
    metadata: Metadata


def source_and_weights(context: PostprocessContext, request: EditRequest) -> OfSource:
    """Decode the source's part of an edit's answer, and the weights of the paste."""
    left, top, right, bottom = margins = request.settings.expand
    height, width = request.source_size
    mode = "RGBA" if request.alpha else "RGB"
    fine: Fine | None = None
    metadata = NOTHING
    if context.decoded:
        size = (width - left - right, height - top - bottom)
        source = Image.frombytes(mode, size, context.source)
        weights = Image.frombytes("L", (width, height), context.paste)
    else:
        png = request.settings.output_format == "png"
        raster = decode_raster(bytes(context.source), "source", NO_LIMITS, low=png)
        source, metadata = raster.image.convert("RGB"), raster.metadata
        if request.alpha and raster.alpha is not None:
            source.putalpha(raster.alpha)
        if raster.low is not None:
            fine = _samples(np.asarray(source), np.asarray(raster.low))
        weights = decode_raster(bytes(context.paste), "paste", NO_LIMITS).image
    if any(margins):
        source = Image.fromarray(grown(np.asarray(source), margins))
        fine = None if fine is None else grown(fine, margins)
    return OfSource(source, weights, fine, metadata)


def _samples(high: Pixels, low: Pixels) -> Fine:
    """Join bytes to 16-bit samples [H, W, channels of `high`]; an alpha without low bytes has 8
    bits.
    """
    lows = low if high.shape[2] <= low.shape[2] else np.dstack((low, high[..., 3]))
    samples: Fine = np.left_shift(high, 8, dtype=np.uint16) | lows[..., : high.shape[2]]
    return samples


def _mix(fine: Fine, edited: Pixels, weights: Pixels) -> None:
    """Paste 8-bit pixels over a part of the canvas, by weights [h, w]; exact at 0 and at 255."""
    share = weights[..., None].astype(np.uint32)
    fine[:] = (fine * (255 - share) + edited * (257 * share) + 127) // 255
