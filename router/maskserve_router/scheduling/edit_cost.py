"""Computes the cost of an edit from its mask and settings."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from msgspec import structs

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.request import model_steps, steps_run
from maskserve_common.contracts.reuse_levels import (
    Execution,
    ReuseLevel,
    levels_of,
)
from maskserve_common.contracts.settings import EditSettings, shares
from maskserve_common.contracts.status_record import Served
from maskserve_common.files.values import NO_VALUES, Values
from maskserve_common.imaging.images import Size, model_size, read_size
from maskserve_common.imaging.masks import cover_a_side, edit_region, select, tokens_within
from maskserve_common.imaging.view import canvas_size, choose_view
from maskserve_common.lru_cache import LruCache
from maskserve_common.routing import Edit
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder

_MASKS = 16_384
"""Masks whose token counts are remembered: many edits use the same few masks."""
_PART = 16 * 1024
_LONG = 2**30
"""A size that always takes a thread: a small mask file can have many pixels."""
_LOSSY_PIXEL, _META_BYTES = 2, 16 * 1024
"""Upper bounds: bytes per pixel of a lossy answer, and bytes of META."""
_MOST_PIXELS = 2**24
"""Most pixels of a mask that the router decodes; a pixel takes up to six bytes. An edit with a
larger mask counts as one of the whole picture, and its worker decodes the mask."""


class MaskTokens(NamedTuple):
    """Token counts of an edit's mask."""

    active: int
    """Tokens that a cached row computes."""
    total: int
    cover_a_side: bool
    """True if the computed tokens cover a whole side of the picture."""
    inner: int
    ring: int
    """Tokens inside the mask and in the ring round it, as in `routing.view.Edit`."""
    pixels: int
    """Pixels of the answer."""


def _levels(
    settings: EditSettings, served: Served, steps: int, refresh_steps: int
) -> dict[Execution, tuple[ReuseLevel, ...]]:
    """Return the reuse levels that an edit may step down to, by how it runs.

    Args:
        settings: settings of the edit.
        served: properties of the model.
        steps: steps of its schedule.
        refresh_steps: number of refresh steps; 0: none.
    """
    ring = served.mask_ring if settings.mask_ring is None else settings.mask_ring
    interval = settings.step_interval or served.step_interval
    settings = structs.replace(settings, mask_ring=ring, step_interval=interval)
    ways: tuple[Execution, ...] = ("cached", "own", "dense")
    return {way: levels_of(settings, served.skipping, way, steps, refresh_steps) for way in ways}


class EditCosts:
    """Computes the cost of edits. Use it from the event loop; masks are decoded in threads."""

    def __init__(
        self, config: RouterConfig, fair_share: FairShare, values: Values = NO_VALUES
    ) -> None:
        self._values = values
        self._limits = config.limits
        self._tokens: LruCache[bytes, MaskTokens] = LruCache(_MASKS)
        self._templates: LruCache[bytes, str] = LruCache(config.routing.remembered_images)
        self._fair_share = fair_share

    async def cost_of(
        self,
        client: KeyHolder,
        image: memoryview,
        mask: bytes,
        settings: EditSettings,
        served: Served,
        model: str,
        *,
        references: int = 0,
        prompted: bool,
    ) -> tuple[Edit, bytes, int]:
        """Return the cost of the edit, the digest of its image and the most bytes of its answer.

        Args:
            client: holder of the key that sent the edit.
            image: bytes of IMAGE; empty if the settings name a template.
            mask: bytes of MASK.
            settings: settings as the client sent them.
            served: properties of the model that runs the edit.
            model: name of that model.
            references: pictures beside the source.
            prompted: True if the prompt has text.

        Raises:
            InvalidRequest: the mask cannot be used.
            TemplateNotFound: IMAGE or MASK names a value that is not kept.
        """
        image = memoryview(self._values.read(image, client.scope))
        digest = image_digest(image)
        active, total, side, inner, ring, pixels = await self._tokens_of(
            client, image, mask, digest, settings, served
        )
        passes = 2 if settings.negative_prompt is not None else 1
        factor = passes * references_factor(references)
        scheduled = steps_run(
            settings.num_inference_steps or served.num_inference_steps, settings.strength
        )
        steps = len(model_steps(scheduled, settings.step_interval or served.step_interval))
        controls = shares(settings.controls, steps)
        adapters = tuple(lora.name for lora in settings.loras if lora.scale)
        refresh_steps = _refresh_steps(settings, served, steps, active / total)
        no_template = settings.cache in ("off", "own") or settings.promise > 0
        levels = _levels(settings, served, scheduled, refresh_steps)
        edit = Edit(
            steps=steps,
            active_tokens=round(factor * active),
            total_tokens=round(factor * total),
            template_id=settings.template_id or self._templates.get(digest) or "",
            priority=settings.priority,
            model=model,
            cache=served.cache
            and (refresh_steps > 0 or not no_template)
            and active < served.dense_above_ratio * total
            and not (served.dense_sides and side),
            dense_steps=served.dense_steps.of(steps, prompt=prompted, side=side),
            refresh_steps=refresh_steps,
            always_refreshes=refresh_steps > 0 and (served.own_over_template or no_template),
            inner_tokens=round(factor * inner),
            ring_tokens=round(factor * ring),
            adapters=adapters,
            controls=controls,
            cached_levels=levels["cached"],
            refresh_levels=levels["own"],
            dense_levels=levels["dense"],
        )
        return edit, digest, answer_bytes(pixels, settings)

    async def _tokens_of(
        self,
        client: KeyHolder,
        image: memoryview,
        mask: bytes,
        digest: bytes,
        settings: EditSettings,
        served: Served,
    ) -> MaskTokens:
        """Return the tokens of an edit, counted once for each mask."""
        drawn_on = b"" if mask else digest  # without a mask, the image gives the size
        key = await self._fair_share.run(
            client, len(mask), _mask_key, mask, drawn_on, settings, served
        )
        tokens = self._tokens.get(key)
        if tokens is None:
            drawn = self._values.read(mask, client.scope)
            tokens = await self._fair_share.run(
                client, _LONG, _count, image, drawn, settings, served, self._limits
            )
            self._tokens.put(key, tokens)
        return tokens

    def learn(self, digest: bytes, template_id: str) -> None:
        """Remember the template id that an answer gave for an image."""
        if digest and template_id:
            self._templates.put(digest, template_id)

    def knows(self, digest: bytes) -> bool:
        """Return whether the image's template is known, or there is no image."""
        return not digest or self._templates.get(digest) is not None


