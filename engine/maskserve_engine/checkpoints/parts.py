"""The parts of a model in a checkpoint file, by diffusers' key maps.

A file holds a denoiser, and may hold a VAE and text encoders beside it, under prefixes:

    model.diffusion_model.               the denoiser; or no prefix, where the file has nothing else
    vae.  first_stage_model.             the VAE
    text_encoders.NAME.transformer.      text encoders as transformers names their weights
    cond_stage_model.transformer.  conditioner.embedders.0.transformer.          CLIP, the same
    cond_stage_model.model.        conditioner.embedders.1.model.                OpenCLIP's names
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from maskserve_common.config import ConfigError
from maskserve_common.files.safetensors_header import short

Tensors = dict[str, torch.Tensor]
"""Recorded tensors, or plain ones that a map adds."""

_DENOISER = "model.diffusion_model."
_VAE = ("vae.", "first_stage_model.")
_TEXT = re.compile(
    r"text_encoders\.[^.]+\.(transformer\.|model\.)?|cond_stage_model\.transformer\."
    r"|conditioner\.embedders\.0\.transformer\."
)
_OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
_OTHERS = (*_VAE, "text_encoders.", "cond_stage_model.", "conditioner.", "model_ema.")
_CLASSES = {
    "FluxTransformer2DModel": ("flux-dev", "flux-fill", "flux-depth", "flux-schnell"),
    "Flux2Transformer2DModel": ("flux-2-dev",),
    "Flux3Transformer2DModel": ("flux-3-image", "flux-3-image-distilled"),
    "ChromaTransformer2DModel": ("chroma",),
    "SD3Transformer2DModel": ("sd3", "sd35_large", "sd35_medium"),
    "ZImageTransformer2DModel": ("z-image-turbo",),
    "QwenImage21Transformer2DModel": ("qwen-image-2.1",),
    "UNet2DConditionModel": (
        "v1", "v2", "inpainting", "inpainting_v2", "xl_base", "xl_inpaint", "playground-v2-5",
    ),
}  # fmt: skip
"""Classes of denoisers that are served, with diffusers' names of their checkpoints."""
_SD3, _QWEN_IMAGE, _UNET, _FLUX, _LONGCAT, _JOYIMAGE = (
    "SD3Transformer2DModel", "QwenImageTransformer2DModel", "UNet2DConditionModel",
    "FluxTransformer2DModel", "LongCatImageTransformer2DModel", "JoyImageEditTransformer3DModel",
)  # fmt: skip
_KEYS = {
    _SD3: "joint_blocks.0.x_block.attn.qkv.weight",
    _QWEN_IMAGE: "transformer_blocks.0.img_mod.1.weight",
    _JOYIMAGE: "double_blocks.0.img_mod.modulate_table",
}
"""A tensor that identifies each class that diffusers infers from sizes, or not at all."""
_UNET_KEYS = ("input_blocks.0.0.weight", "time_embed.0.weight")
_POOLED = tuple(
    f"vector_in.{layer}.{part}"
    for layer in ("in_layer", "out_layer")
    for part in ("weight", "bias")
)
"""Tensors for a pooled prompt, which FLUX.1 has and LongCat-Image has not."""
_DEV_KEY = "guidance_in.in_layer.weight"
_XL_KEY, _REFINER_WIDTH = "label_emb.0.0.weight", 2560
_XL = {"v1": "xl_base", "inpainting": "xl_inpaint"}
"""Kinds for which diffusers takes an SDXL without its text encoders."""
_TIED = ("embed_tokens.weight", "shared.weight", "lm_head.weight", "position_ids")
"""Weights of text encoders that files may lack: tied ones, and constants."""
_COUNT = "num_batches_tracked"
"""A constant that files may lack."""
_PROJECTION = "text_projection.weight"
_NUMBER = re.compile(r"\d+")


