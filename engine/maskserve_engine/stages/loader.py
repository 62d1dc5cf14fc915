"""Loading parts of a diffusers-format folder."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.spec.facts import ModelFacts

GPUS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver lists its devices."""
_LIBRARIES = ("diffusers", "transformers")
"""That model_index.json may name: no other module is imported on a folder's word."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(config: Config, cuda: Any = torch.cuda, gpus: Path = GPUS) -> torch.device:
    """The device `[model] device` names; `auto` takes CUDA where there is one.

    Args:
        config: of the worker.
        cuda: torch's module.
        gpus: folder where NVIDIA's driver lists its devices.

    Raises:
        ConfigError: no such device, or `auto` on a host with GPUs that torch cannot use: a model
            that silently ran on the CPU instead would look like a fault of something else.
    """
    name = config.model.device
    if name == "auto":
        name = "cuda" if cuda.is_available() else "cpu"
        if name == "cpu" and (reason := unusable_gpus(gpus)) is not None:
            raise ConfigError(f'[model] device: {reason}; say device = "cpu" to do without')
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"[model] device: {name!r} is not a device") from error
    if device.type == "cuda":
        if not cuda.is_available():
            raise ConfigError(f"[model] device: {name!r} asked for, but there is no CUDA device")
        device_count = cuda.device_count()
        if (device.index or 0) >= device_count:
            raise ConfigError(
                f"[model] device: {name!r} asked for, but {device_count} can be seen here"
            )
    return device


def unusable_gpus(gpus: Path = GPUS) -> str | None:
    """Why the GPUs of this host cannot be used; None if it has none that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = len(list(gpus.glob("*")))
    if visible in ("", "-1") or (not cards and visible is None):
        return None
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
    else:
        try:
            torch.cuda.init()
            why = "torch.cuda.is_available() is false"
        except (RuntimeError, AssertionError) as error:
            why = _first_line(error)
    if not cards:
        return f"CUDA_VISIBLE_DEVICES={visible} names GPUs that cannot be used: {why}"
    return f"this host has {cards} NVIDIA GPU(s) that cannot be used: {why}"


def device_in_words(config: Config) -> str:
    """The device and dtype, for the log."""
    device, dtype = device_of(config), str(dtype_of(config)).removeprefix("torch.")
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}, {dtype}, torch {torch.__version__}"


def dtype_of(config: Config, cuda: Any = torch.cuda) -> torch.dtype:
    """`auto` is float32 on CPU (exact and testable) and bfloat16 on CUDA (`cuda`: torch's)."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device_of(config, cuda).type == "cuda" else torch.float32
    return _DTYPES[config.model.dtype]


def load_part(config: Config, name: str, cls: Any, device: torch.device | None = None) -> Any:
    """A model of the folder in eval mode on the configured device and dtype. Its weights go there
    one by one, from the mapped file: the host never holds them all.

    Args:
        config: names folder, device and dtype; on the device `meta` it is `shape_of` the part.
        name: subfolder, such as `transformer`.
        cls: class with `from_pretrained`.
        device: another than the configured one.

    Raises:
        ConfigError: the part is missing or cannot be read.
    """
    folder, dtype = _part(config, name), dtype_of(config)
    device = device or device_of(config)
    if device.type == "meta":
        return shape_of(config, name)
    try:
        variant = weight_files(folder, config.model.variant).variant
    except ValueError as error:
        raise ConfigError(f"[model] variant: {folder} {error}") from error
    try:
        # diffusers says torch_dtype, transformers has moved to dtype.
        argument = "dtype" if cls.__module__.startswith("transformers") else "torch_dtype"
        model = cls.from_pretrained(
            str(folder),
            local_files_only=True,
            variant=variant or None,
            device_map={"": device},
            **{argument: dtype},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[model] path: cannot load {folder}: {_first_line(error)}") from error
    return model.eval().requires_grad_(False)


def shape_of(config: Config, name: str) -> torch.nn.Module:
    """A part of the model folder as its config.json and the class in model_index.json say, on
    torch's device `meta`: no weights are read, and none need be there. What config.json leaves out
    is as in the class.

    Raises:
        ConfigError: the part is missing, or of a class that is not known.
    """
    folder, dtype = _part(config, name), dtype_of(config)
    index = read_json(Path(config.model.path) / "model_index.json")
    try:
        library, named = index[name]
        if library not in _LIBRARIES:
            raise ValueError(f"model_index.json: {library} is neither of {_LIBRARIES}")
        cls = getattr(importlib.import_module(library), named)
        with torch.device("meta"):
            if library == "transformers":
                model = cls(cls.config_class.from_pretrained(str(folder), local_files_only=True))
            else:
                model = cls.from_config(cls.load_config(str(folder), local_files_only=True))
    except (KeyError, AttributeError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[model] path: cannot tell the shapes of {folder}: {error}") from error
    # Not by diffusers' own `to`: it warns of layers that are best kept in float32.
    return torch.nn.Module.to(model, dtype).eval().requires_grad_(False)


def held_bytes(model: torch.nn.Module) -> int:
    """Of a model's parameters and buffers, whatever form a library has given them."""
    return sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's: made of tensors
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)  # bitsandbytes'
    return tensor.nbytes + (0 if scales is None else scales.nbytes)


def warm_up_side(config: Config, facts: ModelFacts, device: torch.device | None = None) -> int:
    """Of the square picture to warm up with, in pixels: kernels of a GPU are chosen by shape, and a
    CPU would take long for nothing. `device`: another than the configured one.
    """
    on_gpu = (device or device_of(config)).type == "cuda"
    return facts.native_resolution if on_gpu else 4 * facts.size_multiple


def load_plain(config: Config, name: str, cls: Any) -> Any:
    """A part without weights: a tokenizer or a sampler."""
    folder = _part(config, name)
    try:
        return cls.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[model] path: cannot load {folder}: {_first_line(error)}") from error


def sampler_name(config: Config) -> str:
    """The class that a model folder's scheduler_config.json names.

    Raises:
        ConfigError: it is not there, or names none.
    """
    path = _part(config, "scheduler") / "scheduler_config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"[model] path: {path} names no _class_name: {error!r}") from error


def _part(config: Config, name: str) -> Path:
    folder = Path(config.model.path) / name
    if not folder.is_dir():
        raise ConfigError(f"[model] path: {config.model.path} has no folder {name!r}")
    return folder


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
