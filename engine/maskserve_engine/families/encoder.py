"""Encoders of pixels and prompts: the part that all families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.config import Config
from maskserve_engine.adapters.fuse import fuse_configured_loras
from maskserve_engine.base.job import Conditioning
from maskserve_engine.batch.graphs import Graphs, Inputs, Launcher
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.encoded import NO_MOMENTS, Encoded, TokensRead
from maskserve_engine.stages.loader import load_part, load_plain
from maskserve_engine.stages.vae import is_tiled, load_vae, moments_of
from maskserve_engine.stages.vae_pieces import (
    CellSums,
    MixedNorm,
    Norm,
    NormRecorder,
    Pieces,
    PixelBox,
    is_local,
    plain_resnets,
    plan_pieces,
    resnet,
)

RECORDED_PROMPTS = 2
"""Most prompts of a recorded call; those of a longer one keep the device busy."""
RECORDED_LENGTHS = 64
"""Recorded calls for prompts of any length have a multiple of so many tokens."""
RIM = 1
"""Width, in latents, of a piece's rim, which lacks too much of its surroundings to be used."""


@dataclass(frozen=True, slots=True)
class _TextCall:
    """A call of a text encoder that may be recorded (`graphs.BatchStep`)."""

    states_of: Callable[[Tensor], Tensor]
    packed: Tensor
    """[…, prompts, length] token ids, and what else the encoder reads."""

    @property
    def shapes(self) -> Hashable | None:
        *_, prompts, _ = shape = tuple(self.packed.shape)
        return shape if prompts <= RECORDED_PROMPTS else None

    @property
    def common(self) -> bool:
        return True

    def copied(self, inputs: Inputs) -> _TextCall:
        return _TextCall(self.states_of, self.packed.clone())

    def take(self, other: _TextCall, *, all_inputs: bool) -> None:
        self.packed.copy_(other.packed)

    def run(self, launcher: Launcher) -> Tensor:
        return self.states_of(self.packed)

    def answer_of(self, recorded: Tensor) -> Tensor:
        return recorded.clone()


@dataclass(frozen=True, slots=True)
class TextEncoder:
    tokenizer: Any
    model: Any
    length: int
    """Tokens of a prompt: shorter prompts are padded, longer ones cut, as in diffusers."""
    graphs: Graphs | None = field(default=None, kw_only=True)
    """Records calls, a graph for each number of prompts; None: nothing is recorded."""

    @classmethod
    def load(
        cls,
        config: Config,
        model: Any,
        number: str = "",
        length: int | None = None,
        load: Callable[[Config, str, Any], Any] = load_part,
        tokenizer: str = "tokenizer",
    ) -> TextEncoder:
        """Load a text encoder and its tokenizer.

        Args:
            config: names the folder.
            model: class of the model.
            number: suffix of the folder's parts: "", or "_2" for the second encoder.
            length: tokens of a prompt; None: the tokenizer's maximum.
            load: function that reads the model.
            tokenizer: name of the tokenizer's part.

        Raises:
            ConfigError: a part is missing or unreadable.
        """
        from transformers import AutoTokenizer

        words = load_plain(config, f"{tokenizer}{number}", AutoTokenizer)
        encoder = fuse_configured_loras(
            config, load(config, f"text_encoder{number}", model), f"text_encoder{number}"
        )
        return cls(words, encoder, length or words.model_max_length)

    def __call__(self, prompts: Sequence[str], *, hidden_states: bool = False) -> Any:
        return self.model(self._ids(prompts), output_hidden_states=hidden_states)

    def states(self, prompts: Sequence[str]) -> Tensor:
        """Return [prompts, length, width] of the last layer."""
        return self.answer(self._last_states, self._ids(prompts))

    def _last_states(self, ids: Tensor) -> Tensor:
        states: Tensor = self.model(ids).last_hidden_state
        return states

    def answer(self, states_of: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return the states of inputs [..., prompts, length], always of the same function, whose
        calls may be recorded.
        """
        call = _TextCall(states_of, inputs)
        return call.run(Launcher()) if self.graphs is None else self.graphs.answer(call)

    def recorded(self) -> Self:
        """Return the encoder with calls of `answer` recorded on a CUDA device that holds its
        weights.
        """
        return replace(self, graphs=Graphs.on(self.model.device, self.model.dtype))

    def _ids(self, prompts: Sequence[str]) -> Tensor:
        ids: Tensor = self.tokenizer(
            list(prompts),
            padding="max_length",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        # With `meta` weights hooks move the input.
        return ids if self.model.device.type == "meta" else ids.to(self.model.device)

    def read_of(self, prompt: str) -> TokensRead:
        whole = len(self.tokenizer(prompt, verbose=False).input_ids)
        used = min(whole, self.length)
        return TokensRead(used, whole - used)


@dataclass(frozen=True, slots=True)
class ChatEncoder(TextEncoder):
    """A text encoder that puts prompts into a chat template."""

    thinking: ClassVar[bool] = False
    """Whether the template leaves room for the model's thinking."""

    def read_of(self, prompt: str) -> TokensRead:
        messages = [{"role": "user", "content": prompt}]
        whole = len(
            self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, enable_thinking=self.thinking,
                return_dict=True,
            )["input_ids"]
        )  # fmt: skip
        used = min(whole, self.length)
        return TokensRead(used, whole - used)


