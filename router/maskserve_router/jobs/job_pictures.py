"""Checks of a job's pictures before it waits: what every worker refuses is refused at once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_common.imaging.images import Size, decode_raster, read_size
from maskserve_common.imaging.masks import select
from maskserve_common.imaging.picture_set import (
    check_control_size,
    check_controls,
    check_format,
    check_images,
)
from maskserve_common.imaging.view import canvas_size
from maskserve_router.api.openai.form import EditForm
from maskserve_router.api.openai.form_reader import DECODED_PIXELS, mask_of, settings_of


def check_pictures(form: EditForm, limits: LimitsConfig, *, of_workflow: bool) -> None:
    """Check a job's pictures.

    Args:
        form: the checked form.
        limits: limits on a picture.
        of_workflow: whether its model is a workflow, which has sizes of its own.

    Raises:
        InvalidRequest: naming the picture.
    """
    pictures = {"IMAGE": form.image, "MASK": form.mask or b""}
    pictures |= {f"IMAGE[{index}]": raw for index, raw in enumerate(form.references, start=1)}
    pictures |= {f"CONTROL[{index}]": raw for index, raw in enumerate(form.control)}
    sizes, decoded = dict[str, Size](), dict[str, Size]()
    for name, raw in pictures.items():
        if raw or name not in ("IMAGE", "MASK"):
            height, width = sizes[name] = read_size(raw, name, limits)
            if height * width <= DECODED_PIXELS:
                decoded[name] = height, width
                if name != "MASK":
                    decode_raster(raw, name, limits)
    if of_workflow:
        return
    check_images((form.image, *form.references), limits)
    settings = parse_settings(msgspec.json.encode(settings_of(form)))
    _check_sizes(form, settings, sizes, limits)
    if form.kind != "inpaint" or "mask_from" in form.settings:
        return
    mask, size = mask_of(form), decoded.get("IMAGE" if form.image else "MASK")
    if size is not None and (mask or any(settings.expand)):
        select(mask, settings, limits, size)


def _check_sizes(
    form: EditForm, settings: EditSettings, sizes: Mapping[str, Size], limits: LimitsConfig
) -> None:
    """Check the answer's size, as far as it is known, and that control pictures have it.

    Raises:
        InvalidRequest: naming the setting or the picture.
    """
    source = sizes.get("IMAGE", sizes.get("MASK"))
    canvas = None if source is None else canvas_size(source, settings.expand, limits)
    answer = settings.answer_size or canvas
    if answer is not None:
        check_format(form.fields.output_format, answer)
    places = [
        index if control.image is None else control.image
        for index, control in enumerate(settings.controls)
    ]
    control_sizes = [size for name, size in sizes.items() if name.startswith("CONTROL")]
    controlled = answer if form.kind == "generate" else canvas
    check_controls(len(control_sizes), places, controlled)
    if controlled is not None:
        for index, size in enumerate(control_sizes):
            check_control_size(index, size, controlled)
