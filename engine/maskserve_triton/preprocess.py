"""The first model of the ensemble: it turns the pictures of an accepted edit into arrays.

It refuses pictures that cannot be edited; the front has refused everything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from msgspec import structs
from PIL import Image

from maskserve_common.config import Config
from maskserve_common.contracts.keys import entries_id, scope_of, template_id
from maskserve_common.contracts.postprocess_context import PostprocessContext
from maskserve_common.contracts.request import (
    AcceptedEdit,
    EditRequest,
    Reference,
    ResolvedControl,
)
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest, TemplateNotFound
from maskserve_common.imaging.colour import SRGB, Colour
from maskserve_common.imaging.images import (
    Decoded,
    Size,
    decode_image,
    encode_png,
    is_base64_text,
    model_size,
    read_size,
    resize,
)
from maskserve_common.imaging.masks import (
    UNSELECTED,
    component_boxes,
    edit_mask,
    paste_weights,
    select,
    strongest,
)
from maskserve_common.imaging.picture_set import (
    check_control_size,
    check_controls,
    check_format,
    check_images,
)
from maskserve_common.imaging.provenance import has_manifest
from maskserve_common.imaging.view import View, canvas_size, choose_view, grown
from maskserve_common.imaging.whole import PictureFit, fit_of, middle, native_size
from maskserve_engine.spec.encoder_picture import LONGEST
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton.accept import accept_edit

DECODED_PIXELS = 1_500_000
"""Sources of up to so many pixels go to postprocess decoded, which takes a fraction of the time of
decoding them again. Larger ones would use too much memory while edits wait for a row.
"""

FindTemplate = Callable[[str, str], bytes | None]
"""Returns the encoded image registered under a template id, for a client's scope; None: the scope
has no such template.
"""


@dataclass(frozen=True, slots=True)
class PreparedEdit:
    """Outputs of the preprocess model (maskserve_common.contracts.tensors)."""

    pixels: npt.NDArray[np.uint8]
    """PIXELS: RGB [h, w, 3] at the model's size."""
    edit_mask: npt.NDArray[np.uint8]
    """EDIT_MASK: [h, w] at the model's size; above 0 edits, below 255 for that share of the steps.
    """
    controls: npt.NDArray[np.uint8]
    """CONTROLS: RGB [pictures, h, w, 3] at the model's size."""
    references: npt.NDArray[np.uint8]
    """REFERENCES: RGB of each, one after the other, at the sizes in `request`."""
    request: EditRequest
    context: PostprocessContext


def prepare_edit(
    image: bytes | memoryview,
    mask: bytes | memoryview,
    accepted: AcceptedEdit,
    spec: ModelSpec,
    config: Config,
    find_template: FindTemplate | None = None,
    control: Sequence[bytes | memoryview] = (),
    *,
    references: Sequence[bytes | memoryview] = (),
    decoded_pixels: int = DECODED_PIXELS,
) -> PreparedEdit:
    """Check an edit's pictures and convert them to the model's resolution.

    Args:
        image: first element of IMAGE; empty if SETTINGS.template_id names a template.
        mask: bytes of the MASK tensor.
        accepted: the edit without its pictures.
        spec: spec of the served model.
        config: configuration of the worker.
        find_template: reads a registered template; None: the worker keeps none.
        control: elements of CONTROL.
        references: further elements of IMAGE; those that the settings name follow.
        decoded_pixels: most pixels of a source that is passed on decoded.

    Raises:
        InvalidRequest: naming the field.
        TemplateNotFound: the settings name a template that is not registered.
    """
    references = (*references, *_referenced_pictures(accepted.settings, find_template))
    check_images((image, *references), config.limits)
    if accepted.kind != "inpaint":
        return _prepare_whole(image, accepted, spec, config, find_template, control, references)
    start, settings = time.perf_counter(), accepted.settings
    source, source_id = _source(image, settings, config, find_template)
    canvas = _answer_size(settings, source, config)
    selection = select(mask, settings, config.limits, source.size)
    view = choose_view(selection.pixels, settings, spec.native_resolution, spec.size_multiple)
    _check_shape(view.size, spec)
    paste = paste_weights(selection.pixels, settings.mask_dilate, settings.mask_feather)
    assert paste is not None, "something is selected"
    if selection.strength is None:
        edit = edit_mask(view.window.crop(paste), view.size)
    else:
        edit = strongest(view.window.crop(selection.strength), view.size)
    edit = mask_for_model(edit, spec)
    pixels = _view_of(source, settings, view)
    controls = _control_pictures(
        control,
        accepted.controls,
        canvas,
        lambda picture: _to_srgb(view.window.crop(picture.pixels), picture.colour, view.size),
        config,
    )
    _blacken(controls, accepted.controls, edit)
    further = _further_pictures(references, accepted, spec, config)
    settings = _with_encoding(settings, mask or image)
    request = replace(
        _request(replace(accepted, settings=settings), source, source_id, pixels),
        source_size=canvas,
        window=view.window if view.is_part else None,
        alpha=_keeps_alpha(settings, source, paste),
        edit_boxes=component_boxes(edit, spec.token_pixels),
        references=further.records,
        ip_picture=further.ip_record,
        warnings=(*source.warnings, *selection.warnings),
    )
    context = _paste_context(source, paste, request, config, decoded_pixels)
    request.timings_ms["preprocess"] = round((time.perf_counter() - start) * 1e3, 3)
    context = replace(context, request=request.to_json())
    return PreparedEdit(pixels, edit, controls, further.flat, request, context)


