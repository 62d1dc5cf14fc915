"""Checkpoint files of tiny models, in the forms in which such models are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoint_layouts import LAYOUTS, PARTS, Tensors

PREFIX = "model.diffusion_model."
_FP8_MAX = 448.0


def weights_of(folder: Path) -> Tensors:
    """The tensors of a part's folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def fp8_scaled(tensors: Mapping[str, torch.Tensor], scale: str = "scale_weight") -> Tensors:
    """ComfyUI's fp8 with a scale for each matrix, and the scales of its inputs."""
    stored: Tensors = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight"):
            stored[name] = tensor.bfloat16()
            continue
        layer = name.removesuffix(".weight")
        scales = tensor.float().abs().max() / _FP8_MAX
        stored[name] = (tensor.float() / scales).to(torch.float8_e4m3fn)
        stored[f"{layer}.{scale}"] = scales
        stored[f"{layer}.{scale.replace('weight', 'input')}"] = torch.ones(())
    return stored


def int8(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """int8 with a scale for each row."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight"):
            stored[name] = tensor
            continue
        scales = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
        stored[name] = (tensor.float() / scales).round().to(torch.int8)
        stored[f"{name}_scale"] = scales
    return stored


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Scales in cuBLAS' tiles of 128 x 4, filled up with zeros, as ComfyUI stores them."""
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    stored = torch.empty_like(padded).flatten()
    for row in range(len(padded)):
        for column in range(padded.shape[1]):
            tile = (row // 128) * (padded.shape[1] // 4) + column // 4
            within = (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            stored[tile * 512 + within] = padded[row, column]
    return stored.view(padded.shape)


def _mark(form: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": form}).encode()), dtype=torch.uint8)


def _in_groups(tensors: Mapping[str, torch.Tensor], size: int) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose rows have whole groups, and their numbers by group."""
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.shape[1] % size == 0:
            yield name, tensor.float().view(len(tensor), -1, size)


def mxfp8(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """ComfyUI's mxfp8: an exponent for each 32 numbers."""
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for name, groups in _in_groups(tensors, 32):
        largest = groups.abs().amax(-1).clamp_min(1e-30)
        exponents = torch.ceil(torch.log2(largest / _FP8_MAX))
        numbers = groups / torch.exp2(exponents)[..., None]
        stored[name] = numbers.view(len(groups), -1).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = tiled((exponents + 127).to(torch.uint8))
        stored[f"{name.removesuffix('weight')}comfy_quant"] = _mark("mxfp8")
    return stored


def nvfp4(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """ComfyUI's nvfp4: two numbers in a byte, a scale for each 16 numbers and one for all."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for name, groups in _in_groups(tensors, 16):
        second = groups.abs().max() / (_FP8_MAX * 6.0)
        scales = (groups.abs().amax(-1) / 6.0 / second).to(torch.float8_e4m3fn)
        numbers = (groups / (scales.float() * second).clamp_min(1e-30)[..., None]).flatten(1)
        codes = (numbers.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (numbers < 0)
        codes = codes.to(torch.uint8)
        stored[name] = codes[:, ::2] << 4 | codes[:, 1::2]
        stored[f"{name}_scale"] = tiled(scales.view(torch.uint8)).view(torch.float8_e4m3fn)
        stored[f"{name}_scale_2"] = second
        stored[f"{name.removesuffix('weight')}comfy_quant"] = _mark("nvfp4")
    return stored


def denoiser_of(folder: Path) -> Path:
    """The folder of a model's denoiser."""
    return next(folder / name for name in ("transformer", "unet") if (folder / name).is_dir())


def write_gguf_checkpoint(model: str, folder: Path, file: Path, forms: Sequence[str]) -> Path:
    """Write the denoiser of a tiny model folder as GGUF, its matrices in these forms by turns. As
    ComfyUI-GGUF does, tensors of a UNet, and those of five sides, are cut in rows of 256 numbers.
    """
    import gguf

    writer, denoiser = gguf.GGUFWriter(file, "a model"), denoiser_of(folder)
    for number, (name, tensor) in enumerate(LAYOUTS[model](weights_of(denoiser)).items()):
        least = 1 if denoiser.name == "unet" else 4
        if tensor.dim() > least and tensor.numel() % 256 == 0:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", tuple(tensor.shape))
            tensor = tensor.reshape(-1, 256)
        form = forms[number % len(forms)]
        whole = tensor.dim() != 2 or tensor.shape[-1] % 32
        kind = gguf.GGMLQuantizationType["F32" if whole else form]
        numbers = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def as_dtype(dtype: torch.dtype) -> Callable[[Mapping[str, torch.Tensor]], Tensors]:
    return lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()}


FORMS: dict[str, tuple[Callable[[Mapping[str, torch.Tensor]], Tensors], float]] = {
    "fp32": (dict, 0.0),
    "bf16": (as_dtype(torch.bfloat16), 2.0**-8),
    "fp16": (as_dtype(torch.float16), 2.0**-10),
    "fp8": (as_dtype(torch.float8_e4m3fn), 2.0**-3),
    "fp8 scaled": (fp8_scaled, 2.0**-3),
    "int8": (int8, 1 / 127),
    "mxfp8": (mxfp8, 2.0**-3),
    "nvfp4": (nvfp4, 2.0**-2),
}
"""Forms of numbers, and the largest error as a share of a matrix's largest number."""


def write_checkpoint(
    model: str, folder: Path, file: Path, form: str = "fp32", prefix: str = PREFIX
) -> Path:
    """Write the denoiser of a tiny model folder as it is published."""
    return write_tensors(LAYOUTS[model](weights_of(denoiser_of(folder))), file, form, prefix)


def write_tensors(
    tensors: Mapping[str, torch.Tensor], file: Path, form: str, prefix: str = PREFIX
) -> Path:
    """Write a denoiser's tensors in a form."""
    save_file(
        {
            name if name == "scaled_fp8" else f"{prefix}{name}": tensor.contiguous()
            for name, tensor in FORMS[form][0](tensors).items()
        },
        file,
    )
    return file


def write_whole_checkpoint(model: str, folder: Path, file: Path) -> Path:
    """Write a tiny model with its text encoders and VAE in one file, as it is published."""
    layouts = {denoiser_of(folder).name: (PREFIX, LAYOUTS[model]), **PARTS[model]}
    tensors = {
        f"{prefix}{name}": tensor.contiguous()
        for part, (prefix, layout) in layouts.items()
        for name, tensor in layout(weights_of(folder / part)).items()
    }
    save_file(tensors, file)
    return file
