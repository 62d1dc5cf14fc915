"""What a model folder's JSON says of the model, read without torch.

Preprocess, the router and the planner need sizes and capabilities, not weights. The family is
read from the folder (`model_index.json`), never from a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maskserve_core.config import ConfigError
from maskserve_core.planning.flops_unet import check_unet

# Pipeline class → (family, semantics). Text-to-image pipelines are served with the inpainting
# semantics of their family, as diffusers' own FluxInpaintPipeline.from_pretrained does.
_PIPELINES = {
    "FluxFillPipeline": ("flux", "fill"),
    "FluxInpaintPipeline": ("flux", "inpaint"),
    "FluxPipeline": ("flux", "inpaint"),
    "FluxImg2ImgPipeline": ("flux", "inpaint"),
    # A UNet's channels say which semantics it has, whatever pipeline it was saved from.
    "StableDiffusionPipeline": ("unet", ""),
    "StableDiffusionImg2ImgPipeline": ("unet", ""),
    "StableDiffusionInpaintPipeline": ("unet", ""),
    "StableDiffusionXLPipeline": ("unet", ""),
    "StableDiffusionXLImg2ImgPipeline": ("unet", ""),
    "StableDiffusionXLInpaintPipeline": ("unet", ""),
}


Guidance = Literal["embedded", "cfg", "none"]
"""`embedded`: an input of the model; `cfg`: classifier-free, each step above 1 runs the model a
second time with the negative prompt; `none`: the model has no such thing.
"""

ALL_STEPS = 1000
"""A stride as long as any schedule."""
_GUIDANCE: dict[Guidance, float] = {"embedded": 30.0, "cfg": 7.5, "none": 0.0}
"""Diffusers' own defaults, of FLUX Fill and of Stable Diffusion."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and capabilities of one served model."""

    family: str
    """Key of the engine's adapter registry."""
    semantics: str
    """`fill`: mask and masked image are model inputs; `inpaint`: latents are blended."""
    vae_scale_factor: int
    """Pixels per latent, along one side."""
    latent_channels: int
    patch: int
    """Latents per token, along one side."""
    native_resolution: int
    """Side of the square whose area bounds the model's input, in pixels."""
    size_multiple: int
    """Sides of the model's input are multiples of it, in pixels."""
    guidance: Guidance
    """What `guidance_scale` is."""
    true_cfg: bool
    """Whether `true_cfg_scale` is served: a second pass, beside embedded guidance."""
    denoiser: dict[str, Any]
    """The transformer's or UNet's config.json, for FLOP counting."""
    strength_rounds_up: bool = True
    """Whether a part of a step that `strength` leaves is run, by the pipeline's own rule."""
    zeros_for_empty_prompt: bool = False
    """Whether an empty negative prompt is zeros instead of its encoding (SDXL)."""
    tokenizer_length: int | None = None
    """Tokens that a prompt always has, where the tokenizer says so (UNets: 77)."""
    least_steps: int = 1
    """Fewer are refused: the sampler's stretch to `shift_terminal` divides 0 by 0 at one step."""

    def text_tokens(self, configured: int) -> int:
        """Text tokens of a prompt, given `[model] max_sequence_length`."""
        return self.tokenizer_length or configured

    def guidance_default(self, configured: float) -> float:
        """The scale of an edit that names none, given `[model] guidance_scale`."""
        return configured or _GUIDANCE[self.guidance]

    @property
    def token_pixels(self) -> int:
        """Pixels per token along one side, at the finest level."""
        return self.vae_scale_factor * self.patch

    @property
    def micro_conditioning(self) -> bool:
        """Whether the model takes sizes and a pooled prompt beside the prompt (SDXL)."""
        return self.denoiser.get("addition_embed_type") == "text_time"


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"[model] path: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"[model] path: {path} is not valid JSON") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"[model] path: {path} is not a JSON object")
    return loaded


def anchor_stride(configured: int, facts: ModelFacts) -> int:
    """Steps that share an anchor (docs/adr/0007).

    FLUX Fill sees the picture round the mask in extra channels, at every step. To others it is
    noised like the rest and its activations change with the noise, or nothing was measured.

    Args:
        configured: `[cache] stride`; 0: what the model's semantics need.
        facts: of the model.
    """
    needed = ALL_STEPS if (facts.family, facts.semantics) == ("flux", "fill") else 7
    return configured or needed


