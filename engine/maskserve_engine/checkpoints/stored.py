"""The tensors of a checkpoint file, in each form of numbers that is read.

    bf16, fp16, fp32    X.weight
    fp8                 X.weight in float8, without scales
    fp8 scaled          X.weight in float8, X.scale_weight or X.weight_scale: one number, or one a
                        row; the weight is their product. X.scale_input, X.input_scale and
                        `scaled_fp8` are for kernels that multiply in float8, and are left out
    int8                X.weight in int8, with scales in the same way
    mxfp8               X.weight in float8, X.weight_scale: an exponent for each 32 numbers
    nvfp4               X.weight: two numbers in a byte, the first in its high bits; X.weight_scale
                        in float8 for each 16 numbers, X.weight_scale_2 for all

The last two are read as ComfyUI writes them: each layer has a mark, X.comfy_quant or an entry of
`_quantization_metadata` in the header, and scales lie in cuBLAS' tiles (`_untiled`). Other tools
give the same names another order of bits.

Numbers of 8 bits and fewer are decoded to bfloat16, layer by layer, as they are read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_common.config import ConfigError
from maskserve_common.files.safetensors_header import (
    MAX_TENSORS,
    BadHeader,
    TensorPlace,
    header_of,
    short,
)
from maskserve_engine.checkpoints.recorded import RecordedTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
INDEX_END = ".safetensors.index.json"
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (".scale_weight", ".weight_scale")
_SECOND, _MARK = ".weight_scale_2", ".comfy_quant"
_LEFT_OUT = (".scale_input", ".input_scale", _MARK, _SECOND, "scaled_fp8")
_METADATA = "_quantization_metadata"
_GROUPS = {"nvfp4": 16, "mxfp8": 32}
"""Numbers that share a scale, by form."""
_WHOLE = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""Marks of forms with one scale, or one for each row."""
_MAX_MARK = 4096
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TILE = 128, 4
_REFUSED = {
    "Nunchaku's W4A4": (".qweight", ".wscales"),
    "bitsandbytes' 4 bits": (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
}
"""Forms that are not read, by name endings of their tensors."""
_USE = "use the model's file in bf16, fp16, fp8 scaled or int8, with --weights for fewer bits"
_MAX_INDEX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    place: TensorPlace


class StoredTensors:
    """The tensors of a checkpoint: one safetensors file, or the index of several.

    Args:
        file: NAME.safetensors, or NAME.safetensors.index.json.

    Raises:
        ConfigError: it is damaged, or in a form that is not read; one sentence.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._places = dict(_places(file))
        self.nbytes = sum(stored.place.nbytes for stored in self._places.values())
        self._check_forms()
        self._grouped = dict(self._marked())
        """Forms with a scale for each group of numbers, by the weight's name."""
        self._scales = {
            name[: -len(end)] + ".weight": name
            for name in self._places
            for end in _SCALES
            if name.endswith(end)
        }
        left_out = {name for name in self._places if name.endswith(_LEFT_OUT)}
        self.names = self._places.keys() - left_out - set(self._scales.values())
        for weight, scale in self._scales.items():
            self._check_scale(weight, scale)
        for weight, form in self._grouped.items():
            self._check_groups(weight, form)

    @property
    def form(self) -> str:
        """The form of most of its bytes."""
        counts: Counter[str] = Counter()
        for name in self.names:
            place = self._places[name].place
            counts[self._grouped.get(name, place.dtype)] += place.nbytes
        [(dtype, _)] = counts.most_common(1) or [("F32", 0)]
        if dtype.startswith("F8"):
            return "fp8 scaled" if self._scales else "fp8"
        return {"F16": "fp16", "F32": "fp32", "I8": "int8"}.get(dtype, dtype.lower())

    @property
    def plain(self) -> bool:
        """Whether the file can be loaded as it is."""
        return all(
            self._places[name].place.dtype not in _EIGHT_BITS for name in self.names
        ) and len(self.names) == len(self._places)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, decoded; the names of scales are left out."""
        return {name: self._recorded(name) for name in sorted(self.names)}

    def _recorded(self, name: str) -> RecordedTensor:
        place = self._places[name].place
        decoded = place.dtype in _EIGHT_BITS or name in self._grouped
        dtype = torch.bfloat16 if decoded else DTYPES[place.dtype]
        plain = torch.empty(self._shape(name), dtype=dtype, device="meta")
        return RecordedTensor.of(plain, lambda: self._decoded(name) if decoded else self._raw(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._places[name].place.shape
        return (shape[0], 2 * shape[1]) if self._grouped.get(name) == "nvfp4" else shape

    def _decoded(self, name: str) -> torch.Tensor:
        weight = self._raw(name)
        if name in self._grouped:
            return self._of_groups(name, weight)
        if name not in self._scales:
            return weight.to(torch.bfloat16)
        scale = self._raw(self._scales[name]).float()
        rows = scale.numel() > 1
        scale = scale.reshape(-1, *[1] * (weight.dim() - 1)) if rows else scale.reshape(())
        return weight.float().mul_(scale).to(torch.bfloat16)

    def _of_groups(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        form, (rows, columns) = self._grouped[name], self._shape(name)
        group, stored = _GROUPS[form], self._raw(self._scales[name])
        if form == "nvfp4":
            numbers = torch.cat([_FP4, -_FP4])[torch.stack([weight >> 4, weight & 15], -1).int()]
            second = self._raw(f"{name.removesuffix('.weight')}{_SECOND}").float()
            scales = stored.view(torch.float8_e4m3fn).float() * second
        else:
            numbers, scales = weight.float(), stored.view(torch.float8_e8m0fnu).float()
        scales = _untiled(scales, rows, columns // group)
        grouped = numbers.view(rows, columns // group, group) * scales[..., None]
        return grouped.view(rows, columns).to(torch.bfloat16)

    def _raw(self, name: str) -> torch.Tensor:
        stored = self._places[name]
        data = np.fromfile(stored.file, np.uint8, stored.place.nbytes, offset=stored.place.begin)
        if len(data) != stored.place.nbytes:
            raise ConfigError(f"{stored.file} is cut short: {short(name)} is not whole")
        return torch.from_numpy(data).view(DTYPES[stored.place.dtype]).reshape(stored.place.shape)

    def _check_forms(self) -> None:
        for name, stored in self._places.items():
            for form, ends in _REFUSED.items():
                if name.endswith(ends):
                    raise ConfigError(
                        f"{self.file} is in {form} ({short(name)}), which is not read; {_USE}"
                    )
            if stored.place.dtype not in DTYPES:
                raise ConfigError(
                    f"{stored.file}: {short(name)} is in {stored.place.dtype}, which is not read; "
                    f"read: {', '.join(DTYPES)}"
                )

    def _marked(self) -> Iterator[tuple[str, str]]:
        """Yield the weights with a scale for each group of numbers, by ComfyUI's marks.

        Raises:
            ConfigError: a mark names a form that is not read.
        """
        for layer, mark in self._marks():
            form = mark.get("format")
            if form not in (*_WHOLE, *_GROUPS) or mark.get("convrot"):
                words = f"{form} with rotated weights" if mark.get("convrot") else form
                raise ConfigError(
                    f"{self.file}: {short(layer)} is in ComfyUI's {words}, which is not "
                    f"read; {_USE}"
                )
            weight = f"{layer}.weight"
            if form in _GROUPS and weight in self._places:
                yield weight, form

    def _marks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, stored in self._places.items():
            if name.endswith(_MARK):
                if stored.place.nbytes > _MAX_MARK:
                    raise ConfigError(f"{self.file}: {short(name)} is too long for a mark")
                yield name.removesuffix(_MARK), self._object(name, bytes(self._raw(name).numpy()))
        for file in {stored.file for stored in self._places.values()}:
            text = header_of(file).metadata.get(_METADATA, "{}")
            layers = self._object(_METADATA, text).get("layers", {})
            for layer, mark in layers.items() if isinstance(layers, dict) else ():
                is_stored = f"{layer}.weight" in self._places
                prefixed = layer if is_stored else f"model.diffusion_model.{layer}"
                yield prefixed, mark if isinstance(mark, dict) else {}

    def _object(self, name: str, text: str | bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {short(name)} is no JSON object")
        return value

    def _check_groups(self, weight: str, form: str) -> None:
        """Check the tensors of a layer with a scale for each group of numbers."""
        layer, place = weight.removesuffix(".weight"), self._places[weight].place
        dtypes = {"nvfp4": ("U8",), "mxfp8": ("F8_E4M3",)}[form]
        if len(place.shape) != 2 or place.dtype not in dtypes:
            raise ConfigError(
                f"{self.file}: {short(weight)} is {place.dtype} {list(place.shape)}; expected of "
                f"{form}: {dtypes[0]}, [out, in]"
            )
        (rows, columns), group = self._shape(weight), _GROUPS[form]
        if columns % group:
            raise ConfigError(
                f"{self.file}: groups of {group} do not divide rows of {short(weight)}"
            )
        tiled = (rows + -rows % _TILE[0]) * (columns // group + -(columns // group) % _TILE[1])
        scale = self._places.get(self._scales.get(weight, ""))
        accepted = ("F8_E4M3", "U8") if form == "nvfp4" else ("F8_E8M0", "U8")
        if scale is None or scale.place.nbytes != tiled or scale.place.dtype not in accepted:
            raise ConfigError(
                f"{self.file}: {short(layer)} has no {tiled} scales of {form}, in tiles of "
                f"{_TILE[0]} x {_TILE[1]}"
            )
        second = self._places.get(f"{layer}{_SECOND}")
        if form == "nvfp4" and (
            second is None or second.place.dtype != "F32" or second.place.nbytes != 4
        ):
            raise ConfigError(f"{self.file}: {short(layer)}{_SECOND} is not one number in F32")

    def _check_scale(self, weight: str, scale: str) -> None:
        if weight not in self._places:
            raise ConfigError(
                f"{self.file}: {short(scale)} is the scale of {short(weight)}, which is missing"
            )
        if weight in self._grouped:
            return
        form = "nvfp4" if f"{weight.removesuffix('.weight')}{_SECOND}" in self._places else "mxfp8"
        if form == "nvfp4" or self._places[scale].place.dtype in ("U8", "F8_E8M0"):
            raise ConfigError(
                f"{self.file} is in {form} without ComfyUI's mark ({short(scale)}), and tools "
                f"differ in its layout; {_USE}"
            )
        shape, scales = (self._places[name].place.shape for name in (weight, scale))
        if math.prod(scales) not in (1, shape[0] if shape else 1):
            raise ConfigError(
                f"{self.file}: {short(scale)} has shape {list(scales)}; expected: one number, or "
                f"one for each row of {short(weight)} {list(shape)}"
            )
        if self._places[weight].place.dtype == "I8" and math.prod(scales) == 0:
            raise ConfigError(f"{self.file}: {short(scale)} is empty; expected: a number")


def _untiled(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales row by row, [rows, columns]. cuBLAS has tiles of 128 x 4, one after the other,
    and in each the rows 0, 32, 64, 96, then 1, 33, …
    """
    height, width = (size + -size % tile for size, tile in zip((rows, columns), _TILE, strict=True))
    tiles = scales.reshape(height // 128, width // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(height, width)[:rows, :columns]


def _places(file: Path) -> Iterator[tuple[str, _Place]]:
    for part in _files(file):
        try:
            header = header_of(part)
        except BadHeader as error:
            raise ConfigError(f"{part} {error}") from error
        except OSError as error:
            raise ConfigError(f"{part}: {error.strerror or error}") from error
        yield from ((name, _Place(part, place)) for name, place in header.tensors.items())


def _files(file: Path) -> list[Path]:
    """Return the files of a checkpoint; those of an index lie beside it."""
    if not file.name.endswith(INDEX_END):
        return [file]
    with file.open("rb") as handle:
        text = handle.read(_MAX_INDEX_BYTES + 1)
    try:
        weight_map: Mapping[str, str] = json.loads(text)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not an index of safetensors files") from error
    if len(names) > MAX_TENSORS or len(text) > _MAX_INDEX_BYTES:
        raise ConfigError(f"{file} is too long for an index of safetensors files")
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{file} names {short(name)}; expected: files beside it")
    return [file.with_name(name) for name in names]
