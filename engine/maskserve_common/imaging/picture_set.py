"""Checks of an edit's pictures together, and of its answer's format, by their sizes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import MAX_CONTROLS, OutputFormat
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import MAX_OUTPUT_SIDE, Size, read_size


def check_images(pictures: Sequence[bytes | memoryview], limits: LimitsConfig) -> None:
    """Check that several pictures of IMAGE together stay within the limits, by their headers.

    Raises:
        InvalidRequest: they are too large, or one is no picture.
    """
    if len(pictures) < 2:
        return
    size = sum(map(len, pictures))
    if size > limits.max_image_bytes:
        problem = f"has pictures of {size} bytes together"
        raise InvalidRequest("IMAGE", problem, f"up to {limits.max_image_bytes} bytes")
    pixels = sum(
        math.prod(read_size(picture, f"IMAGE[{index}]", limits))
        for index, picture in enumerate(pictures)
        if picture
    )
    if pixels > limits.max_pixels:
        problem = f"has pictures of {pixels} pixels together"
        raise InvalidRequest("IMAGE", problem, f"up to {limits.max_pixels} pixels")


def check_controls(pictures: int, places: Sequence[int], answer: Size | None) -> None:
    """Check that each control has a picture, and each picture a control.

    Args:
        pictures: number of pictures in CONTROL.
        places: index in CONTROL of each control's picture.
        answer: (height, width) of the answer; None: not known yet.

    Raises:
        InvalidRequest: naming the picture or the control.
    """
    if pictures > MAX_CONTROLS:
        raise InvalidRequest("CONTROL", f"has {pictures} pictures", f"up to {MAX_CONTROLS}")
    for index, place in enumerate(places):
        if place >= pictures:
            raise InvalidRequest(
                f"SETTINGS.controls[{index}].image",
                f"is {place}, but CONTROL has {pictures} pictures",
                f"a picture of {_shape(answer)} in CONTROL for each control",
            )
    unused = next((index for index in range(pictures) if index not in places), None)
    if unused is not None:
        raise InvalidRequest(
            f"CONTROL[{unused}]", "is named by no control", "one in SETTINGS.controls for each"
        )


def check_control_size(index: int, size: Size, answer: Size) -> None:
    """Check that a control picture is as large as the answer. Raises InvalidRequest if not."""
    if size != answer:
        problem = f"is {size[1]}x{size[0]} pixels"
        raise InvalidRequest(f"CONTROL[{index}]", problem, _shape(answer))


def _shape(answer: Size | None) -> str:
    return (
        "the answer's size" if answer is None else f"{answer[1]}x{answer[0]} pixels, as the answer"
    )


def check_format(output_format: OutputFormat, answer: Size) -> None:
    """Check that the answer's format can hold its size. Raises InvalidRequest if it cannot."""
    if max(answer) > MAX_OUTPUT_SIDE[output_format]:
        raise InvalidRequest(
            "SETTINGS.output_format",
            f"{output_format} cannot hold {answer[1]}x{answer[0]} pixels",
            "png",
        )
