"""Time and peak memory of the conversion of a random Z-Image checkpoint file, and the time in which
a worker loads the converted folder, beside that of reading its bytes:

    scripts/bench convert_checkpoint --gib 2 --form fp8

It writes the file and its base folder in a temporary folder, and converts it as `maskserve serve
--model FILE` does. Peak memory is that of the process that converts, with its libraries. Before it
loads the folder, and before it reads the same files, it drops them from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from maskserve_benchmarks.machine import machine
from maskserve_common.config_file import config_of
from maskserve_engine.checkpoints.folder import write_tensors
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.checkpoints.request import CheckpointRequest
from maskserve_engine.stages.loader import load_part

_CLASS = "ZImageTransformer2DModel"
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_PIECE = 2**24
"""Bytes of one call that reads a file."""
_PAGE = 4096
_JOINED = {".attention.to_q.": ("qkv",), ".attention.to_k.": (), ".attention.to_v.": ()}


def random_checkpoint(folder: Path, gib: float, form: str) -> CheckpointRequest:
    """Write a base folder of shapes and a checkpoint of about `gib` GiB under published names."""
    from diffusers import ZImageTransformer2DModel

    dtype = _DTYPES[form]

    def shapes_of(layers: int) -> tuple[ZImageTransformer2DModel, dict[str, torch.Size]]:
        with torch.device("meta"):
            model = ZImageTransformer2DModel(n_layers=layers, n_refiner_layers=1)
        return model, {name: tensor.shape for name, tensor in model.state_dict().items()}

    def nbytes(layers: int) -> int:
        return sum(shape.numel() for shape in shapes_of(layers)[1].values()) * dtype.itemsize

    one = nbytes(2) - nbytes(1)
    model, shapes = shapes_of(max(1, round((gib * 2**30 - nbytes(1)) / one) + 1))
    base = folder / "base"
    model.save_config(base / "transformer")
    index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", _CLASS]}
    (base / "model_index.json").write_text(json.dumps(index), "utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        renamed = name.replace("all_final_layer.2-1.", "final_layer.")
        renamed = renamed.replace("all_x_embedder.2-1.", "x_embedder.")
        joined = next((names for part, names in _JOINED.items() if part in name), None)
        if joined == ():
            continue
        rows = shape[0]
        if joined:
            renamed, rows = renamed.replace("to_q", "qkv"), 3 * rows
        plain = torch.empty(rows, *shape[1:], dtype=dtype, device="meta")
        tensors[renamed] = RecordedTensor.of(plain, lambda it=plain: _random(it))  # type: ignore[misc]
    file = folder / "it.safetensors"
    write_tensors(file, tensors)
    (folder / "out").mkdir()
    return CheckpointRequest(str(file), str(base), folder=str(folder / "out"))


def _random(shape: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape.shape, dtype=torch.bfloat16).to(shape.dtype)


def cold_load_s(folder: Path) -> float:
    """Return the seconds in which a worker on a CPU has a folder's denoiser in memory."""
    from diffusers import ZImageTransformer2DModel

    _drop(folder)
    config = config_of({"model": {"path": str(folder), "device": "cpu", "dtype": "bfloat16"}})
    began = time.perf_counter()
    model = load_part(config, "transformer", ZImageTransformer2DModel)
    for tensor in model.parameters():  # mapped files are read when they are touched
        tensor.flatten()[:: _PAGE // tensor.itemsize].sum()
    return time.perf_counter() - began


def cold_read_s(folder: Path) -> float:
    """Return the seconds in which a folder's weights are read from the disk."""
    _drop(folder)
    began = time.perf_counter()
    for file in folder.rglob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.read(_PIECE):
                pass
    return time.perf_counter() - began


def _drop(folder: Path) -> None:
    """Drop a folder's weights from the page cache."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--form", choices=_DTYPES, default="bf16")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = random_checkpoint(folder, options.gib, options.form)
        size = Path(request.file).stat().st_size
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-m", "maskserve_engine.checkpoints.folder"]
        began = time.perf_counter()
        subprocess.run([*command, str(folder / "request.json")], check=True)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        loads, reads = (cold(folder / "out") for cold in (cold_load_s, cold_read_s))
    print(
        f"{options.form}, {size / 2**30:.2f} GiB: {seconds:.1f} s, peak memory "
        f"{peak / 2**30:.2f} GiB ({peak / size:.2f} of the file); the folder is loaded in "
        f"{loads:.1f} s, {loads / reads:.2f} times as long as its bytes are read; {machine()}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
