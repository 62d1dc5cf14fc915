"""The decoder model: it decodes an event's latents to pixels, as a whole or only around the pasted
area.

A dense edit equals the pipeline's, and reproducible ones are equal on every worker, so these are
decoded as a whole. A cached edit equals its template outside of its mask, and is decoded in pieces
with the norms of the template's own decode. That decode runs when the template's first cached edit
arrives, from the moments that the encoder has left in the runtime folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_common.contracts.meta import with_decoded
from maskserve_common.contracts.postprocess_context import request_in
from maskserve_common.contracts.request import EditRequest
from maskserve_common.errors import EngineFailed
from maskserve_common.lru_cache import LruCache
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.stages.latents import to_model
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_engine.stages.vae_batches import shares_calls, vae_batches
from maskserve_engine.stages.vae_pieces import CellSums, Pieces, PixelBox

_WHOLE_FROM = 0.7
"""Share of a picture from which its pieces cost as much as the whole."""
_FILTER = 3
"""Margin of pixels that is read round a box when it is resized."""


class _Event(msgspec.Struct):
    """Fields of META that the decoder reads."""

    event: str = ""
    cache: str = ""
    mask_ring: int | None = None
    """Margin that the edit was made with, known once it has ended."""


_read_event = msgspec.json.Decoder(_Event).decode


class ToDecode(NamedTuple):
    """An event with latents."""

    latents: NDArray[np.float32]
    """[C, h, w]"""
    meta: bytes
    context: NDArray[np.uint8]
    """The CONTEXT tensor."""


class _Whole(NamedTuple):
    """Plan to decode all of an event's latents."""

    alone: bool
    """Whether it needs a call of its own."""


class _InPieces(NamedTuple):
    """Pieces to decode of an event, and the norms of the template's decode."""

    pieces: Pieces
    template: CellSums


class EditDecoder:
    """Decoder of a worker. One thread decodes at a time."""

    def __init__(self, decoder: Decoder, spec: ModelSpec, config: Config) -> None:
        self._decoder, self._spec, self._stages = decoder, spec, config.stages
        self._device = decoder.vae.device.type
        self._shares_calls = shares_calls(config.stages, self._device)
        self._moments = MomentsFolder(config.runtime_dir)
        self._sums: LruCache[str, CellSums] = LruCache(
            config.stages.decode_bytes, lambda sums: sums.nbytes
        )

    def decode(
        self, latents: NDArray[np.float32], meta: bytes, context: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], bytes]:
        """Decode one event alone: `decode_all` of it, with its error raised."""
        [result] = self.decode_all([ToDecode(latents, meta, context)])
        if isinstance(result, Exception):
            raise result
        return result

    def decode_all(
        self, events: Sequence[ToDecode]
    ) -> Iterator[tuple[NDArray[np.uint8], bytes] | Exception]:
        """Decode final events or previews of one call. Yield, in this order and as soon as each is
        done, its pixels and META with the way of decoding, or its error.

        Events that are decoded as a whole share calls of the VAE if that pays, except for
        `reproducible` edits.
        """
        plans = [self._plan(event) for event in events]
        sharing = {
            number: (event.latents.shape[1], event.latents.shape[2])
            for number, (event, plan) in enumerate(zip(events, plans, strict=True))
            if isinstance(plan, _Whole) and not plan.alone and self._shares_calls
        }
        factor = self._spec.latents.pixels
        batches = vae_batches({n: (h * factor, w * factor) for n, (h, w) in sharing.items()})
        pixels_by_number: dict[int, NDArray[np.uint8] | EngineFailed] = {}
        for number, (event, plan) in enumerate(zip(events, plans, strict=True)):
            result: tuple[NDArray[np.uint8], bytes] | Exception
            try:
                if isinstance(plan, Exception):
                    raise plan
                if isinstance(plan, _InPieces):
                    pixels = self._decoder.decode_pieces(event.latents, plan.pieces, plan.template)
                    result = pixels, with_decoded(event.meta, share=plan.pieces.share)
                else:
                    batch = batches.get(number, (number,))
                    if number not in pixels_by_number:
                        pixels_of = self._decoder.decode_all([events[n].latents for n in batch])
                        pixels_by_number |= zip(batch, pixels_of, strict=True)
                    whole = pixels_by_number.pop(number)
                    if isinstance(whole, EngineFailed):
                        raise whole
                    result = whole, with_decoded(event.meta, batch=len(batch))
            except Exception as error:
                result = error
            yield result

    def _plan(self, event: ToDecode) -> _Whole | _InPieces | Exception:
        """Choose how to decode an event."""
        size = event.latents.shape[1], event.latents.shape[2]
        try:
            in_pieces = self._stages.decode_halo and self._decoder.takes_pieces(size)
            if not (in_pieces or self._shares_calls):
                return _Whole(alone=True)
            edit = EditRequest.from_json(request_in(event.context))
            pieces_plan = self._pieces(_read_event(event.meta), edit, size) if in_pieces else None
            return pieces_plan or _Whole(alone=edit.settings.reproducible)
        except Exception as error:
            return error

    def _pieces(self, event: _Event, edit: EditRequest, size: tuple[int, int]) -> _InPieces | None:
        """Return the pieces to decode and the norms of the template; None: the whole picture."""
        settings = edit.settings
        cached, is_preview = event.cache in ("hit", "own"), event.event == "preview"
        if not (cached or is_preview) or settings.reproducible or settings.cache == "off":
            return None
        if not edit.edit_boxes:
            return None
        ring = settings.mask_ring if event.mask_ring is None else event.mask_ring
        assert ring is not None
        patch = self._spec.patch
        pieces = self._decoder.pieces(
            _latent_boxes(edit, self._spec.vae_scale_factor),
            size,
            halo=self._stages.decode_halo,
            spread=patch * ring + patch - 1,
        )
        if not pieces.pay(_WHOLE_FROM, self._spec.latents.pixels, self._device):
            return None
        # To decode all of a picture that may never come again gains nothing.
        template = self._template(edit.pixels_id, make=event.cache == "hit")
        return None if template is None else _InPieces(pieces, template)

    def _template(self, pixels_id: str, *, make: bool) -> CellSums | None:
        """Return the norms of a template's decode; if they are not cached, decode it when
        `make`.
        """
        cached_sums = self._sums.get(pixels_id)
        if cached_sums is not None or not make:
            return cached_sums
        moments = self._moments.read(pixels_id)
        if moments is None:
            return None
        space = self._spec.latents
        mean = torch.from_numpy(moments[: len(moments) // 2])
        sums = self._decoder.sums(to_model(mean, space).numpy())
        self._sums.put(pixels_id, sums)
        return sums


def _latent_boxes(edit: EditRequest, factor: int) -> list[PixelBox]:
    """Boxes of latents that cover what an edit pastes.

    Args:
        edit: the request.
        factor: pixels per latent, along one side.
    """
    margin = 0 if edit.view_size == edit.model_size else _FILTER
    grown = (PixelBox(*box).grown(margin, edit.model_size) for box in edit.edit_boxes)
    return [box.shrunk(factor) for box in grown]