def _paste_context(
    source: Decoded,
    paste: npt.NDArray[np.uint8],
    request: EditRequest,
    config: Config,
    decoded_pixels: int,
) -> PostprocessContext:
    """Return the source and the paste weights for postprocess, without REQUEST: as pixels up to
    `decoded_pixels`, otherwise as files. Data that pixels cannot carry stays in the file.
    """
    has_16_bits = source.low is not None and request.settings.output_format == "png"
    needs_file = has_16_bits or _keeps_manifest(source, config) or bool(source.metadata)
    decoded = paste.size <= decoded_pixels and not needs_file
    return PostprocessContext(
        source=_pixel_bytes(source, alpha=request.alpha) if decoded else source.encoded,
        paste=paste.tobytes() if decoded else encode_png(paste),
        decoded=decoded,
        colour=source.colour.pack(),
    )


def _prepare_whole(
    image: bytes | memoryview,
    accepted: AcceptedEdit,
    spec: ModelSpec,
    config: Config,
    find_template: FindTemplate | None,
    control: Sequence[bytes | memoryview],
    references: Sequence[bytes | memoryview],
) -> PreparedEdit:
    """Prepare an edit without a mask, or a picture without a source: `prepare_edit` of these."""
    start, settings = time.perf_counter(), _with_encoding(accepted.settings, image)
    accepted = replace(accepted, settings=settings)
    native, multiple = spec.native_resolution, spec.size_multiple
    size, further = settings.answer_size, _further_pictures(references, accepted, spec, config)
    if accepted.kind == "generate":
        size = size or native_size(native, multiple)
        fit, canvas, pixels = PictureFit(size, size), size, np.zeros((0, 0, 3), np.uint8)
        request, context = _request_without_source(accepted, size), PostprocessContext()
        request = replace(request, ip_picture=further.ip_record)
    else:
        source, source_id = _source(image, settings, config, find_template)
        rule = spec.reference_size if further.references else spec.edit_size
        chosen = fit_of(source.size, rule, native, multiple)
        fit = PictureFit(size, size) if size else chosen
        canvas, pixels = source.size, _fit_picture(source, fit)
        request = _request(accepted, source, source_id, pixels)
        request = replace(
            request,
            source_size=fit.answer_size,
            references=further.records,
            ip_picture=further.ip_record,
            warnings=source.warnings,
        )
        context = _source_context(source, middle(pixels, fit.answer_size), config)
    _check_shape(fit.size, spec)
    check_format(settings.output_format, fit.size)
    filling = next((control for control in accepted.controls if control.fills), None)
    if filling is not None:
        raise InvalidRequest(
            "MASK", f"is missing, and ControlNet {filling.name} fills it", "a mask"
        )
    controls = _control_pictures(
        control, accepted.controls, canvas, lambda picture: _fit_picture(picture, fit), config
    )
    request.timings_ms["preprocess"] = round((time.perf_counter() - start) * 1e3, 3)
    context = replace(context, request=request.to_json())
    mask = np.full(fit.size, 255, np.uint8)
    return PreparedEdit(pixels, mask, controls, further.flat, request, context)


@dataclass(frozen=True, slots=True)
class _FurtherPictures:
    """Pictures behind the source, in sRGB, RGB [h, w, 3] each."""

    references: list[npt.NDArray[np.uint8]]
    """References as the model sees them."""
    ip_picture: npt.NDArray[np.uint8] | None
    """The IP-Adapter's picture as the image encoder sees it; None: there is none."""

    @property
    def records(self) -> tuple[Reference, ...]:
        return tuple(map(_record, self.references))

    @property
    def ip_record(self) -> Reference | None:
        return None if self.ip_picture is None else _record(self.ip_picture)

    @property
    def flat(self) -> npt.NDArray[np.uint8]:
        """All pixels, the IP-Adapter's picture last."""
        last = [] if self.ip_picture is None else [self.ip_picture]
        flat = [pixels.reshape(-1) for pixels in (*self.references, *last)]
        return np.concatenate([np.zeros(0, np.uint8), *flat])


