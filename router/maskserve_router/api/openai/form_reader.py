"""Forms of edits, read from requests and checked against the models that workers serve."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

from msgspec import structs
from starlette.requests import Request

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.request import model_steps, steps_run
from maskserve_common.contracts.settings import MAX_MARGIN
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import Size, decode_mask, read_size
from maskserve_router.api.front import Front
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.openai.form import EditForm, ModelForm, Source, read_form
from maskserve_router.api.openai.image_urls import ImageUrls
from maskserve_router.api.openai.served_models import ServedModels
from maskserve_router.api.outputs import check_output
from maskserve_router.fair_share import IN_A_THREAD, FairShare
from maskserve_router.key_holder import KeyHolder

DECODED_PIXELS: Final = 2**24
"""Most pixels of a picture that the router decodes; each takes up to six bytes."""
MOST_STEPS: Final = 1000
_VARIATION_STRENGTH: Final = 0.6
"""Share of the steps that a variation runs from its noised source: the default of diffusers'
FluxImg2ImgPipeline."""


class FormReader:
    """Reads and checks forms as far as no worker is needed.

    Args:
        models: models that workers serve.
        urls: fetches pictures of requests.
        forms: form of each workflow, by name.
    """

    def __init__(
        self,
        bodies: Bodies,
        limits: LimitsConfig,
        front: Front,
        fair_share: FairShare,
        models: ServedModels,
        urls: ImageUrls,
        forms: Mapping[str, ModelForm],
    ) -> None:
        self._bodies, self._limits, self._front, self.forms = bodies, limits, front, forms
        self._fair_share, self.models, self._urls = fair_share, models, urls

    async def read(
        self,
        request: Request,
        client: KeyHolder,
        resources: ExitStack,
        source: Source = "optional",
    ) -> tuple[EditForm, int]:
        """Read and check a request as far as no worker is needed; return it and its bytes.

        Args:
            request: a form or JSON with `Fields` and settings.
            client: holder of the key that sent it.
            resources: counts the bytes of its pictures until it is closed.
            source: whether the request has an image or a template.

        Raises:
            InvalidRequest: naming the field.
            RetryLater: too many bytes are under way.
        """
        body = await self._bodies.read(request, client, resources)

        async def picture(field: str, url: str) -> bytes:
            return await self._urls.read(field, url, client, resources)

        size = len(body)
        parse = partial(self._fair_share.run, client, size)
        form = await read_form(request.headers, body, picture, parse, self._texts, source)
        del body
        self._front.check_pictures(form.fields.n, client)
        if (url := form.fields.output_url) is not None:
            check_output(url, client.output_urls)
            if form.fields.stream:
                raise InvalidRequest("output_url", "is given with a stream", "stream: false")
            if form.fields.n > 1 and not url.endswith("/"):
                raise InvalidRequest("output_url", "is one file for several", "a folder, NAME/")
        if form.kind == "edit":  # a small file can have many pixels, and its alpha is decoded
            parse = partial(self._fair_share.run, client, max(size, IN_A_THREAD))
        return await parse(self._checked, form), size

    def steps(self, settings: Mapping[str, Any]) -> int:
        """Return the steps of an edit, from unchecked settings or by default."""
        steps, strength = settings.get("num_inference_steps"), settings.get("strength")
        if not isinstance(steps, int):
            served_models = self.models.properties()
            steps = min((served.num_inference_steps for served in served_models), default=1)
        steps = min(max(steps, 1), MOST_STEPS)
        if isinstance(strength, int | float) and 0 < strength < 1:
            steps = steps_run(steps, strength)
        interval = settings.get("step_interval")
        return len(model_steps(steps, max(1, interval))) if isinstance(interval, int) else steps

    def _texts(self, model: Any) -> Collection[str] | None:
        workflow = self.forms.get(model) if isinstance(model, str) else None
        return None if workflow is None else workflow.texts

    def _checked(self, form: EditForm) -> EditForm:
        """Check a form, and add what follows from its fields and the models that are served.

        Raises:
            InvalidRequest: naming the field.
        """
        model = self.models.resolved(form.fields.model)
        if form.is_variation:
            model = self.models.varying(model)
            form = replace(form, settings={"strength": _VARIATION_STRENGTH, **form.settings})
        form = replace(form, fields=structs.replace(form.fields, model=model))
        steps = self.models.steps(model, form.fields.quality)
        if steps is not None:
            form = replace(form, settings={**form.settings, "num_inference_steps": steps})
        if workflow := self.forms.get(model or ""):
            workflow.check(form)
            return form
        if form.kind == "edit" and form.image and not form.is_variation:
            edits_whole = self.models.makes("edit", model)
            form = replace(form, masks_itself=not edits_whole or self._is_transparent(form.image))
        if form.kind != "inpaint" or form.fields.size == "auto":
            return form
        size = form.fields.size
        image = read_size(form.image or form.mask or b"", "image", self._limits)
        margins = _margins(size, image, form.fields.anchor)
        if form.settings.get("expand", margins) != margins:
            raise InvalidRequest("size", f"is {size[:20]}", "auto together with expand")
        return replace(form, settings={**form.settings, "expand": margins})

    def _is_transparent(self, image: bytes) -> bool:
        """Return whether an image has fully transparent pixels, which are its mask. Pictures that
        are too large for the router to decode count as opaque.
        """
        height, width = read_size(image, "image", self._limits)
        if height * width > DECODED_PIXELS:
            return False
        alpha = decode_mask(image, "image", self._limits).alpha
        return alpha is not None and not alpha.all()


def _margins(size: str, image: Size, anchor: str) -> list[int]:
    """Return the pixels left, top, right and bottom by which an image grows to a size.

    Args:
        size: WIDTHxHEIGHT.
        image: (height, width) of the image.
        anchor: position of the image on the canvas.

    Raises:
        InvalidRequest: `size` is malformed, or smaller than the image.
    """
    height, width = image
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
    growth = (int(match[2]) - height, int(match[1]) - width) if match else (-1, -1)
    if min(growth) < 0:
        raise InvalidRequest(
            "size", f"is {size[:20]}", f"auto, {width}x{height}, or larger: the picture grows"
        )
    top, left = (
        0 if first in anchor else excess if last in anchor else excess // 2
        for excess, first, last in zip(growth, ("top", "left"), ("bottom", "right"), strict=True)
    )
    margins = [left, top, growth[1] - left, growth[0] - top]
    if max(margins) > MAX_MARGIN:
        raise InvalidRequest("size", f"is {size[:20]}", f"at most {MAX_MARGIN} more on each side")
    return margins


def settings_of(form: EditForm) -> dict[str, Any]:
    """Return a form's settings with its size, or with OpenAI's reading of masks unless they choose
    one.
    """
    if form.kind != "inpaint":
        return {**form.settings, "size": form.fields.size}
    chosen = {"mask_mode", "mask_from"} & form.settings.keys()
    return {**form.settings} if chosen else {"mask_mode": "alpha", **form.settings}


def mask_of(form: EditForm) -> bytes:
    """Return MASK of a form; empty without one, and where the canvas grows."""
    if form.masks_itself and form.mask is None and not any(form.settings.get("expand") or ()):
        return form.image
    return form.mask or b""
