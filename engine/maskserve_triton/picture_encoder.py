"""Pictures of edits: moments of sources and references are cached; masked pictures are encoded
whole or in pieces.

A template's moments depend on its pixels alone. A Fill model's masked picture differs from its
template under the mask only; if the template is cached, it is encoded in pieces around the mask,
nearly as if whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_common.contracts.request import EditRequest
from maskserve_common.lru_cache import LruCache
from maskserve_engine.families.encoder import Encoder, TemplateEncoding
from maskserve_engine.fitting.memory import device_memory, encoded_at_once
from maskserve_engine.stages.encoded import NO_CONTROLS, NO_MOMENTS
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_engine.stages.vae_batches import FULL, shares_calls, vae_batches
from maskserve_engine.stages.vae_pieces import Pieces, PixelBox
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.run_encodings import RunEncodings

_log = logging.getLogger("maskserve")

_WHOLE_FROM: Final = 0.5
"""Share of a picture from which its pieces cost as much as the whole."""


class EncodedPictures(NamedTuple):
    """Encoded pictures of an edit."""

    moments: NDArray[np.float32]
    masked: NDArray[np.float32]
    from_cache: bool | None
    """Whether the template's moments came from the cache; None: there is no template."""
    whole: bool
    """Whether the masked picture was encoded whole."""
    batch: int
    """Masked pictures in the call of the VAE."""
    references: tuple[NDArray[np.float32], ...] = ()
    """Moments of the further references."""
    references_from_cache: bool | None = None
    """Whether all of these came from the cache; None: there are none."""


