"""The tensors of a GGUF checkpoint, which has its publisher's names, decoded by gguf's own package.

F16 and F32 stay as they are; all other forms are decoded to bfloat16, layer by layer. A UNet's
convolutions may lie in rows of 256 numbers, with their shape in the metadata, as ComfyUI-GGUF
writes them.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from maskserve_common.config import ConfigError
from maskserve_common.files.safetensors_header import MAX_DIMENSIONS, short
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.stages.quantise import BAD_FILE, gguf_reader, import_library

GGUF_END = ".gguf"
_SHAPE = "comfy.gguf.orig_shape."
"""How the key of a tensor's shape begins."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16}


class GgufTensors:
    """The tensors of a GGUF file, as `StoredTensors` has those of safetensors.

    Raises:
        ConfigError: it is damaged or gguf is not installed; one sentence.
    """

    plain = False
    """Whether the file can be loaded as it is."""

    def __init__(self, file: Path) -> None:
        import_library("gguf", "gguf", str(file))
        self.file = file
        try:
            reader = gguf_reader(file)
            self._stored = {tensor.name: tensor for tensor in reader.tensors}
        except BAD_FILE as error:
            why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise ConfigError(f"{file} is not a GGUF file that is read: {why}") from error
        self._shapes = {name: self._shape(reader, name) for name in self._stored}
        self.names = self._stored.keys()
        self.nbytes = sum(int(tensor.n_bytes) for tensor in self._stored.values())

    @property
    def form(self) -> str:
        """The form of most of its bytes."""
        counts: Counter[str] = Counter()
        for tensor in self._stored.values():
            counts[tensor.tensor_type.name] += int(tensor.n_bytes)
        [(name, _)] = counts.most_common(1) or [("F32", 0)]
        return f"GGUF {name}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, decoded."""
        return {name: self._record(self._stored[name]) for name in sorted(self.names)}

    def _shape(self, reader: Any, name: str) -> tuple[int, ...]:
        shape = tuple(int(size) for size in reversed(self._stored[name].shape))
        field = reader.get_field(f"{_SHAPE}{name}")
        if field is None:
            return shape
        try:
            sizes = field.contents()
        except BAD_FILE:  # a string that is none
            sizes = None
        if not _is_shape(sizes) or math.prod(sizes) != math.prod(shape):
            raise ConfigError(
                f"{self.file}: {_SHAPE}{short(name)} is no shape of the tensor's "
                f"{math.prod(shape)} numbers"
            )
        return tuple(sizes)

    def _record(self, stored: Any) -> RecordedTensor:
        shape = self._shapes[stored.name]
        dtype = _PLAIN.get(stored.tensor_type.name, torch.bfloat16)
        plain = torch.empty(shape, dtype=dtype, device="meta")
        return RecordedTensor.of(plain, lambda: self._decode(stored, shape).to(dtype))

    def _decode(self, stored: Any, shape: tuple[int, ...]) -> torch.Tensor:
        from gguf import quants

        try:
            numbers = quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.file}: {short(stored.name)} is in {stored.tensor_type.name}, which "
                "gguf does not decode"
            ) from error
        return torch.from_numpy(numbers.copy()).reshape(shape)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(isinstance(size, int) and size > 0 for size in value)
    )
