"""Weights in fewer bits, by torchao and bitsandbytes, and GGUF files, by diffusers.

Of a denoiser only the products of transformer blocks change: they hold nearly all of its weights.
What leads in and out, embeddings and convolutions stay as they are.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskserve_common.config import Config, ConfigError
from maskserve_common.files.digests import file_digest
from maskserve_common.files.gguf_header import read_gguf
from maskserve_engine.stages.loader import device_of, dtype_of, held_bytes, load_part

_BLOCKS = r"transformer_blocks\.|^(layers|noise_refiner|context_refiner)\."
"""In the names of layers that are in a denoiser's blocks."""
_NF4_GROUP = 64
"""Weights that share a scale; a layer whose inputs these do not divide stays as it is."""
_FP8_CAPABILITY = (8, 9)
"""From here on a GPU multiplies numbers of 8 bits in floating point."""


BAD_FILE = (OSError, ValueError, RuntimeError, KeyError, IndexError, TypeError)
"""What readers of GGUF raise for files that are none, or are another model's."""
Prepare = Callable[[nn.Module], nn.Module]
"""What is done with a part as the folder has it, before it is quantised."""


def load_denoiser(config: Config, name: str, cls: Any, prepare: Prepare) -> Any:
    """As `load_part`, in the form that `[model] weights` names. Layer by layer: the device never
    holds the weights in their first form.

    Raises:
        ConfigError: the part cannot be read, is quantised already, or the form's library is
            missing.
    """
    form = config.model.weights
    if config.model.gguf and device_of(config).type != "meta":
        return _load_gguf(config, name, cls)
    return _load(config, name, cls, "weights", form, _BLOCKS, prepare)


def gguf_bytes(config: Config) -> int:
    """What the tensors of `[model] gguf` will take, by the file's header: those in a form of GGUF's
    what they take there, others as many numbers in the model's dtype.

    Raises:
        ConfigError: the file or the library is not there, or it is no GGUF file.
    """
    import_library("gguf", "gguf", config.model.gguf)
    from gguf import GGMLQuantizationType

    plain = GGMLQuantizationType.F32, GGMLQuantizationType.F16
    try:
        tensors = gguf_tensors(_gguf_file(config))
    except BAD_FILE as error:
        raise _unreadable(config, error) from error
    itemsize = dtype_of(config).itemsize
    return sum(
        int(tensor.n_elements) * itemsize if tensor.tensor_type in plain else int(tensor.n_bytes)
        for tensor in tensors
    )


def load_t5(config: Config, name: str, cls: Any) -> Any:
    """As `load_part`, with all products in the form that `[model] t5_weights` names; or in host
    memory, from where each layer goes to the device when it is its turn (`t5_offload`).

    Raises:
        ConfigError: as `load_denoiser`.
    """
    if config.model.t5_offload:
        if config.model.t5_weights != "bf16":
            raise ConfigError('[model] t5_offload: not with t5_weights = "int8"; use one of them')
        from accelerate import cpu_offload

        model = load_part(config, name, cls, device=torch.device("cpu"))
        return cpu_offload(model, execution_device=device_of(config), offload_buffers=True)
    return _load(config, name, cls, "t5_weights", config.model.t5_weights, "")


def quantise(model: nn.Module, form: str, device: torch.device, within: str = _BLOCKS) -> None:
    """Replace a model's products in place.

    Args:
        model: its layers are torch's own.
        form: `int8`: one scale per output, products in the model's dtype; `int8-dynamic`: likewise,
            and each token has a scale, products in int8; `fp8`: one scale per output, and where the
            device multiplies FP8 each token has one, too; `nf4`: one scale per 64 weights, products
            in the model's dtype.
        device: where the replaced products go to.
        within: what is found in the names of layers that are replaced.
    """
    for path, layer in list(_products(model, form, within)):
        if form == "nf4":
            model.set_submodule(path, _nf4(layer, device))
        else:
            _by_torchao(layer.to(device), form)


def bytes_as(model: nn.Module, form: str, within: str = _BLOCKS) -> int:
    """What a model will take in a form, by its shapes: it may lie on torch's device `meta`."""
    total = held_bytes(model)
    if form != "bf16":
        for _, layer in _products(model, form, within):
            total += _packed_bytes(layer, form) - layer.weight.nbytes
    return total


def largest_layer_bytes(model: nn.Module) -> int:
    """What a model takes on a device to which its layers go one after the other."""
    layers = (module.parameters(recurse=False) for module in model.modules())
    return max(sum(parameter.nbytes for parameter in layer) for layer in layers)


def form_in_words(config: Config) -> str:
    """For the names of entries: all that decides what the served products compute; empty for
    weights as the folder has them.
    """
    form = config.model.weights
    words: list[str] = [f"variant {config.model.variant}"] if config.model.variant else []
    if form == "nf4":
        words.append(form)
    elif form != "bf16":
        words.append(f"{form} {_torchao_config(form, device_of(config))}")
    if config.model.gguf:
        gguf = _gguf_file(config)
        words.append(f"gguf {file_digest(gguf.parent, gguf.name)}")
    if config.model.t5_weights != "bf16":
        words.append(f"t5 {config.model.t5_weights}")
    return "; ".join(words)