def load_facts(folder: str | Path, native_resolution: int = 0) -> ModelFacts:
    """Read a diffusers-format folder.

    Args:
        folder: local folder with `model_index.json`.
        native_resolution: overrides what the model says, in pixels; 0 does not.

    Raises:
        ConfigError: not a model folder, or a family that is not served.
    """
    folder = Path(folder)
    if not (folder / "model_index.json").is_file():
        raise ConfigError(f"[model] path: {folder} is not a model folder (no model_index.json)")
    pipeline = _json(folder / "model_index.json").get("_class_name")
    if pipeline not in _PIPELINES:
        raise ConfigError(
            f"[model] path: {pipeline} is not served; served: {', '.join(_PIPELINES)}"
        )
    family, semantics = _PIPELINES[pipeline]
    return _READERS[family](folder, semantics, native_resolution)


def _flux(folder: Path, semantics: str, native_resolution: int) -> ModelFacts:
    vae = _json(folder / "vae" / "config.json")
    transformer = _json(folder / "transformer" / "config.json")
    scale, patch = 2 ** (len(vae["block_out_channels"]) - 1), 2
    return ModelFacts(
        family="flux",
        semantics=semantics,
        vae_scale_factor=scale,
        latent_channels=int(vae["latent_channels"]),
        patch=patch,
        # diffusers' Flux pipelines assume 128 latents a side unless the model says otherwise.
        native_resolution=native_resolution or int(vae.get("sample_size") or 128 * scale),
        size_multiple=scale * patch,
        guidance="embedded" if transformer.get("guidance_embeds", False) else "none",
        true_cfg=semantics == "inpaint",
        denoiser=transformer,
        least_steps=2
        if _json(folder / "scheduler" / "scheduler_config.json").get("shift_terminal")
        else 1,
    )


def _unet(folder: Path, _: str, native_resolution: int) -> ModelFacts:
    index, unet = _json(folder / "model_index.json"), _json(folder / "unet" / "config.json")
    vae = _json(folder / "vae" / "config.json")
    try:
        check_unet(unet)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"[model] path: unet/config.json: {error}") from error
    xl = unet.get("addition_embed_type") == "text_time"
    scale, channels = 2 ** (len(vae["block_out_channels"]) - 1), int(vae["latent_channels"])
    semantics = {channels: "inpaint", 2 * channels + 1: "fill"}.get(int(unet["in_channels"]))
    if semantics is None or int(unet["out_channels"]) != channels:
        raise ConfigError(
            f"[model] path: the UNet takes {unet['in_channels']} channels and gives "
            f"{unet['out_channels']}; with a VAE of {channels} served: {channels} (base) or "
            f"{2 * channels + 1} (inpainting) to {channels}"
        )
    parts = ["scheduler", "text_encoder", "tokenizer"]
    if xl:
        parts += ["text_encoder_2", "tokenizer_2"]
    for part in parts:
        if not (folder / part).is_dir():
            raise ConfigError(f"[model] path: {folder} has no folder {part!r}")
    encoders = [part for part in parts if part.startswith("text_encoder")]
    given = sum(int(_json(folder / part / "config.json")["hidden_size"]) for part in encoders)
    if given != unet["cross_attention_dim"]:
        raise ConfigError(
            f"[model] path: the UNet takes text {unet['cross_attention_dim']} wide and "
            f"{' and '.join(encoders)} give {given}"
        )
    length = _json(folder / "tokenizer" / "tokenizer_config.json").get("model_max_length")
    if not isinstance(length, int) or not 1 <= length <= 4096:
        raise ConfigError(
            f"[model] path: tokenizer/tokenizer_config.json: model_max_length: {length!r} is not "
            "a number of tokens; served: 1 to 4096"
        )
    return ModelFacts(
        family="unet",
        semantics=semantics,
        vae_scale_factor=scale,
        latent_channels=channels,
        patch=1,
        native_resolution=native_resolution or int(unet["sample_size"]) * scale,
        size_multiple=scale,
        guidance="cfg",
        true_cfg=False,
        denoiser=unet,
        strength_rounds_up=False,
        zeros_for_empty_prompt=bool(index.get("force_zeros_for_empty_prompt", xl)),
        tokenizer_length=length,
    )


_READERS: dict[str, Callable[[Path, str, int], ModelFacts]] = {"flux": _flux, "unet": _unet}
"""By family: reads (folder, semantics, native resolution or 0)."""