def _record(pixels: npt.NDArray[np.uint8]) -> Reference:
    return Reference((len(pixels), pixels.shape[1]), template_id(pixels))


def _further_pictures(
    encoded: Sequence[bytes | memoryview],
    accepted: AcceptedEdit,
    spec: ModelSpec,
    config: Config,
) -> _FurtherPictures:
    """Decode the pictures behind the source.

    Raises:
        InvalidRequest: naming the element of IMAGE.
    """
    native, multiple, references = spec.native_resolution, spec.size_multiple, []
    count = len(encoded) - (accepted.ip_adapter is not None)
    for index, raw in enumerate(encoded[:count], start=1):
        field = f"IMAGE[{index}]"
        picture = decode_image(raw, field, config.limits)
        fit = fit_of(picture.size, spec.reference_size, native, multiple)
        _check_shape(fit.size, spec, field)
        references.append(_fit_picture(picture, fit))
    if accepted.ip_adapter is None:
        return _FurtherPictures(references, None)
    picture = decode_image(encoded[-1], f"IMAGE[{len(encoded)}]", config.limits)
    return _FurtherPictures(references, _square(picture, accepted.ip_adapter.side))


def _square(picture: Decoded, side: int) -> npt.NDArray[np.uint8]:
    """Return the middle square of a picture, [side, side, 3], as CLIPImageProcessor makes it."""
    height, width = (int(side * length / min(picture.size)) for length in picture.size)
    image = Image.fromarray(picture.pixels).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(picture.colour.to_display(image))
    return np.ascontiguousarray(middle(pixels, (side, side)))


def _source_context(
    source: Decoded, pixels: npt.NDArray[np.uint8], config: Config
) -> PostprocessContext:
    """Return the source for the operator's check and the provenance of an answer of which it is no
    part: its file if that is signed, for a check alone its pixels as the model sees them, [H, W, 3]
    of the answer's size.
    """
    if _keeps_manifest(source, config):
        return PostprocessContext(source=source.encoded, decoded=False)
    checks = config.safety.check or config.safety.model
    return PostprocessContext(source=pixels.tobytes() if checks else b"")


def pixels_of(
    pictures: Sequence[bytes | memoryview],
    accepted: AcceptedEdit,
    config: Config,
    find_template: FindTemplate,
) -> int:
    """Return the number of pixels of an edit's pictures, read from their headers.

    Args:
        pictures: elements of IMAGE, MASK and CONTROL.
        accepted: the edit without its pictures.
        config: configuration of the worker.
        find_template: reads a registered template.

    Raises:
        InvalidRequest: a header cannot be read.
    """
    settings = accepted.settings
    template_id, scope = settings.template_id, scope_of(settings.request_id or "")
    template = find_template(template_id, scope) if template_id and not any(pictures[:1]) else None
    references = [find_template(name, scope) for name in settings.reference_ids]
    encoded = [picture for picture in (template, *pictures, *references) if picture]
    return sum(math.prod(read_size(picture, "IMAGE", config.limits)) for picture in encoded)


@dataclass(frozen=True, slots=True)
class PreparedTemplate:
    """A template without an edit, as the encoder takes it."""

    pixels: npt.NDArray[np.uint8]
    """PIXELS: RGB [h, w, 3] at the model's size."""
    edit_mask: npt.NDArray[np.uint8]
    """EDIT_MASK: [h, w], empty."""
    request: EditRequest
    """REQUEST of an edit with the worker's default settings and an empty prompt."""


def prepare_template(
    source: Decoded, name: str, spec: ModelSpec, config: Config
) -> PreparedTemplate:
    """A registered image as its edits will see it, so that it can be primed ahead of them.

    Args:
        source: the image.
        name: its template id.
        spec: the model's.
        config: the worker's.

    Raises:
        InvalidRequest: the image cannot be used.
    """
    size = model_size(source.size, spec.native_resolution, spec.size_multiple)
    _check_shape(size, spec)
    pixels = _to_srgb(source.pixels, source.colour, size)
    accepted = accept_edit(EditSettings(), b"", spec, config)
    request = _request(accepted, source, name, pixels)
    return PreparedTemplate(pixels, np.zeros(size, np.uint8), request)


