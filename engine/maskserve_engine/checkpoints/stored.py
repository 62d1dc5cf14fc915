"""The tensors of a checkpoint file, in each form of numbers that is read.

    bf16, fp16, fp32    X.weight
    fp8                 X.weight in float8, without scales
    fp8 scaled          X.weight in float8, X.scale_weight or X.weight_scale: one number, or one a
                        row; the weight is their product. X.scale_input, X.input_scale and
                        `scaled_fp8` are for kernels that multiply in float8, and are left out
    int8                X.weight in int8, with scales in the same way

Numbers of 8 bits are decoded to bfloat16, layer by layer, as they are read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
INDEX_END = ".safetensors.index.json"
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (".scale_weight", ".weight_scale")
_LEFT_OUT = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
_REFUSED = {
    "nvfp4": (".weight_scale_2",),
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

    @property
    def form(self) -> str:
        """The form of most of its bytes."""
        counts: Counter[str] = Counter()
        for name in self.names:
            place = self._places[name].place
            counts[place.dtype] += place.nbytes
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
        decoded = place.dtype in _EIGHT_BITS
        dtype = torch.bfloat16 if decoded else DTYPES[place.dtype]
        plain = torch.empty(place.shape, dtype=dtype, device="meta")
        return RecordedTensor.of(plain, lambda: self._decoded(name) if decoded else self._raw(name))

    def _decoded(self, name: str) -> torch.Tensor:
        weight = self._raw(name)
        if name not in self._scales:
            return weight.to(torch.bfloat16)
        scale = self._raw(self._scales[name]).float()
        rows = scale.numel() > 1
        scale = scale.reshape(-1, *[1] * (weight.dim() - 1)) if rows else scale.reshape(())
        return weight.float().mul_(scale).to(torch.bfloat16)

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
            if name.endswith(_SCALES) and stored.place.dtype in ("U8", "F8_E8M0"):
                raise ConfigError(
                    f"{self.file} is in mxfp8 ({short(name)}), which is not read; {_USE}"
                )
            if stored.place.dtype not in DTYPES:
                raise ConfigError(
                    f"{stored.file}: {short(name)} is in {stored.place.dtype}, which is not read; "
                    f"read: {', '.join(DTYPES)}"
                )

    def _check_scale(self, weight: str, scale: str) -> None:
        if weight not in self._places:
            raise ConfigError(
                f"{self.file}: {short(scale)} is the scale of {short(weight)}, which is missing"
            )
        shape, scales = (self._places[name].place.shape for name in (weight, scale))
        if math.prod(scales) not in (1, shape[0] if shape else 1):
            raise ConfigError(
                f"{self.file}: {short(scale)} has shape {list(scales)}; expected: one number, or "
                f"one for each row of {short(weight)} {list(shape)}"
            )
        if self._places[weight].place.dtype == "I8" and math.prod(scales) == 0:
            raise ConfigError(f"{self.file}: {short(scale)} is empty; expected: a number")


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
    with file.open("rb") as opened:
        text = opened.read(_MAX_INDEX_BYTES + 1)
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
