"""What a model folder's JSON says of the model, read without torch.

Preprocess, the router and the planner need sizes and capabilities, not weights. The family is
read from the folder (`model_index.json`), never from a name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskserve_core.config import ConfigError

# Pipeline class → (family, semantics). Text-to-image pipelines are served with the inpainting
# semantics of their family, as diffusers' own FluxInpaintPipeline.from_pretrained does.
_PIPELINES = {
    "FluxFillPipeline": ("flux", "fill"),
    "FluxInpaintPipeline": ("flux", "inpaint"),
    "FluxPipeline": ("flux", "inpaint"),
    "FluxImg2ImgPipeline": ("flux", "inpaint"),
}


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
    guidance_embeds: bool
    """Whether `guidance_scale` is a model input."""
    true_cfg: bool
    """Whether negative prompts and `true_cfg_scale` are served."""
    transformer: dict[str, Any]
    """The transformer's config.json, for FLOP counting."""

    @property
    def token_pixels(self) -> int:
        """Pixels per token along one side; model sizes are multiples of it."""
        return self.vae_scale_factor * self.patch


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
    vae = _json(folder / "vae" / "config.json")
    transformer = _json(folder / "transformer" / "config.json")
    scale = 2 ** (len(vae["block_out_channels"]) - 1)
    # diffusers' Flux pipelines assume 128 latents a side unless the model says otherwise.
    native = native_resolution or int(vae.get("sample_size") or 128 * scale)
    return ModelFacts(
        family=family,
        semantics=semantics,
        vae_scale_factor=scale,
        latent_channels=int(vae["latent_channels"]),
        patch=2,
        native_resolution=native,
        guidance_embeds=bool(transformer.get("guidance_embeds", False)),
        true_cfg=semantics == "inpaint",
        transformer=transformer,
    )