class PictureEncoder:
    """Encodes pictures with the VAE of a model. Used by one thread.

    Args:
        encoder: encoder of the served model.
        config: configuration of the worker.
        run_encodings: encodings of workflow runs; None: there are none.
    """

    def __init__(
        self, encoder: Encoder, config: Config, run_encodings: RunEncodings | None
    ) -> None:
        self._run_encodings, self._encoder = run_encodings, encoder
        self._encode_halo, device = config.stages.encode_halo, encoder.vae.device
        self._device = device.type
        self._shares_calls = shares_calls(config.stages, self._device)
        self._most_pixels = FULL
        if self._shares_calls:
            total, _ = device_memory(device)
            pictures = encoded_at_once(config, encoder.spec, device.type, total)
            self._most_pixels = max(FULL, pictures * encoder.spec.native_resolution**2)
        self._cache: LruCache[str, TemplateEncoding] = LruCache(
            config.stages.template_bytes,
            lambda encoding: encoding.nbytes,
            on_evict=lambda pixels_id, encoding: self._for_decoder.drop(pixels_id),
        )
        self._for_decoder = MomentsFolder(config.runtime_dir)
        self._for_decoder.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the cached encodings."""
        return self._cache.nbytes

    def cached(self, pixels_id: str) -> TemplateEncoding | None:
        """Return a picture's cached encoding; empty names have none."""
        return self._cache.get(pixels_id) if pixels_id else None

    def whole_pictures(self, edits: Sequence[EncoderInput]) -> WholePictures:
        """Plan the calls of the VAE for the edits of one call, whose runs are read before."""
        for edit_input in edits:
            self._read_run(edit_input)
        return WholePictures(self._encoder, edits, self._shared(edits), self._most_pixels)

    def encode(
        self, number: int, edit_input: EncoderInput, whole: WholePictures
    ) -> EncodedPictures:
        """Encode the pictures of the edit with this number in `whole`."""
        encoded = self._encode(number, edit_input, whole)
        self._write_run(edit_input)
        return encoded

    def control_moments(self, controls: NDArray[np.uint8] | None) -> NDArray[np.float32]:
        """Encode control pictures, [pictures, 2C, h, w], for ControlNets that read latents."""
        takes = self._encoder.spec.control
        if takes is None or not takes.latents or controls is None or not len(controls):
            return NO_CONTROLS
        return np.stack([self._encoder.moments(picture) for picture in controls])

    def _encode(
        self, number: int, edit_input: EncoderInput, whole: WholePictures
    ) -> EncodedPictures:
        edit, mask = edit_input.edit, edit_input.edit_mask
        if edit.kind == "generate":
            return EncodedPictures(self._encoder.no_moments(mask), NO_MOMENTS, None, True, 1)
        template, is_cached = self._template(
            edit.pixels_id, partial(whole.source, number), alone=edit.settings.reproducible
        )
        if not self._encoder.spec.semantics.masked_picture:
            return self._with_references(edit_input, template, is_cached)
        if not mask.any():  # a template that is primed
            return EncodedPictures(template.moments, template.moments, is_cached, True, 1)
        pieces = self._pieces(edit, template) if is_cached and number not in whole else None
        if pieces is None:
            moments, batch = whole.masked(number)
            return EncodedPictures(template.moments, moments, is_cached, True, batch)
        moments = self._encoder.masked_pieces(edit_input.pixels, mask, pieces, template)
        return EncodedPictures(template.moments, moments, is_cached, False, 1)

    def _with_references(
        self, edit_input: EncoderInput, template: TemplateEncoding, is_cached: bool
    ) -> EncodedPictures:
        further = zip(edit_input.edit.references, edit_input.pictures[1:], strict=True)
        encoded = [
            self._template(reference.pixels_id, partial(self._encoder.template, pixels))
            for reference, pixels in further
        ]
        references = tuple([encoding.moments for encoding, _ in encoded])
        are_cached = all(from_cache for _, from_cache in encoded) if encoded else None
        return EncodedPictures(
            template.moments, NO_MOMENTS, is_cached, True, 1, references, are_cached
        )

    def _shared(self, edits: Sequence[EncoderInput]) -> dict[int, bool]:
        """Return the edits whose masked pictures may share a call, since none is known to go in
        pieces, and whether their sources do, too: those that are not cached, once each.
        """
        if not self._shares_calls or not self._encoder.spec.semantics.masked_picture:
            return {}
        shared: dict[int, bool] = {}
        sources = set[str]()
        for number, edit_input in enumerate(edits):
            edit, mask = edit_input.edit, edit_input.edit_mask
            template = self.cached(edit.pixels_id)
            in_pieces = template is not None and self._pieces(edit, template) is not None
            if mask.any() and not in_pieces and not edit.settings.reproducible:
                # What a run shares is encoded as by any other worker of the host.
                is_new = template is None and not edit_input.run and edit.pixels_id not in sources
                shared[number] = is_new
                sources.add(edit.pixels_id)
        return shared

    def _template(
        self, pixels_id: str, encode: Callable[[], TemplateEncoding], *, alone: bool = False
    ) -> tuple[TemplateEncoding, bool]:
        """Return a picture's encoding, and whether it came from the cache.

        Args:
            pixels_id: names the encoding; empty: it is not cached.
            encode: encodes the picture.
            alone: whether its call must have no other picture.
        """
        cached = self.cached(pixels_id)
        if cached is not None and (cached.alone or not alone):
            return cached, True
        encoding = encode()
        if pixels_id:
            self._keep(pixels_id, encoding)
        return encoding, False

    def _keep(self, pixels_id: str, encoding: TemplateEncoding) -> None:
        self._for_decoder.write(pixels_id, encoding.moments)
        self._cache.put(pixels_id, encoding)

    def _pieces(self, edit: EditRequest, template: TemplateEncoding) -> Pieces | None:
        """Return the pieces in which to encode the masked picture; None: encode it whole."""
        exact = edit.settings.reproducible or edit.settings.cache == "off"
        halo = self._encode_halo
        if exact or not halo or not edit.edit_boxes or template.sums is None:
            return None
        factor = self._encoder.spec.vae_scale_factor
        boxes = [PixelBox(*box).shrunk(factor) for box in edit.edit_boxes]
        _, height, width = template.moments.shape
        pieces = self._encoder.pieces(boxes, (height, width), halo)
        return pieces if pieces.pay(_WHOLE_FROM, factor, self._device) else None

    def _read_run(self, edit_input: EncoderInput) -> None:
        """Bring what the edit's run has of its pictures into the cache."""
        if self._run_encodings is None or not edit_input.run:
            return
        for pixels_id in edit_input.pixels_ids:
            if self.cached(pixels_id) is None:
                template = self._run_encodings.template(pixels_id, edit_input.run_scope)
                if template is not None:
                    self._keep(pixels_id, template)

    def _write_run(self, edit_input: EncoderInput) -> None:
        """Keep an edit's pictures for its run, if the edit makes them."""
        if self._run_encodings is None or not edit_input.makes:
            return
        for pixels_id in edit_input.pixels_ids:
            if (template := self.cached(pixels_id)) is not None:
                self._run_encodings.keep_template(pixels_id, template, edit_input.run_scope)


