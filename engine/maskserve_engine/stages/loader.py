"""Loading parts of a diffusers-format folder."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from maskserve_common.config import Config, ConfigError
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.spec.model_spec import ModelSpec

GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder where NVIDIA's driver lists its devices."""
_LIBRARIES = ("diffusers", "transformers")
"""Libraries that an index may name; a folder cannot cause other imports."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(config: Config, cuda: Any = torch.cuda, gpus: Path = GPUS) -> torch.device:
    """Return the device of `[model] device`; `auto` prefers CUDA.

    Args:
        config: configuration of the worker.
        cuda: torch's CUDA module.
        gpus: folder where NVIDIA's driver lists its devices.

    Raises:
        ConfigError: no such device, or `auto` on a host with GPUs that torch cannot use: a
            model that silently ran on the CPU would look like another fault.
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
            raise ConfigError(
                f"[model] device: {name!r} is configured, but there is no CUDA device"
            )
        device_count = cuda.device_count()
        if (device.index or 0) >= device_count:
            raise ConfigError(
                f"[model] device: {name!r} is configured, but {device_count} can be seen here"
            )
    return device


def unusable_gpus(gpus: Path = GPUS) -> str | None:
    """Return why this host's GPUs cannot be used; None if this process can see none."""
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
    device, dtype = device_of(config), str(dtype_of(config)).removeprefix("torch.")
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}, {dtype}, torch {torch.__version__}"


def dtype_of(config: Config, cuda: Any = torch.cuda) -> torch.dtype:
    """Return the model's dtype; `auto` is float32 on CPU (exact and testable) and bfloat16
    on CUDA.
    """
    if config.model.dtype == "auto":
        return torch.bfloat16 if device_of(config, cuda).type == "cuda" else torch.float32
    return _DTYPES[config.model.dtype]


def load_part(config: Config, name: str, cls: Any, device: torch.device | None = None) -> Any:
    """Load a model of the folder in eval mode, on the configured device and dtype. Weights go from
    the mapped file to the device one by one, so the host never holds them all.

    Args:
        config: names folder, device and dtype; on device `meta` the result is `shape_of` the
            part.
        name: subfolder, such as `transformer`.
        cls: class with `from_pretrained`.
        device: overrides the configured device.

    Raises:
        ConfigError: the part is missing or unreadable.
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
    """Return a part of the model folder on torch's device `meta`, from its config.json and the
    class in its index: no weights are read, and none need exist. Missing options have the
    class's defaults.

    Raises:
        ConfigError: the part is missing, or its class is unknown.
    """
    folder, dtype = _part(config, name), dtype_of(config)
    index = read_model_index(Path(config.model.path))
    try:
        library, named = index[name]
        if library not in _LIBRARIES:
            raise ValueError(f"model index: {library} is neither of {_LIBRARIES}")
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


def read_modules(
    model: torch.nn.Module, names: Sequence[str], folder: Path, variant: str
) -> dict[str, Any]:
    """Return copies of some of a model's modules, by their names, with the weights of its folder,
    in host memory; the model itself need have no weights.
    """
    states = {f"{name}.": dict[str, torch.Tensor]() for name in names}
    for file in weight_files(folder, variant).files:
        with safe_open(file, "pt") as opened:
            for key, (prefix, state) in product(opened.keys(), states.items()):
                if key.startswith(prefix):
                    state[key.removeprefix(prefix)] = opened.get_tensor(key)
    modules = dict[str, Any]()
    for name, state in zip(names, states.values(), strict=True):
        modules[name] = deepcopy(model.get_submodule(name)).to_empty(device="cpu")
        modules[name].load_state_dict(state)
    return modules


def module_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, in any library's form."""
    return sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's: made of tensors
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)  # bitsandbytes'
    return tensor.nbytes + (0 if scales is None else scales.nbytes)


def warm_up_side(config: Config, spec: ModelSpec, device: torch.device | None = None) -> int:
    """Return the side of the square warm-up picture, in pixels: a GPU chooses kernels by shape, and
    a CPU gains nothing from a large one.
    """
    on_gpu = (device or device_of(config)).type == "cuda"
    return spec.native_resolution if on_gpu else 4 * spec.size_multiple


def load_plain(config: Config, name: str, cls: Any) -> Any:
    """Load a part without weights: a tokenizer or a sampler."""
    folder = _part(config, name)
    try:
        return cls.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[model] path: cannot load {folder}: {_first_line(error)}") from error


def sampler_name(config: Config) -> str:
    """Return the class that a model folder's scheduler_config.json names.

    Raises:
        ConfigError: the file is missing, or names none.
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
