"""The tensors of a GGUF checkpoint, which has its publisher's names, decoded by gguf's own package.

F16 and F32 stay as they are; all other forms are decoded to bfloat16, layer by layer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from maskserve_common.config import ConfigError
from maskserve_common.files.safetensors_header import short
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.stages.quantise import BAD_FILE, gguf_tensors, import_library

GGUF_END = ".gguf"
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
            self._stored = {tensor.name: tensor for tensor in gguf_tensors(file)}
        except BAD_FILE as error:
            why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise ConfigError(f"{file} is not a GGUF file that is read: {why}") from error
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
        return {name: self._recorded(self._stored[name]) for name in sorted(self.names)}

    def _recorded(self, stored: Any) -> RecordedTensor:
        shape = tuple(int(size) for size in reversed(stored.shape))
        dtype = _PLAIN.get(stored.tensor_type.name, torch.bfloat16)
        plain = torch.empty(shape, dtype=dtype, device="meta")
        return RecordedTensor.of(plain, lambda: self._decoded(stored, shape).to(dtype))

    def _decoded(self, stored: Any, shape: tuple[int, ...]) -> torch.Tensor:
        from gguf import quants

        try:
            numbers = quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.file}: {short(stored.name)} is in {stored.tensor_type.name}, which "
                "gguf does not decode"
            ) from error
        return torch.from_numpy(numbers.copy()).reshape(shape)
