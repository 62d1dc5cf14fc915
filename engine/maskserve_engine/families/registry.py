"""The registry of model families: from a model spec to the loaders of its three stages.

A model folder determines its family. Nothing else in the engine or the Triton models depends on
which family is served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from maskserve_common.config import Config, ConfigError
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.specs import check_family, check_widths, load_spec
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.stages.loader import warm_up_side

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FamilyLoaders:
    """Loaders of a family's stages; each raises ConfigError when a part is missing."""

    load_encoder: Callable[[ModelSpec, Config], Encoder]
    load_adapter: Callable[[ModelSpec, Config], Adapter]
    load_decoder: Callable[[ModelSpec, Config], Decoder]


def _chroma() -> FamilyLoaders:
    from maskserve_engine.families.chroma.adapter import ChromaAdapter
    from maskserve_engine.families.chroma.encode import ChromaEncoder

    return FamilyLoaders(ChromaEncoder.load, ChromaAdapter.load, Decoder.load)


def _flux() -> FamilyLoaders:
    from maskserve_engine.families.flux.adapter import FluxAdapter
    from maskserve_engine.families.flux.encode import FluxEncoder

    return FamilyLoaders(FluxEncoder.load, FluxAdapter.load, Decoder.load)


def _flux2() -> FamilyLoaders:
    from maskserve_engine.families.flux2.adapter import Flux2Adapter
    from maskserve_engine.families.flux2.encode import Flux2DevEncoder, Flux2Encoder

    def load_encoder(spec: ModelSpec, config: Config) -> Encoder:
        dev = spec.guidance == "embedded"
        return (Flux2DevEncoder if dev else Flux2Encoder).load(spec, config)

    return FamilyLoaders(load_encoder, Flux2Adapter.load, Decoder.load)


def _flux3() -> FamilyLoaders:
    from maskserve_engine.families.flux3.adapter import Flux3Adapter
    from maskserve_engine.families.flux3.encode import Flux3Encoder

    return FamilyLoaders(Flux3Encoder.load, Flux3Adapter.load, Decoder.load)


def _joyimage() -> FamilyLoaders:
    from maskserve_engine.families.joyimage.adapter import JoyImageAdapter
    from maskserve_engine.families.joyimage.encode import JoyImageEncoder

    return FamilyLoaders(JoyImageEncoder.load, JoyImageAdapter.load, Decoder.load)


def _longcat() -> FamilyLoaders:
    from maskserve_engine.families.longcat.adapter import LongCatAdapter, LongCatEditAdapter
    from maskserve_engine.families.longcat.encode import LongCatEditEncoder, LongCatEncoder

    def load_encoder(spec: ModelSpec, config: Config) -> Encoder:
        return (LongCatEditEncoder if spec.encoder_picture else LongCatEncoder).load(spec, config)

    def load_adapter(spec: ModelSpec, config: Config) -> Adapter:
        edits = spec.semantics.reference
        return (LongCatEditAdapter if edits else LongCatAdapter).load(spec, config)

    return FamilyLoaders(load_encoder, load_adapter, Decoder.load)


def _qwen_image() -> FamilyLoaders:
    from maskserve_engine.families.qwen_image.adapter import QwenImageAdapter
    from maskserve_engine.families.qwen_image.encode import QwenImageEditEncoder, QwenImageEncoder

    def load_encoder(spec: ModelSpec, config: Config) -> Encoder:
        return (QwenImageEditEncoder if spec.encoder_picture else QwenImageEncoder).load(
            spec, config
        )

    return FamilyLoaders(load_encoder, QwenImageAdapter.load, Decoder.load)


def _qwen_image21() -> FamilyLoaders:
    from maskserve_engine.families.qwen_image21.adapter import QwenImage21Adapter
    from maskserve_engine.families.qwen_image21.encode import QwenImage21Encoder

    return FamilyLoaders(QwenImage21Encoder.load, QwenImage21Adapter.load, Decoder.load)


def _sd3() -> FamilyLoaders:
    from maskserve_engine.families.sd3.adapter import Sd3Adapter
    from maskserve_engine.families.sd3.encode import Sd3Encoder

    return FamilyLoaders(Sd3Encoder.load, Sd3Adapter.load, Decoder.load)


def _unet() -> FamilyLoaders:
    from maskserve_engine.families.unet.adapter import UnetAdapter
    from maskserve_engine.families.unet.encode import UnetEncoder

    return FamilyLoaders(UnetEncoder.load, UnetAdapter.load, Decoder.load)


def _z_image() -> FamilyLoaders:
    from maskserve_engine.families.z_image.adapter import ZImageAdapter
    from maskserve_engine.families.z_image.encode import ZImageEncoder

    return FamilyLoaders(ZImageEncoder.load, ZImageAdapter.load, Decoder.load)


FAMILIES: dict[str, Callable[[], FamilyLoaders]] = {
    "chroma": _chroma,
    "flux": _flux,
    "flux2": _flux2,
    "flux3": _flux3,
    "joyimage": _joyimage,
    "longcat": _longcat,
    "qwen_image": _qwen_image,
    "qwen_image21": _qwen_image21,
    "sd3": _sd3,
    "unet": _unet,
    "z_image": _z_image,
}
"""Loaders by `ModelSpec.family`; a family is imported when first used."""


def _of(config: Config) -> tuple[ModelSpec, FamilyLoaders]:
    spec = load_spec(config.model.path, config.model.native_resolution)
    if spec.family not in FAMILIES:
        raise ConfigError(f"[model] path: family {spec.family} has no adapter")
    return spec, FAMILIES[spec.family]()


def load_adapter(config: Config) -> Adapter:
    """Load the denoiser of the folder in `[model] path`.

    Raises:
        ConfigError: no such folder, family or part.
    """
    spec, family = _of(config)
    check_family(config, spec)
    check_widths(config, spec)
    return family.load_adapter(spec, config)


def load_encoder(config: Config) -> Encoder:
    """Load the encoder, and warm it up so that the first edit is not slower."""
    spec, family = _of(config)
    encoder = family.load_encoder(spec, config)
    if config.engine.warm_up:
        begin, side = time.perf_counter(), warm_up_side(config, spec)
        pixels, mask = np.zeros((side, side, 3), np.uint8), np.full((side, side), 255, np.uint8)
        encoder.encode(pixels, mask, "")
        _log.info("the encoder was warmed up in %.2f s", time.perf_counter() - begin)
    return encoder


def load_decoder(config: Config) -> Decoder:
    """Load the decoder, and warm it up so that the first edit is not slower."""
    spec, family = _of(config)
    decoder = family.load_decoder(spec, config)
    if config.engine.warm_up:
        begin, side = time.perf_counter(), warm_up_side(config, spec) // spec.vae_scale_factor
        decoder.decode(np.zeros((spec.latent_channels, side, side), np.float32))
        _log.info("the decoder was warmed up in %.2f s", time.perf_counter() - begin)
    return decoder