def _check_shape(size: Size, spec: ModelSpec, field: str = "IMAGE") -> None:
    """Check that the text encoder takes a picture that the model sees at this size.

    Raises:
        InvalidRequest: it is too long.
    """
    if spec.encoder_picture is not None and max(size) > LONGEST * min(size):
        raise InvalidRequest(
            field,
            f"is {size[1]}x{size[0]} pixels to the model",
            f"sides of which none is more than {LONGEST} times as long as the other",
        )


def _control_pictures(
    encoded: Sequence[bytes | memoryview],
    controls: Sequence[ResolvedControl],
    size: Size,
    fitted: Callable[[Decoded], npt.NDArray[np.uint8]],
    config: Config,
) -> npt.NDArray[np.uint8]:
    """Return the control pictures [pictures, h, w, 3], cropped and resized like their source.

    Args:
        encoded: elements of CONTROL.
        controls: controls, each with its `image`.
        size: (height, width) that each must have.
        fitted: returns a picture as the model sees it.
        config: configuration of the worker.

    Raises:
        InvalidRequest: a picture is missing, not used, unreadable or of another size.
    """
    if not encoded and not controls:
        return np.zeros((0, 0, 0, 3), np.uint8)
    places = [_place(control) for control in controls]
    check_controls(len(encoded), places, size)
    pictures = []
    for index, raw in enumerate(encoded):
        decoded = decode_image(raw, f"CONTROL[{index}]", config.limits)
        check_control_size(index, decoded.size, size)
        pictures.append(fitted(decoded))
    return np.stack(pictures)


def _blacken(
    pictures: npt.NDArray[np.uint8],
    controls: Sequence[ResolvedControl],
    mask: npt.NDArray[np.uint8],
) -> None:
    """Make control pictures [pictures, h, w, 3] black inside the mask [h, w], for ControlNets that
    fill it.

    Raises:
        InvalidRequest: such a picture is another ControlNet's, too.
    """
    filled = {_place(control) for control in controls if control.fills}
    for index, control in enumerate(controls):
        if not control.fills and _place(control) in filled:
            raise InvalidRequest(
                f"SETTINGS.controls[{index}].image",
                "is the picture of a ControlNet that fills the mask, too",
                "a picture of its own",
            )
    for place in filled:
        pictures[place][mask > UNSELECTED] = 0


def _place(control: ResolvedControl) -> int:
    assert control.image is not None, "it was resolved at the front"
    return control.image


def _answer_size(settings: EditSettings, source: Decoded, config: Config) -> Size:
    """Return the (height, width) of the response.

    Raises:
        InvalidRequest: it is too large for a limit or the format.
    """
    size = canvas_size(source.size, settings.expand, config.limits)
    if source.colour.only_png and settings.output_format != "png":
        raise InvalidRequest(
            "SETTINGS.output_format",
            f"{settings.output_format} cannot say what IMAGE's numbers mean (cICP of HDR)",
            "png",
        )
    check_format(settings.output_format, size)
    return size


def _with_encoding(settings: EditSettings, picture: bytes | memoryview) -> EditSettings:
    """Return settings whose `output_encoding` is that of a picture, if they leave it open."""
    if settings.output_encoding != "auto":
        return settings
    encoding = "base64" if picture and is_base64_text(picture) else "raw"
    return structs.replace(settings, output_encoding=encoding)


def _keeps_manifest(source: Decoded, config: Config) -> bool:
    """Whether the answer's signature names the source's."""
    return bool(config.provenance.certificate) and has_manifest(bytes(source.encoded))


def _keeps_alpha(settings: EditSettings, source: Decoded, paste: npt.NDArray[np.uint8]) -> bool:
    opaque = settings.background == "opaque" or settings.output_format == "jpeg"
    if opaque or source.alpha is None:
        return False
    left, top, *_ = settings.expand
    old = paste[top : top + source.size[0], left : left + source.size[1]]
    clear = source.alpha < 255
    if source.low is not None and source.low.shape[2] == 4:
        clear = clear | (source.low[..., 3] < 255)
    return bool((clear & (old < 255)).any())


def _pixel_bytes(source: Decoded, *, alpha: bool) -> bytes:
    if not alpha:
        return source.pixels.tobytes()
    assert source.alpha is not None
    return np.dstack((source.pixels, source.alpha)).tobytes()