def _load(
    config: Config,
    name: str,
    cls: Any,
    key: str,
    form: str,
    within: str,
    prepare: Prepare = lambda model: model,
) -> Any:
    if form == "bf16":
        return prepare(load_part(config, name, cls))
    import_library("bitsandbytes" if form == "nf4" else "torchao", key, form)
    model = load_part(config, name, cls, device=torch.device("cpu"))
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f'[model] {key}: {name} is quantised already; use "bf16"')
    quantise(prepare(model), form, device_of(config), within)
    return model.to(device_of(config))


def import_library(library: str, key: str, value: str) -> None:
    """Raise ConfigError where a setting of `[model]` needs a library that is not there."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f'[model] {key}: "{value}" needs {library}: '
            "in the checkout, pip install -e '.[quantised]'"
        ) from error


def _load_gguf(config: Config, name: str, cls: Any) -> Any:
    """A part whose shape is the folder's and whose weights are `[model] gguf`'s."""
    from diffusers import GGUFQuantizationConfig

    model, dtype = config.model, dtype_of(config)
    if model.weights != "bf16":
        raise ConfigError(f'[model] gguf: not with weights = "{model.weights}"; use "bf16"')
    if model.fuse_loras:
        raise ConfigError("[model] gguf: not with fuse_loras; a LoRA of an edit can be had")
    import_library("gguf", "gguf", model.gguf)
    try:
        gguf_tensors(_gguf_file(config))
        loaded = cls.from_single_file(
            str(_gguf_file(config)),
            config=model.path,
            subfolder=name,
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            torch_dtype=dtype,
            device=str(device_of(config)),
            local_files_only=True,
        )
    except BAD_FILE as error:
        raise _unreadable(config, error) from error
    missing = [
        path for path, parameter in loaded.named_parameters() if parameter.device.type == "meta"
    ]
    if missing:
        raise ConfigError(f"[model] gguf: {model.gguf} has no {missing[0]}")
    return loaded.eval().requires_grad_(False)


def _gguf_file(config: Config) -> Path:
    file = Path(config.model.gguf)
    if file.suffix != ".gguf" or not file.is_file():
        raise ConfigError(f"[model] gguf: {file} is no file that ends in .gguf")
    return file


def gguf_tensors(file: Path) -> list[Any]:
    """The tensors of a GGUF file, as its own library reads them.

    Raises:
        ValueError: it is none, or not whole; and what else that library raises of such files.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    def stored(form: int, count: int) -> int:
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(form)]
        except ValueError as error:
            raise KeyError(form) from error
        if count % block:
            raise ValueError(f"blocks of {block} do not divide {count}")
        return count // block * size

    with file.open("rb") as opened:
        read_gguf(opened, os.fstat(opened.fileno()).st_size, stored)
    return list(GGUFReader(file).tensors)


def _unreadable(config: Config, error: Exception) -> ConfigError:
    why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ConfigError(f"[model] gguf: {config.model.gguf} is no GGUF file of this model: {why}")


def _products(model: nn.Module, form: str, within: str) -> Iterator[tuple[str, nn.Linear]]:
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear or re.search(within, path) is None:
            continue
        if form != "nf4" or layer.in_features % _NF4_GROUP == 0:
            yield path, layer


def _packed_bytes(layer: nn.Linear, form: str) -> int:
    """Weights and scales; of int8 also a zero point of a byte per output."""
    numbers, outputs = layer.weight.numel(), layer.out_features
    if form == "nf4":
        return numbers // 2 + 4 * (numbers // _NF4_GROUP)
    return numbers + (4 if form == "fp8" else 5) * outputs


def _by_torchao(layer: nn.Linear, form: str) -> None:
    from torchao.quantization import quantize_

    quantize_(layer, _torchao_config(form, layer.weight.device))


def _torchao_config(form: str, device: torch.device) -> Any:
    from torchao import quantization

    if form == "int8":
        return quantization.Int8WeightOnlyConfig()
    if form == "int8-dynamic":
        return quantization.Int8DynamicActivationInt8WeightConfig()
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        return quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow()
        )
    return quantization.Float8WeightOnlyConfig()


def _nf4(layer: nn.Linear, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    dtype = layer.weight.dtype
    packed = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    packed.weight = Params4bit(
        layer.weight.detach().contiguous(),
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
        module=packed,
    ).to(device)
    if layer.bias is not None:
        packed.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
    # A CPU with AVX512-BF16 would round tokens to bfloat16 whatever `compute_dtype` is.
    packed.support_avx512bf16_for_cpu &= dtype == torch.bfloat16
    return packed.eval().requires_grad_(False)
