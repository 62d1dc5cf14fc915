"""What the encoder model does with an edit: what another edit has made of it already is kept.

A prompt's embeddings and a template's moments are functions of their keys alone, whatever ran
before, so an edit gets the same bits from what is kept as from the models. A Fill model's masked
picture differs from its template under the mask only; where the template is kept, it is encoded
in pieces round the mask, nearly as if whole.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskserve_core.config import Config
from maskserve_core.contracts.keys import scope_of
from maskserve_core.contracts.request import EditRequest
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT, write_priming_prompt
from maskserve_engine.families.encoder import Encoder, TemplateEncoding
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.job import Conditioning
from maskserve_engine.stages.encoded import NO_CONTROLS, NO_MOMENTS, Encoded, EncodeReport
from maskserve_engine.stages.kept import Kept
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_engine.stages.vae_pieces import Pieces, PixelBox

_WHOLE_FROM = 0.5
"""Share of a picture from which its pieces cost as much as all of it."""


class PromptKey(NamedTuple):
    """All that a prompt's embeddings depend on."""

    model: str
    length: int
    """Tokens of a prompt: `[model] max_sequence_length`."""
    text: str
    negative: bool
    """An empty negative prompt may be zeros."""
    loras: tuple[tuple[str, float], ...]
    """File and scale of those that change the text encoders, as they are added one by one."""
    owner: str | None = None
    """The API key's scope, where its prompts are kept for it alone."""


class EditEncoder:
    """The encoder of a worker. One thread encodes at a time.

    Args:
        encoder: of the served model.
        config: of the worker.
    """

    def __init__(self, encoder: Encoder, config: Config) -> None:
        self._encoder, self._model = encoder, config.model
        self._adapters = TextAdapters(config, encoder.text_models)
        self._stages = stages = config.stages
        self._prompts: Kept[PromptKey, Conditioning] = Kept(stages.prompt_bytes, _nbytes)
        self._templates: Kept[str, TemplateEncoding] = Kept(
            stages.template_bytes, lambda encoding: encoding.nbytes
        )
        self._for_decoder = MomentsFolder(config.runtime_dir)
        self._for_decoder.clear()

    @classmethod
    def load(cls, config: Config) -> EditEncoder:
        """The encoder of the folder that `[model] path` names; the denoiser is told how an empty
        prompt is encoded, as it has no text encoders and primes with it.

        Raises:
            ConfigError: a part cannot be loaded.
        """
        loaded = cls(load_encoder(config), config)
        empty = loaded._embeddings(loaded._key(PRIMING_PROMPT))
        write_priming_prompt(empty, config.runtime_dir)
        return loaded

    def close(self) -> None:
        self._adapters.close()

    def encode(
        self,
        edit: EditRequest,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        controls: NDArray[np.uint8] | None = None,
    ) -> tuple[Encoded, EncodeReport]:
        """Encode one edit.

        Args:
            edit: the request.
            pixels: [H, W, 3] source at model resolution.
            edit_mask: [H, W], above 127 = edit.
            controls: [pictures, H, W, 3] control pictures; None: there are none.

        Raises:
            InvalidRequest: a LoRA's file does not fit.
            Overloaded: a LoRA's file has left the host since the edit was accepted.
        """
        begin = time.perf_counter()
        prompt, negative, prompt_kept = self._conditioning(edit)
        template, template_kept = self._template(edit, pixels)
        masked, masked_whole = NO_MOMENTS, True
        if self._encoder.facts.semantics == "fill":
            pieces = self._pieces(edit, template) if template_kept else None
            if not edit_mask.any():  # a template that is primed
                masked = template.moments
            elif pieces is None:
                masked = self._encoder.masked_moments(pixels, edit_mask)
            else:
                masked = self._encoder.masked_pieces(pixels, edit_mask, pieces, template)
                masked_whole = False
        return (
            Encoded(template.moments, masked, prompt, negative, self._control_moments(controls)),
            EncodeReport(
                ms=1e3 * (time.perf_counter() - begin),
                prompt="kept" if prompt_kept else "made",
                template="kept" if template_kept else "made",
                masked="whole" if masked_whole else "pieces",
            ),
        )

    def _control_moments(self, controls: NDArray[np.uint8] | None) -> NDArray[np.float32]:
        """[pictures, 2C, h, w], where ControlNets are given latents."""
        if not self._encoder.facts.control.latents or controls is None or not len(controls):
            return NO_CONTROLS
        return np.stack([self._encoder.moments(picture) for picture in controls])

    def _conditioning(self, edit: EditRequest) -> tuple[Conditioning, Conditioning | None, bool]:
        """Of the prompt, of the negative one, and whether nothing had to be computed."""
        settings = edit.settings
        loras = tuple((lora.version, lora.scale) for lora in edit.loras if lora.text and lora.scale)
        keys = [self._key(edit.prompt, loras)]
        if settings.negative_prompt is not None:
            keys.append(self._key(settings.negative_prompt, loras, negative=True))
        if settings.private_prompt:
            keys = [key._replace(owner=scope_of(edit.request_id)) for key in keys]
        found = {key: held for key in keys if (held := self._prompts.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        if missing:
            with self._adapters.applied(edit.loras):
                found |= {key: self._embeddings(key) for key in missing}
        negative = found[keys[1]] if len(keys) == 2 else None
        return found[keys[0]], negative, not missing

    def _key(
        self, text: str, loras: tuple[tuple[str, float], ...] = (), *, negative: bool = False
    ) -> PromptKey:
        return PromptKey(self._model.path, self._model.max_sequence_length, text, negative, loras)

    def _embeddings(self, key: PromptKey) -> Conditioning:
        """Computed, and kept. The key's LoRAs are applied by who calls."""
        encoder = self._encoder
        encoded = (encoder.encode_negative if key.negative else encoder.encode_prompt)(key.text)
        self._prompts.put(key, encoded)
        return encoded

    def _template(
        self, edit: EditRequest, pixels: NDArray[np.uint8]
    ) -> tuple[TemplateEncoding, bool]:
        """The source's encoding, and whether it was kept."""
        held = self._templates.get(edit.pixels_id) if edit.pixels_id else None
        if held is not None:
            return held, True
        made = self._encoder.template(pixels)
        if edit.pixels_id:
            self._for_decoder.write(edit.pixels_id, made.moments)
            for gone in self._templates.put(edit.pixels_id, made):
                self._for_decoder.drop(gone)
        return made, False

    def _pieces(self, edit: EditRequest, template: TemplateEncoding) -> Pieces | None:
        """In which to encode the masked picture; None: as a whole."""
        exact = edit.settings.reproducible or edit.settings.cache == "off"
        halo = self._stages.encode_halo
        if exact or not halo or not edit.edit_boxes or template.sums is None:
            return None
        factor = self._encoder.facts.vae_scale_factor
        boxes = [PixelBox(*box).shrunk(factor) for box in edit.edit_boxes]
        _, height, width = template.moments.shape
        pieces = self._encoder.pieces(boxes, (height, width), halo)
        return pieces if pieces.share < _WHOLE_FROM else None


def _nbytes(encoded: Conditioning) -> int:
    return sum(array.nbytes for array in encoded.values())