def _request(
    accepted: AcceptedEdit, source: Decoded, source_id: str, pixels: npt.NDArray[np.uint8]
) -> EditRequest:
    """Return REQUEST, without the time of the preparation.

    Args:
        accepted: the accepted edit.
        source: the image.
        source_id: template id of the image.
        pixels: RGB [h, w, 3] at the model's size.
    """
    request = _request_without_source(accepted, (pixels.shape[0], pixels.shape[1]))
    pixels_id = entries_id(source_id) if pixels is source.pixels else template_id(pixels)
    return replace(request, template_id=source_id, source_size=source.size, pixels_id=pixels_id)


def _request_without_source(accepted: AcceptedEdit, size: Size) -> EditRequest:
    """Return REQUEST of a picture of the model's (height, width) `size`."""
    settings = accepted.settings
    assert settings.seed is not None
    assert settings.request_id is not None
    return EditRequest(
        request_id=settings.request_id,
        prompt=accepted.prompt,
        settings=settings,
        seed=settings.seed,
        template_id="",
        source_size=size,
        model_size=size,
        accepted_ns=accepted.accepted_ns,
        kind=accepted.kind,
        due_ms=accepted.due_ms,
        after_token_s=accepted.after_token_s,
        loras=accepted.loras,
        controls=accepted.controls,
        ip_adapter=accepted.ip_adapter,
    )


def _view_of(source: Decoded, settings: EditSettings, view: View) -> npt.NDArray[np.uint8]:
    """Return the source as the model sees it, RGB [h, w, 3]."""
    return _to_srgb(
        view.window.crop(grown(source.pixels, settings.expand)), source.colour, view.size
    )


def _to_srgb(pixels: npt.NDArray[np.uint8], colour: Colour, size: Size) -> npt.NDArray[np.uint8]:
    """Resize a picture and convert it to sRGB, RGB [h, w, 3]."""
    if pixels.shape[:2] == size and colour == SRGB:
        return pixels
    return np.asarray(colour.to_display(resize(Image.fromarray(pixels), size)))


def _fit_picture(picture: Decoded, fit: PictureFit) -> npt.NDArray[np.uint8]:
    """Return a picture as the model sees it without a mask, in sRGB, RGB [h, w, 3]."""
    if picture.size == fit.scaled == fit.size and picture.colour == SRGB:
        return picture.pixels
    image = fit.of(Image.fromarray(picture.pixels))
    return np.ascontiguousarray(picture.colour.to_display(image))


def mask_for_model(edit: npt.NDArray[np.uint8], spec: ModelSpec) -> npt.NDArray[np.uint8]:
    """Return the edit mask for the model.

    Models that blend sample the mask once per latent or token, and would lose thinner parts. Their
    mask is grown to whole latents or tokens. The pasted area stays as the client drew it.
    """
    if not spec.semantics.blends:
        return edit
    side = spec.vae_scale_factor * spec.mask_latents
    height, width = edit.shape
    cells = edit.reshape(height // side, side, width // side, side).max(axis=(1, 3))
    return np.repeat(np.repeat(cells, side, axis=0), side, axis=1)


def _source(
    image: bytes | memoryview,
    settings: EditSettings,
    config: Config,
    find_template: FindTemplate | None,
) -> tuple[Decoded, str]:
    """Return the source and its template id: from IMAGE, or from the template that the settings
    name.
    """
    template_id = settings.template_id
    if image or template_id is None:
        if not image:
            raise InvalidRequest(
                "IMAGE", "is empty", "an image, or SETTINGS.template_id of a registered template"
            )
        source = decode_image(image, "IMAGE", config.limits)
        source_id = source.template_id
        if template_id is not None and template_id != source_id:
            raise InvalidRequest(
                "SETTINGS.template_id", "is not the digest of IMAGE", f"{source_id}, or IMAGE empty"
            )
        return source, source_id
    scope = scope_of(settings.request_id or "")
    encoded = _registered_picture("SETTINGS.template_id", template_id, scope, find_template)
    return decode_image(encoded, "IMAGE", config.limits), template_id


def _referenced_pictures(settings: EditSettings, find_template: FindTemplate | None) -> list[bytes]:
    """Return the encoded references that the settings name."""
    scope = scope_of(settings.request_id or "")
    return [
        _registered_picture(f"SETTINGS.reference_ids[{index}]", name, scope, find_template)
        for index, name in enumerate(settings.reference_ids)
    ]


def _registered_picture(
    field: str, name: str, scope: str, find_template: FindTemplate | None
) -> bytes:
    """Return the encoded picture of a registered template. Raises TemplateNotFound."""
    encoded = find_template(name, scope) if find_template is not None else None
    if encoded is None:
        raise TemplateNotFound(f"{field}: {name} is not registered here")
    return encoded