class _Picture(NamedTuple):
    number: int
    """Number of the edit."""
    masked: bool
    """Whether it is the masked picture, not the source."""


class WholePictures:
    """Sources and masked pictures that are encoded as a whole; those that share a call are encoded
    when the first is requested.

    Args:
        encoder: encoder of the model.
        edits: edits of one call.
        shared: edits whose masked pictures may share a call of the VAE, and whether their sources
            do, too.
        most: maximum pixels of a call.
    """

    def __init__(
        self,
        encoder: Encoder,
        edits: Sequence[EncoderInput],
        shared: Mapping[int, bool],
        most: int,
    ) -> None:
        self._encoder, self._edits = encoder, edits
        sizes: dict[_Picture, tuple[int, int]] = {}
        for number, has_source in shared.items():
            height, width = edits[number].edit_mask.shape
            names = [_Picture(number, False)] * has_source + [_Picture(number, True)]
            sizes |= dict.fromkeys(names, (height, width))
        self._batches = vae_batches(sizes, most)
        self._sources: dict[int, TemplateEncoding] = {}
        self._masked: dict[int, tuple[NDArray[np.float32], int]] = {}

    def __contains__(self, number: int) -> bool:
        return _Picture(number, True) in self._batches

    def source(self, number: int) -> TemplateEncoding:
        if number not in self._sources:
            self._encode(_Picture(number, False))
        return self._sources.pop(number)

    def masked(self, number: int) -> tuple[NDArray[np.float32], int]:
        """Return an edit's moments, and the number of masked pictures in the same call."""
        if number not in self._masked:
            self._encode(_Picture(number, True))
        return self._masked.pop(number)

    def _encode(self, picture: _Picture) -> None:
        """Encode a picture, with those of its call or, if that fails, alone."""
        batch = self._batches.get(picture, (picture,))
        if len(batch) > 1:
            try:
                self._encode_together(batch)
            except Exception:
                _log.exception("%d pictures were not encoded together; each goes alone", len(batch))
                self._batches |= {member: (member,) for member in batch}
            else:
                return
        edit = self._edits[picture.number]
        if picture.masked:
            [moments] = self._encoder.all_masked_moments([(edit.pixels, edit.edit_mask)])
            self._masked[picture.number] = moments, 1
        else:
            self._sources[picture.number] = self._encoder.template(edit.pixels)

    def _encode_together(self, batch: Sequence[_Picture]) -> None:
        sources = [member.number for member in batch if not member.masked]
        masked = [member.number for member in batch if member.masked]
        templates, moments = self._encoder.encode_pictures(
            [self._edits[number].pixels for number in sources],
            [(self._edits[number].pixels, self._edits[number].edit_mask) for number in masked],
        )
        self._sources |= zip(sources, templates, strict=True)
        self._masked |= {
            number: (m, len(masked)) for number, m in zip(masked, moments, strict=True)
        }