def denoiser_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the denoiser's tensors, without a prefix."""
    prefixed = {
        name.removeprefix(_DENOISER): tensor
        for name, tensor in tensors.items()
        if name.startswith(_DENOISER)
    }
    return prefixed or {
        name.removeprefix("diffusion_model.").removeprefix("transformer."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(_OTHERS)
    }


def denoiser_class(denoiser: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Return the class of a denoiser and the hub id of diffusers' folder for it, by names and
    shapes.

    Args:
        denoiser: its tensors, without a prefix; others of its file may stand beside them.

    Returns:
        An empty id where the names fit several models; an empty class where they are those of
        diffusers, or of no denoiser.

    Raises:
        ConfigError: its class is not served; the text ends a sentence about the file.
    """
    from diffusers.loaders import single_file_utils

    prefixed = {f"{_DENOISER}{name}": tensor for name, tensor in denoiser.items()}
    try:
        kind = single_file_utils.infer_diffusers_model_type({**prefixed, **denoiser})
    except KeyError as error:
        raise ConfigError(f"is not a whole checkpoint: it has no {error.args[0]}") from error
    except (IndexError, UnboundLocalError, ValueError) as error:
        raise ConfigError(
            "is no checkpoint of a model that diffusers knows, by its tensors' shapes"
        ) from error
    if kind == "v1" and not all(name in denoiser for name in _UNET_KEYS):
        return next((cls for cls, key in _KEYS.items() if key in denoiser), ""), ""
    if kind == "flux-schnell" and _POOLED[0] not in denoiser:
        return _LONGCAT, ""
    if kind == "flux-2-dev" and _DEV_KEY not in denoiser:  # klein has no guidance
        return "Flux2Transformer2DModel", ""
    if kind in _XL and _XL_KEY in denoiser:
        refiner = denoiser[_XL_KEY].shape[-1:] == (_REFINER_WIDTH,)
        kind = "xl_refiner" if refiner else _XL[kind]
    for cls, kinds in _CLASSES.items():
        if kind in kinds:
            source = single_file_utils.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]
            return cls, str(source["pretrained_model_name_or_path"])
    raise ConfigError(
        f"is a checkpoint of {kind}, which is not served; served: {_served_classes()}"
    )


def _served_classes() -> str:
    return ", ".join([*_CLASSES, _QWEN_IMAGE, _LONGCAT, _JOYIMAGE])


def converted_denoiser(
    denoiser: Tensors, cls: str, config: Mapping[str, Any], expected: Mapping[str, torch.Tensor]
) -> Tensors:
    """Return a denoiser under diffusers' names.

    Args:
        denoiser: its tensors, without a prefix.
        cls: name of its class in diffusers.
        config: its config.json.
        expected: tensors of the model that the config describes.

    Raises:
        ConfigError: it is not such a model; the text ends a sentence about the file.
    """
    if denoiser.keys() == expected.keys():
        return _select_expected(denoiser, expected)
    known, _ = denoiser_class(denoiser)
    if known and known != cls:
        raise ConfigError(f"is a {known} by its tensors' names; expected: {cls}")
    if not known:
        missing = sorted(expected.keys() - denoiser.keys())
        raise ConfigError(f"is not a checkpoint of {cls}: it has no {missing[0]}")
    if cls == _UNET:  # its map looks for the prefix
        denoiser = {f"{_DENOISER}{name}": tensor for name, tensor in denoiser.items()}
    return _select_expected(_convert_by_diffusers(cls, denoiser, config), expected)


def vae_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the VAE's tensors of a checkpoint, without a prefix; none: it has no VAE."""
    return {
        name.removeprefix(prefix): tensor
        for prefix in _VAE
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def converted_vae(
    vae: Tensors, cls: str, config: Mapping[str, Any], expected: Mapping[str, torch.Tensor]
) -> Tensors:
    """Return a VAE under diffusers' names; arguments and errors as in `converted_denoiser`."""
    if vae.keys() >= expected.keys():
        return _select_expected(vae, expected)
    return _select_expected(_convert_by_diffusers(cls, vae, config), expected)


def text_encoders_of(tensors: Mapping[str, torch.Tensor]) -> list[Tensors]:
    """Return the text encoders of a checkpoint, under transformers' names."""
    by_prefix: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if match := _TEXT.match(name):
            by_prefix.setdefault(match[0], {})[name[match.end() :]] = tensor
    return [*by_prefix.values(), *_open_clip(tensors)]


def _open_clip(tensors: Mapping[str, torch.Tensor]) -> Iterable[Tensors]:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    for prefix in _OPEN_CLIP:
        embedding = tensors.get(f"{prefix}token_embedding.weight")
        if embedding is not None:  # the map asks its model only for a width
            model = SimpleNamespace(config=SimpleNamespace(hidden_size=embedding.shape[-1]))
            yield convert_open_clip_checkpoint(model, dict(tensors), prefix=prefix)


def text_encoder_fit(
    encoder: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> str | None:
    """Compare a text encoder with a part of the model.

    Returns:
        Empty: it is this part. None: it is another model. Otherwise how it differs, as the end of a
        sentence about the file.
    """
    tensors = {_unwrapped_name(name): tensor for name, tensor in encoder.items()}
    model_tensors = {_unwrapped_name(name): tensor for name, tensor in expected.items()}
    shared = tensors.keys() & model_tensors.keys()
    if 2 * len(shared) < len(model_tensors):
        return None
    for name in sorted(shared):
        if tensors[name].shape != model_tensors[name].shape:
            shapes = (list(tensors[name].shape), list(model_tensors[name].shape))
            return f"has {short(name)} of shape {shapes[0]}; the model's has {shapes[1]}"
    for name in sorted(model_tensors.keys() - shared - _identities(expected)):
        if not name.endswith(_TIED):
            return f"has no {short(name)}, which the model's has"
    return ""


def whole_text_encoder(encoder: Tensors, expected: Mapping[str, torch.Tensor]) -> Tensors:
    """Return a text encoder that fits a part of the model, with the projection that files of CLIP
    leave out where it is the identity (Stable Diffusion 3.5).
    """
    left_out = _identities(expected) - encoder.keys()
    return {**encoder, **{name: torch.eye(len(expected[name])) for name in left_out}}


def _identities(expected: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of weights that are the identity where a file lacks them."""
    shape = expected[_PROJECTION].shape if _PROJECTION in expected else (0, 1)
    return {_PROJECTION} if shape[0] == shape[1] else set()


def _unwrapped_name(name: str) -> str:
    """Return a weight's name without the wrappers that versions of transformers differ in."""
    wrappers = ("model", "text_model", "language_model", "transformer")
    return ".".join(word for word in name.split(".") if word not in wrappers)


def _convert_by_diffusers(cls: str, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    is_longcat = cls == _LONGCAT
    source, added = (_FLUX, _POOLED) if is_longcat else (cls, ())
    if source not in SINGLE_FILE_LOADABLE_CLASSES:
        raise ConfigError(f"has no {cls} under diffusers' names, and diffusers maps no others")
    convert: Callable[..., Tensors] = SINGLE_FILE_LOADABLE_CLASSES[source]["checkpoint_mapping_fn"]
    checkpoint = {**tensors, **dict.fromkeys(added, torch.zeros(0))}
    try:
        mapped = convert(checkpoint=checkpoint, config=dict(config))
    except KeyError as error:
        raise ConfigError(
            f"is not a whole checkpoint of {cls}: it has no {error.args[0]}"
        ) from error
    except (IndexError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"is not a checkpoint of {cls}: {why}") from error
    if is_longcat:
        mapped = {name.replace("time_text_embed", "time_embed"): x for name, x in mapped.items()}
    return mapped


def _select_expected(tensors: Tensors, expected: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the expected ones of these tensors.

    Raises:
        ConfigError: one is missing or has another shape, or there are more blocks.
    """
    in_blocks = {_NUMBER.sub("#", name) for name in expected}
    for name in tensors.keys() - expected.keys():
        if _NUMBER.sub("#", name) in in_blocks:
            raise ConfigError(
                f"has {short(name)}, in a block more than the model of the base folder has"
            )
    for name, tensor in expected.items():
        if name not in tensors and name.endswith(_COUNT):
            tensors = {**tensors, name: torch.zeros(tensor.shape, dtype=torch.int64)}
        if name not in tensors:
            raise ConfigError(f"has no tensor for {short(name)}; expected: {list(tensor.shape)}")
        if tensors[name].shape != tensor.shape:
            raise ConfigError(
                f"has shape {list(tensors[name].shape)} for {short(name)}; expected: "
                f"{list(tensor.shape)}, by the folder with the model's parts"
            )
    return {name: tensors[name] for name in expected}


def part_file(folder: Path, library: str) -> Path:
    """Return the weights' file of a part's folder, as the library names it."""
    name = "model" if library == "transformers" else "diffusion_pytorch_model"
    return folder / f"{name}.safetensors"