@dataclass(frozen=True, slots=True)
class TemplateEncoding:
    """The cached encoding of a template, in host memory."""

    moments: NDArray[np.float32]
    """[2C, h, w]."""
    middle: Tensor | None = None
    """[1, width, h, w] input of the encoder's middle, if that has attention."""
    sums: CellSums | None = None
    """None if masked pictures are not encoded in pieces."""
    alone: bool = True
    """Whether its call of the VAE had no other picture; rounding depends on it."""

    @property
    def nbytes(self) -> int:
        more = sum(tensor.nbytes for tensor in (self.middle, self.sums) if tensor is not None)
        return self.moments.nbytes + int(more)


class Encoder(ABC):
    def __init__(self, spec: ModelSpec, vae: Any) -> None:
        from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D

        self.spec, self.vae = spec, vae
        self._device, self._dtype = vae.device, vae.dtype  # each look-up walks all modules
        masked = spec.semantics.masked_picture
        self.has_pieces = masked and plain_resnets(vae.encoder.down_blocks, DownEncoderBlock2D)
        """Whether the model takes a masked picture that can be encoded in pieces."""
        self._local = is_local(vae.encoder.mid_block)

    def encode(
        self,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        prompt: str,
        negative_prompt: str | None = None,
        references: Sequence[NDArray[np.uint8]] = (),
    ) -> Encoded:
        """Encode one edit, without any cache.

        Args:
            pixels: [H, W, 3] source at model resolution; [0, 0, 3]: there is none.
            edit_mask: [H, W], above 0 = edit.
            prompt: any text; it is cut to the text encoders' length, as in diffusers.
            negative_prompt: any text; None: no negative prompt.
            references: [h, w, 3] of each further reference.
        """
        pictures = [pixels, *references] if pixels.size else []
        moments = self.moments(pixels) if pictures else self.no_moments(edit_mask)
        masked = NO_MOMENTS
        if self.spec.semantics.masked_picture:
            masked = self.masked_moments(pixels, edit_mask)
        text, away = self.encode_prompt(prompt, pictures), None
        if negative_prompt is not None:
            away = self.as_negative(negative_prompt, self.encode_prompt(negative_prompt, pictures))
        further = tuple([self.moments(reference) for reference in references])
        return Encoded(moments, masked, text, away, references=further)

    def no_moments(self, edit_mask: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return zeros in place of a source's moments, [2C, h, w], of the size of an edit mask."""
        space = self.spec.latents
        height, width = (side // space.pixels for side in edit_mask.shape)
        return np.zeros((2 * space.channels, height, width), np.float32)

    def moments(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return [2C, h, w] of the source."""
        with torch.inference_mode():
            return self._moments(_image(pixels))

    def masked_moments(
        self, pixels: NDArray[np.uint8], edit_mask: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """Return [2C, h, w] of the source with the masked area blanked."""
        [moments] = self.all_masked_moments([(pixels, edit_mask)])
        return moments

    def all_masked_moments(
        self, edits: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    ) -> list[NDArray[np.float32]]:
        """Return `masked_moments` of several edits of one size, in one call."""
        return self.encode_pictures((), edits)[1]

    def template(self, pixels: NDArray[np.uint8]) -> TemplateEncoding:
        """Return the source's moments, bit for bit as `moments`, and the data that `masked_pieces`
        needs.
        """
        [template], _ = self.encode_pictures((pixels,), ())
        return template

    def encode_pictures(
        self,
        sources: Sequence[NDArray[np.uint8]],
        edits: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]],
    ) -> tuple[list[TemplateEncoding], list[NDArray[np.float32]]]:
        """Return `template` of sources, and `masked_moments` of edits (pixels and edit mask), all
        of one size and in one call.
        """
        images = [_image(pixels) for pixels in sources]
        images += [_image(pixels) * torch.from_numpy(mask == 0) for pixels, mask in edits]
        count, factor = len(sources), self.spec.vae_scale_factor
        size = images[0].shape[2] // factor, images[0].shape[3] // factor
        recorder = None
        if count and self.has_pieces and not is_tiled(self.vae, size, self.spec.latents):
            recorder = NormRecorder(size, count)
        middles: list[Tensor | None] = [None] * count
        sums: Sequence[CellSums | None] = [None] * count
        with torch.inference_mode():
            batch = torch.cat(images)
            if recorder is None:
                moments = self._all_moments(batch)
            else:
                maps = self._down([self._on_device(batch)], recorder)
                if not self._local:
                    middles = [x.clone() for x in maps[0][:count].cpu().split(1)]
                moments, sums = to_numpy(self._finish(maps, recorder)[0]), recorder.sums
        alone = len(images) == 1
        templates = [
            TemplateEncoding(x.copy(), middle, of_norms, alone)
            for x, middle, of_norms in zip(moments[:count], middles, sums, strict=True)
        ]
        return templates, list(moments[count:])

    def masked_pieces(
        self,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        pieces: Pieces,
        template: TemplateEncoding,
    ) -> NDArray[np.float32]:
        """Return nearly `masked_moments`: the masked picture is encoded in pieces that cover the
        mask, and is the template elsewhere.
        """
        assert template.sums is not None
        level = len(pieces.halos) - 1
        with torch.inference_mode():
            maps = []
            for box in pieces.boxes:
                part = pieces.outer(box, level).slices
                blanked = torch.from_numpy(edit_mask[part] == 0)
                maps.append(self._on_device(_image(pixels[part]) * blanked))
            norm = MixedNorm(template.sums, pieces, self._device)
            maps = self._down(maps, norm)
            if template.middle is None:
                moments = torch.from_numpy(template.moments)[None].clone()
                return to_numpy(_laid(moments, self._finish(maps, norm), pieces)[0])
            middle = _laid(template.middle.to(self._device, copy=True), maps, pieces)
            [moments_batch] = self._finish(
                [middle], lambda norm, maps, level: [norm(x) for x in maps]
            )
            return to_numpy(moments_batch[0])

    def pieces(self, boxes: Sequence[PixelBox], size: tuple[int, int], halo: int) -> Pieces:
        """Plan how to encode boxes of latents with a halo, in latents."""
        levels = range(len(self.spec.latents.widths))
        return plan_pieces(boxes, size, halos=tuple(halo << k for k in levels), spread=1)

    @property
    @abstractmethod
    def text_encoders(self) -> dict[str, TextEncoder]:
        """Return the text encoders, by folder name."""

    @property
    def text_models(self) -> dict[str, Any]:
        """Text encoders that LoRAs may change, by folder name: only CLIP's, as in diffusers
        (`BaseLayers.fixed`).
        """
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        return {
            name: text.model
            for name, text in self.text_encoders.items()
            if isinstance(text.model, CLIPTextModel | CLIPTextModelWithProjection)
        }

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return each prompt's arrays, by the family's names, computed in one call."""

    def encode_prompt(
        self, prompt: str, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> Conditioning:
        """Return one prompt's arrays. `pictures`, the source and further references, [h, w, 3] each
        as the model sees them, are read by models whose prompts are about pictures
        (`ModelSpec.encoder_picture`).
        """
        [encoded] = self.encode_prompts([prompt])
        return encoded

    def priming_prompt(self) -> Conditioning:
        """Return the prompt that templates are primed with; empty for models whose prompts are
        about a picture.
        """
        return {} if self.spec.encoder_picture else self.encode_prompt(PRIMING_PROMPT)

    def as_negative(self, prompt: str, encoded: Conditioning) -> Conditioning:
        return encoded

    def _moments(self, image: Tensor) -> NDArray[np.float32]:
        moments: NDArray[np.float32] = self._all_moments(image)[0]
        return moments

    def _all_moments(self, images: Tensor) -> NDArray[np.float32]:
        return to_numpy(moments_of(self.vae, self._on_device(images), self.spec.latents))

    def _on_device(self, image: Tensor) -> Tensor:
        return image.to(self._device, self._dtype)

    def _down(self, maps: list[Tensor], norm: Norm) -> list[Tensor]:
        """Encode images, [1, 3, H, W] per piece, down to the latents' resolution."""
        encoder, level = self.vae.encoder, len(self.spec.latents.widths) - 1
        maps = [encoder.conv_in(x) for x in maps]
        for block in encoder.down_blocks:
            for block_resnet in block.resnets:
                maps = resnet(block_resnet, maps, norm, level)
            for downsampler in block.downsamplers or ():
                maps = [downsampler(x) for x in maps]
                level -= 1
        return maps

    def _finish(self, maps: list[Tensor], norm: Norm) -> list[Tensor]:
        """Run the rest of the encoder, to moments [1, 2C, h, w]."""
        encoder = self.vae.encoder
        if self._local:
            for block_resnet in encoder.mid_block.resnets:
                maps = resnet(block_resnet, maps, norm, 0)
        else:
            [middle] = maps
            maps = [encoder.mid_block(middle)]
        maps = [encoder.conv_out(F.silu(x)) for x in norm(encoder.conv_norm_out, maps, 0)]
        return maps if self.vae.quant_conv is None else [self.vae.quant_conv(x) for x in maps]


class OneTextEncoder(Encoder):
    def __init__(self, spec: ModelSpec, vae: Any, text: TextEncoder) -> None:
        super().__init__(spec, vae)
        self.text = text

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Self:
        """Load the parts of a model folder. Raises ConfigError if a part cannot be loaded."""
        limit_threads(config)
        return cls(spec, load_vae(config, spec), cls.load_text(spec, config))

    @staticmethod
    @abstractmethod
    def load_text(spec: ModelSpec, config: Config) -> TextEncoder:
        """Load the folder's text encoder, for prompts of up to `max_sequence_length` tokens."""

    @property
    def text_encoders(self) -> dict[str, TextEncoder]:
        return {"text_encoder": self.text}


def _laid(whole: Tensor, maps: list[Tensor], pieces: Pieces) -> Tensor:
    """Copy the pieces into `whole`, in place, without their rims and without probes."""
    for box, part in zip(pieces.edited_boxes, maps, strict=False):
        goes = box.grown(max(0, pieces.halos[0] - RIM), pieces.size)
        inside = goes.within(pieces.outer(box, 0))
        whole[(..., *goes.slices)] = part[(..., *inside.slices)]
    return whole


def _image(pixels: NDArray[np.uint8]) -> Tensor:
    """Return [1, 3, H, W] in [-1, 1]; float32 until the VAE, as in VaeImageProcessor."""
    scaled = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
    return (scaled / 255.0) * 2.0 - 1.0


def to_numpy(x: Tensor) -> NDArray[np.float32]:
    """Copy to the host as float32."""
    return x.float().cpu().numpy()
