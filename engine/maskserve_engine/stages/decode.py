"""Decoding of latents to pixels: the whole picture, or pieces round what is pasted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.config import Config
from maskserve_common.errors import EngineFailed
from maskserve_engine.spec.latents import LatentSpace
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.latents import to_vae
from maskserve_engine.stages.vae import images_of, is_tiled, load_vae
from maskserve_engine.stages.vae_pieces import (
    CellSums,
    MixedNorm,
    Norm,
    NormRecorder,
    Pieces,
    PixelBox,
    plain_resnets,
    plan_pieces,
    resnet,
)


class Decoder:
    def __init__(self, vae: Any, latents: LatentSpace) -> None:
        from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D

        self.vae, self.latents = vae, latents
        self._device, self._dtype = vae.device, vae.dtype  # for each it walks all its modules
        self.has_pieces = plain_resnets(vae.decoder.up_blocks, UpDecoderBlock2D)

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Decoder:
        """Load the VAE of a model folder. Raises ConfigError if it cannot be loaded."""
        limit_threads(config)
        return cls(load_vae(config, spec, "decoder"), spec.latents)

    def takes_pieces(self, size: tuple[int, int]) -> bool:
        """Return whether latents of this size [h, w] can be decoded in pieces. Tiles cannot,
        because each has its own norms.
        """
        return self.has_pieces and not is_tiled(self.vae, size, self.latents)

    def decode(self, latents: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Decode [C, h, w] latents of the sampler to [H, W, 3] pixels, or [H, W, 4] for models with
        alpha.

        Raises:
            EngineFailed: the VAE's numbers overflow.
        """
        [pixels] = self.decode_all([latents])
        if isinstance(pixels, EngineFailed):
            raise pixels
        return pixels

    def decode_all(
        self, latents: Sequence[NDArray[np.float32]]
    ) -> list[NDArray[np.uint8] | EngineFailed]:
        """Decode several latents of one size in one call; return an error for each that
        overflows.
        """
        with torch.inference_mode():
            scaled = torch.cat([self._scaled(latent) for latent in latents])
            images = images_of(self.vae, scaled, self.latents)
            return [_pixels_or_error(image[None]) for image in images]

    def sums(self, latents: NDArray[np.float32]) -> CellSums:
        """Return the sums of a template's latents [C, h, w] that its edits need for decoding in
        pieces.
        """
        recorder = NormRecorder((latents.shape[1], latents.shape[2]))
        with torch.inference_mode():
            self._up([self._middle(latents)], recorder, None)
        [sums] = recorder.sums
        return sums

    def pieces(
        self, boxes: Sequence[PixelBox], size: tuple[int, int], *, halo: int, spread: int
    ) -> Pieces:
        """Plan how to decode boxes of latents, with a halo in positions at each level."""
        halos = (halo,) * len(self.latents.widths)
        return plan_pieces(boxes, size, halos=halos, spread=spread)

    def decode_pieces(
        self, latents: NDArray[np.float32], pieces: Pieces, template: CellSums
    ) -> NDArray[np.uint8]:
        """Decode pieces and their halo, to nearly the pixels of `decode`; 0 elsewhere.

        Args:
            latents: [C, h, w].
            pieces: boxes to decode.
            template: sums of the edit's template.

        Raises:
            EngineFailed: the VAE's numbers overflow.
        """
        factor = self.latents.pixels
        top = len(self.latents.widths) - 1
        pixels = np.zeros((pieces.size[0] * factor, pieces.size[1] * factor, 3), np.uint8)
        with torch.inference_mode():
            whole = self._middle(latents)
            maps = [_cut(whole, pieces.outer(box, 0)) for box in pieces.boxes]
            maps = self._up(maps, MixedNorm(template, pieces, whole.device), pieces)
            for box, part in zip(
                pieces.edited_boxes, maps, strict=False
            ):  # probes are no part of it
                pixels[pieces.outer(box, top).slices] = _pixels(part)
        return pixels

    def _scaled(self, latents: NDArray[np.float32]) -> Tensor:
        x = torch.from_numpy(latents)[None].to(self._device, self._dtype)
        return to_vae(x, self.latents)

    def _middle(self, latents: NDArray[np.float32]) -> Tensor:
        """Return [1, C, h, w] before the blocks that scale up."""
        x = self._scaled(latents)
        if self.vae.post_quant_conv is not None:
            x = self.vae.post_quant_conv(x)
        return self.vae.decoder.mid_block(self.vae.decoder.conv_in(x), None)

    def _up(self, maps: list[Tensor], norm: Norm, pieces: Pieces | None) -> list[Tensor]:
        """Decode from there to the image, [1, 3, H, W] of each piece."""
        decoder, level = self.vae.decoder, 0
        for block in decoder.up_blocks:
            for block_resnet in block.resnets:
                maps = resnet(block_resnet, maps, norm, level)
            for upsampler in block.upsamplers or ():
                maps = [F.interpolate(x, scale_factor=2.0, mode="nearest") for x in maps]
                level += 1
                maps = _upsampled(upsampler.conv, maps, pieces, level)
        return [decoder.conv_out(F.silu(x)) for x in norm(decoder.conv_norm_out, maps, level)]


def _upsampled(conv: Any, maps: list[Tensor], pieces: Pieces | None, level: int) -> list[Tensor]:
    """Run the convolution behind an upsampling. It reads the next level's halo and one position
    more; the rest of the doubled halo is cut off.
    """
    if pieces is None:
        return [conv(x) for x in maps]
    out = []
    for x, box in zip(maps, pieces.boxes, strict=True):
        doubled = pieces.outer(box, level - 1).scaled(2)
        goes = pieces.outer(box, level)
        read = goes.grown(1, pieces.at(level)).common(doubled)
        y = conv(_cut(x, read.within(doubled)))
        out.append(_cut(y, goes.within(read)))
    return out


def _cut(x: Tensor, box: PixelBox) -> Tensor:
    rows, columns = box.slices
    return x[..., rows, columns]


def _pixels(image: Tensor) -> NDArray[np.uint8]:
    """Convert [1, C, H, W] in [-1, 1] to [H, W, C].

    Raises:
        EngineFailed: some numbers are not finite.
    """
    # Bounded behind the copy, as infinity would be 1 before it. The copy waits for the device; to
    # look at the numbers there would wait once more.
    scaled = (image[0] * 0.5 + 0.5).permute(1, 2, 0).float().cpu().numpy()
    if not np.isfinite(scaled).all():
        raise EngineFailed(
            "the picture's numbers overflowed in the VAE's decoder (weights that float16 does not "
            "hold: [model] dtype)"
        )
    return (scaled.clip(0, 1) * 255).round().astype(np.uint8)


def _pixels_or_error(image: Tensor) -> NDArray[np.uint8] | EngineFailed:
    try:
        return _pixels(image)
    except EngineFailed as error:
        return error