def references_factor(references: int) -> float:
    """Return the tokens of an edit with references beside its source, as a multiple of those
    without: of pictures of one size. A model that sees references sees the source beside the
    picture that it makes.
    """
    return (2 + references) / 2


def _refresh_steps(settings: EditSettings, served: Served, steps: int, mask_ratio: float) -> int:
    """Return the number of refresh steps if the template is not at hand; 0: all steps are dense."""
    if not settings.may_refresh or mask_ratio >= served.dense_above_ratio:
        return 0
    return served.refresh_strides.count_of(settings, steps)


def image_digest(image: memoryview) -> bytes:
    """Return the key by which an encoded image is remembered; empty for no image.

    It hashes the length and three parts of the file, because hashing all of a large one is slow. A
    forged collision only makes the router prefer another worker.
    """
    if not image:
        return b""
    middle = len(image) // 2
    parts = (image[:_PART], image[middle : middle + _PART], image[-_PART:])
    return hashlib.sha256(b"".join((str(len(image)).encode(), *parts))).digest()


def _count(
    image: memoryview,
    mask: bytes | memoryview,
    settings: EditSettings,
    served: Served,
    limits: LimitsConfig,
) -> MaskTokens:
    size = read_size(image, "IMAGE", limits) if image else None
    return count_tokens(mask, settings, served, limits, size)


def count_tokens(
    mask: bytes | memoryview,
    settings: EditSettings,
    served: Served,
    limits: LimitsConfig,
    size: Size | None = None,
) -> MaskTokens:
    """Return the token counts of an edit with this mask, or slightly higher ones.

    A mask that is too large for the router to decode counts as all tokens, as does none.

    Args:
        mask: bytes of MASK; empty: there is none.
        settings: settings of the edit.
        served: properties of the model.
        limits: limits, checked before decoding.
        size: (height, width) of the image, if known; the mask must have the same.

    Raises:
        InvalidRequest: naming MASK.
    """
    side, native = served.token_pixels, served.native_resolution
    if not mask and not any(settings.expand):
        return _whole(settings.answer_size or size or (native, native), served)
    if size is None:
        size = read_size(mask, "MASK", limits) if mask else (native, native)
    canvas = canvas_size(size, settings.expand, limits)
    if canvas[0] * canvas[1] > _MOST_PIXELS:
        return _whole(canvas, served)
    selected = select(mask, settings, limits, size).pixels
    view = choose_view(selected, settings, native, side)
    part = view.window.crop(selected)
    edit = edit_region(part, view.size, settings.mask_dilate, settings.mask_feather)
    ring = served.mask_ring if settings.mask_ring is None else settings.mask_ring
    rows, columns = view.size[0] // side, view.size[1] // side
    active, inner, outer = tokens_within(edit, side, ring, 0, max(ring, served.own_ring))
    covers = cover_a_side(active, rows, columns)
    ring_only, pixels = len(outer) - len(inner), canvas[0] * canvas[1]
    return MaskTokens(len(active), rows * columns, covers, len(inner), ring_only, pixels)


def _whole(size: Size, served: Served) -> MaskTokens:
    """Return the counts of an edit of a whole picture, by the (height, width) of its answer."""
    side = served.token_pixels
    rows, columns = (length // side for length in model_size(size, served.native_resolution, side))
    tokens = rows * columns
    return MaskTokens(tokens, tokens, True, tokens, 0, size[0] * size[1])


def answer_bytes(pixels: int, settings: EditSettings) -> int:
    """Return the most bytes of an answer with `pixels` pixels, by format.

    The bound is for noise, which no format compresses.
    """
    lossy = settings.output_format == "jpeg" or (
        settings.output_format == "webp" and settings.output_quality is not None
    )
    channels = 4 if settings.background == "transparent" else 3
    size = pixels * (_LOSSY_PIXEL if lossy else channels) + _META_BYTES
    return size * 4 // 3 if settings.output_encoding == "base64" else size


def _mask_key(mask: bytes, drawn_on: bytes, settings: EditSettings, served: Served) -> bytes:
    mask_settings = (
        settings.mask_mode,
        settings.mask_dilate,
        settings.mask_feather,
        settings.mask_ring,
    )
    part = settings.size, settings.expand, settings.crop_to_mask, settings.crop_padding
    model = (served.native_resolution, served.token_pixels, served.mask_ring)
    return hashlib.sha256(mask + drawn_on + repr((mask_settings, part, model)).encode()).digest()
