"""Quantised weights by torchao and bitsandbytes, and GGUF files by diffusers.

In a denoiser only the linear layers of transformer blocks change, since they hold nearly all
weights. Input and output layers, embeddings and convolutions stay as they are.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskserve_common.config import Config, ConfigError
from maskserve_common.files.digests import file_digest
from maskserve_common.files.gguf_header import read_gguf
from maskserve_engine.stages.loader import device_of, dtype_of, load_part, module_bytes

_NF4_GROUP = 64
"""Weights that share a scale; a layer whose inputs are no multiple of it stays as it is."""
_FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies FP8."""


BAD_FILE = (OSError, ValueError, RuntimeError, KeyError, IndexError, TypeError)
"""Exceptions of GGUF readers for files that are invalid or of another model."""
Prepare = Callable[[nn.Module], nn.Module]
"""Applied to a part before it is quantised."""


def load_denoiser(config: Config, name: str, cls: Any, prepare: Prepare) -> Any:
    """Load a denoiser in the form of `[model] weights`. Layers are converted one by one: the device
    never holds all unquantised weights.

    Raises:
        ConfigError: the part is unreadable or already quantised, or the form's library is
            missing.
    """
    form = config.model.weights
    if config.model.gguf and device_of(config).type != "meta":
        return _load_gguf(config, name, cls)
    return _load(config, name, cls, "weights", form, prepare)


def gguf_bytes(config: Config) -> int:
    """Return the bytes that the tensors of `[model] gguf` will take, by the file's header:
    quantised ones as in the file, others in the model's dtype.

    Raises:
        ConfigError: the file or the library is missing, or it is no GGUF file.
    """
    import_library("gguf", "gguf", config.model.gguf)
    from gguf import GGMLQuantizationType

    plain = GGMLQuantizationType.F32, GGMLQuantizationType.F16
    try:
        tensors = gguf_reader(_gguf_file(config)).tensors
    except BAD_FILE as error:
        raise _unreadable(config, error) from error
    itemsize = dtype_of(config).itemsize
    return sum(
        int(tensor.n_elements) * itemsize if tensor.tensor_type in plain else int(tensor.n_bytes)
        for tensor in tensors
    )


def load_t5(config: Config, name: str, cls: Any) -> Any:
    """Load a T5 in the form of `[model] t5_weights`; or in host memory, from where each layer moves
    to the device when it runs (`t5_offload`).

    Raises:
        ConfigError: the part is unreadable or already quantised, or the form's library is
            missing.
    """
    if config.model.t5_offload:
        if config.model.t5_weights != "bf16":
            raise ConfigError('[model] t5_offload: not with t5_weights = "int8"; use one of them')
        from accelerate import cpu_offload

        model = load_part(config, name, cls, device=torch.device("cpu"))
        return cpu_offload(model, execution_device=device_of(config), offload_buffers=True)
    return _load(config, name, cls, "t5_weights", config.model.t5_weights, whole=True)


def quantise(model: nn.Module, form: str, device: torch.device, *, whole: bool = False) -> None:
    """Replace a model's linear layers in place.

    Args:
        model: a model with torch's own layers.
        form: `int8`: one scale per output, products in the model's dtype; `int8-dynamic`: also
            a scale per token, products in int8; `fp8`: one scale per output, and one per token
            where the device multiplies FP8; `nf4`: one scale per 64 weights, products in the
            model's dtype.
        device: device of the replaced layers.
        whole: whether layers outside of its blocks are replaced, too.
    """
    for path, layer in list(_products(model, form, whole=whole)):
        if form == "nf4":
            model.set_submodule(path, _nf4(layer, device))
        else:
            _by_torchao(layer.to(device), form)


def bytes_as(model: nn.Module, form: str, *, whole: bool = False) -> int:
    """Return the bytes of a model in a form, by its shapes; it may be on torch's device `meta`."""
    total = module_bytes(model)
    if form != "bf16":
        for _, layer in _products(model, form, whole=whole):
            total += _packed_bytes(layer, form) - layer.weight.nbytes
    return total


def largest_layer_bytes(model: nn.Module) -> int:
    """Return the bytes on a device to which a model's layers move one at a time."""
    layers = (module.parameters(recurse=False) for module in model.modules())
    return max(sum(parameter.nbytes for parameter in layer) for layer in layers)


def form_in_words(config: Config) -> str:
    """Return everything that changes the served products' results, for the names of entries; empty
    for weights as in the folder.
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
    prepare: Prepare = lambda model: model,
    *,
    whole: bool = False,
) -> Any:
    if form == "bf16":
        return prepare(load_part(config, name, cls))
    import_library("bitsandbytes" if form == "nf4" else "torchao", key, form)
    model = load_part(config, name, cls, device=torch.device("cpu"))
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f'[model] {key}: {name} is quantised already; use "bf16"')
    quantise(prepare(model), form, device_of(config), whole=whole)
    return model.to(device_of(config))


def import_library(library: str, key: str, value: str) -> None:
    """Import a library that a setting of `[model]` needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f'[model] {key}: "{value}" needs {library}: '
            "in the checkout, pip install -e '.[quantised]'"
        ) from error


def _load_gguf(config: Config, name: str, cls: Any) -> Any:
    """Load a part with the folder's shape and the weights of `[model] gguf`."""
    from diffusers import GGUFQuantizationConfig

    model, dtype = config.model, dtype_of(config)
    if model.weights != "bf16":
        raise ConfigError(f'[model] gguf: not with weights = "{model.weights}"; use "bf16"')
    if model.fuse_loras:
        raise ConfigError("[model] gguf: not with fuse_loras; name the LoRA in each edit instead")
    import_library("gguf", "gguf", model.gguf)
    try:
        gguf_reader(_gguf_file(config))
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
        raise ConfigError(f"[model] gguf: {file} is not a file that ends in .gguf")
    return file


def gguf_reader(file: Path) -> Any:
    """Return the reader of a GGUF file that its own library has, with tensors and metadata.

    Raises:
        ValueError: the file is invalid or incomplete; the library raises other exceptions, too.
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

    with file.open("rb") as handle:
        read_gguf(handle, os.fstat(handle.fileno()).st_size, stored)
    return GGUFReader(file)


def _unreadable(config: Config, error: Exception) -> ConfigError:
    why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ConfigError(f"[model] gguf: {config.model.gguf} is not a GGUF file of this model: {why}")


def _products(model: Any, form: str, *, whole: bool) -> Iterator[tuple[str, nn.Linear]]:
    blocks: tuple[str, ...] = ("",)
    if not whole:
        names = getattr(model, "_repeated_blocks", None) or model._no_split_modules
        paths = (path for path, module in model.named_modules() if type(module).__name__ in names)
        blocks = tuple(f"{path}." for path in paths)
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear or not path.startswith(blocks):
            continue
        if form != "nf4" or layer.in_features % _NF4_GROUP == 0:
            yield path, layer


def _packed_bytes(layer: nn.Linear, form: str) -> int:
    """Return the bytes of weights and scales; int8 also has a zero point byte per output."""
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
