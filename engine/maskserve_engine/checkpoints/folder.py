"""A folder in diffusers format, made from a checkpoint file and the folder of a model like it.

The file's parts are converted to diffusers' names; all other parts are links:

    model_index.json, tokenizer/, scheduler/  -> the base folder
    transformer/config.json                   -> the base folder's
    transformer/diffusion_pytorch_model.safetensors    converted, tensor by tensor
    vae/, text_encoder/                       the file's, those that are named beside it, or -> base

`maskserve serve` runs it as a process, which gives its memory back at its end:

    python -m maskserve_engine.checkpoints.folder REQUEST.json
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from maskserve_common.config import ConfigError
from maskserve_common.config_file import config_of, read_json
from maskserve_common.files.safetensors_header import encode_header
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.checkpoints.gguf_tensors import GGUF_END, GgufTensors
from maskserve_engine.checkpoints.parts import (
    Tensors,
    converted_denoiser,
    converted_vae,
    denoiser_class,
    denoiser_of,
    part_file,
    text_encoder_fit,
    text_encoders_of,
    vae_of,
    whole_text_encoder,
)
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.checkpoints.request import CheckpointRequest, Description
from maskserve_engine.checkpoints.stored import DTYPES, StoredTensors
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.stages.loader import shape_of
from maskserve_engine.stages.unused_libraries import hide_unused_libraries

DENOISERS = ("transformer", "unet")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SPARE = 2**28
"""Bytes of a disk that stay free."""


Stored = StoredTensors | GgufTensors


def opened_tensors(file: Path) -> Stored:
    """Return the tensors of a file in either format.

    Raises:
        ConfigError: it is damaged, or in a form that is not read; one sentence.
    """
    return GgufTensors(file) if file.suffix == GGUF_END else StoredTensors(file)


def describe(file: Path) -> Description:
    """Describe a checkpoint.

    Raises:
        ConfigError: it is damaged, or not served; one sentence.
    """
    stored = opened_tensors(file)
    tensors = stored.tensors()
    try:
        cls, base = denoiser_class({**tensors, **denoiser_of(tensors)})
    except ConfigError as error:
        raise ConfigError(f"{file} {error}") from error
    return Description(
        cls=cls,
        base=base,
        form=stored.form,
        nbytes=stored.nbytes,
        vae=bool(vae_of(tensors)),
        text_encoders=len(text_encoders_of(tensors)),
    )


class _Maker:
    """Writes the folder of one request, part by part."""

    def __init__(self, request: CheckpointRequest) -> None:
        self.file, self.base = Path(request.file), Path(request.base).absolute()
        self.folder, self.weights = Path(request.folder), request.weights
        self.request = request
        self.index = read_model_index(self.base)
        self.stored = opened_tensors(self.file)
        self.tensors = self.stored.tensors()
        self.config = config_of({"model": {"path": str(self.base), "device": "meta"}})
        self.text_encoders = text_encoders_of(self.tensors)
        """Text encoders of the file that no part is yet."""
        self.missing: list[str] = []
        """A sentence for each part without weights."""

    def make(self) -> None:
        for file in self.base.glob("*.json"):
            (self.folder / file.name).symlink_to(file)
        denoiser = next((name for name in DENOISERS if name in self.index), "")
        if not denoiser:
            raise ConfigError(f"{self.base} has no denoiser in its index")
        encoders = self._text_encoders()
        for name, value in self.index.items():
            if not isinstance(value, list) or not value[0]:
                continue
            if name == denoiser:
                self._denoiser(name)
            elif name == "vae":
                self._vae(name)
            elif name.startswith("text_encoder"):
                self._text_encoder(name, encoders)
            elif (self.base / name).is_dir():
                (self.folder / name).symlink_to(self.base / name)
        if encoders:
            raise ConfigError(
                f"--text-encoder: {next(iter(encoders))} is none of the model's text encoders"
            )

    def _denoiser(self, name: str) -> None:
        cls, config = self.index[name][-1], read_json(self.base / name / "config.json")
        try:
            converted = converted_denoiser(
                denoiser_of(self.tensors), cls, config, self._expected(name)
            )
        except ConfigError as error:
            raise ConfigError(f"{self.file} {error}") from error
        self._write(name, converted, self.stored)

    def _vae(self, name: str) -> None:
        vae_path = Path(self.request.vae)
        if self.request.vae and vae_path.is_dir():
            inner = vae_path / name if (vae_path / name).is_dir() else vae_path
            if not (inner / "config.json").is_file():
                raise ConfigError(f"--vae: {vae_path} has no config.json")
            (self.folder / name).symlink_to(inner.absolute())
            return
        stored = opened_tensors(vae_path) if self.request.vae else self.stored
        tensors = stored.tensors()
        vae = vae_of(tensors) or (tensors if self.request.vae else {})
        if not vae:
            self._link_base(name, "--vae")
            return
        config = read_json(self.base / name / "config.json")
        try:
            converted = converted_vae(vae, self.index[name][-1], config, self._expected(name))
        except ConfigError as error:
            raise ConfigError(f"{stored.file} {error}") from error
        self._write(name, converted, stored)

    def _text_encoder(self, name: str, encoders: dict[Path, list[tuple[Tensors, Any]]]) -> None:
        """Take the part from what is named for it, the file, or the base folder."""
        expected, near = self._expected(name), ""
        for path, candidates in encoders.items():
            for tensors, source in candidates:
                fit = text_encoder_fit(tensors, expected)
                if fit == "":
                    del encoders[path]
                    if isinstance(source, Path):
                        (self.folder / name).symlink_to(source)
                    else:
                        self._write(name, whole_text_encoder(tensors, expected), source)
                    return
                near = near or (f"--text-encoder: {path} {fit} ({name})" if fit else "")
        for place, tensors in enumerate(self.text_encoders):
            if text_encoder_fit(tensors, expected) == "":
                del self.text_encoders[place]
                self._write(name, whole_text_encoder(tensors, expected), self.stored)
                return
        if near:
            raise ConfigError(near)
        self._link_base(name, "--text-encoder")

    def _text_encoders(self) -> dict[Path, list[tuple[Tensors, Any]]]:
        """Return the text encoders of each --text-encoder, with the folder or the file that they
        are in.
        """
        encoders: dict[Path, list[tuple[Tensors, Any]]] = {}
        for name in self.request.text_encoders:
            path = Path(name)
            if path.is_dir():
                folders = [
                    inner.absolute()
                    for inner in (sorted(path.glob("text_encoder*")) or [path])
                    if inner.is_dir()
                ]
                for folder in folders:
                    files = weight_files(folder).files
                    tensors: Tensors = {}
                    for file in files:
                        tensors |= StoredTensors(file).tensors()
                    encoders[folder if len(folders) > 1 else path] = [(tensors, folder)]
            else:
                stored = opened_tensors(path)
                tensors = stored.tensors()
                encoders[path] = [
                    (encoder, stored) for encoder in text_encoders_of(tensors) or [tensors]
                ]
        return encoders

    def _link_base(self, name: str, flag: str) -> None:
        folder = self.base / name
        if not weight_files(folder).files:
            self.missing.append(
                f"{flag}: is missing: {self.file} has no {name}, and {self.base} has no weights of "
                "it; name a folder, a file or a hub id"
            )
            if self.weights:
                raise ConfigError(self.missing[0])
        (self.folder / name).symlink_to(folder)

    def _expected(self, name: str) -> dict[str, torch.Tensor]:
        return shape_of(self.config, name).state_dict()

    def _write(self, name: str, tensors: Tensors, stored: Stored) -> None:
        folder = self.folder / name
        folder.mkdir()
        for file in (self.base / name).glob("*.json"):
            if not file.name.endswith(".index.json"):
                (folder / file.name).symlink_to(file)
        if not self.weights:
            return
        file = part_file(folder, self.index[name][0])
        if stored.plain and tensors.keys() == stored.names:  # a text encoder's file
            file.symlink_to(stored.file.absolute())
            return
        if stored.form not in ("bf16", "fp16", "fp32"):
            print(f"{name}: {stored.file.name} is in {stored.form}; decoded to bf16 by layer")
        write_tensors(file, tensors)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, computing one tensor at a time.

    Raises:
        ConfigError: the disk has too little room.
    """
    head = encode_header(
        {name: (_NAMES[x.dtype], tuple(x.shape), x.nbytes) for name, x in tensors.items()},
        {"format": "pt"},
    )
    needed = len(head) + sum(x.nbytes for x in tensors.values())
    free = shutil.disk_usage(file.parent).free
    if needed + _SPARE > free:
        raise ConfigError(
            f"{file.parent} is on a disk with {free / 2**30:.1f} GiB free; the converted weights "
            f"take {needed / 2**30:.1f} GiB"
        )
    with file.open("wb") as handle:
        handle.write(head)
        for tensor in tensors.values():
            for piece in _bytes(tensor):
                handle.write(piece)


def _bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    whole = tensor.values() if isinstance(tensor, RecordedTensor) else tensor
    if whole.numel():
        yield whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def make_folder(request: CheckpointRequest) -> list[str]:
    """Write the folder of a request, which exists and is empty.

    Returns:
        A sentence for each part without weights, if the request wants none written.

    Raises:
        ConfigError: the parts are damaged or do not fit; one sentence.
    """
    try:
        maker = _Maker(request)
        maker.make()
        return maker.missing
    except ValueError as error:  # variants of a folder
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{request.base} {error}") from error


def main(argv: list[str]) -> int:
    """Describe the file of a request, or write its folder."""

    def run(request: CheckpointRequest) -> None:
        if request.folder:
            make_folder(request)
        else:
            print(msgspec.json.encode(describe(Path(request.file))).decode())

    return run_request(argv, run)


def run_request(
    argv: list[str],
    run: Callable[[CheckpointRequest], None],
    needs_text: Callable[[CheckpointRequest], bool] = lambda request: True,
) -> int:
    """Run a command.

    Args:
        argv: its arguments, of which the first names the file of a request.
        run: the command.
        needs_text: whether a request needs the classes of text encoders.

    Returns:
        Its exit status; an error of the configuration is one sentence.
    """
    warnings.simplefilter("ignore")
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=CheckpointRequest)
    gguf = request.file if request.file.endswith(GGUF_END) else ""
    try:
        hide_unused_libraries(config_of({"model": {"gguf": gguf}}), text=needs_text(request))
        run(request)
    except ConfigError as error:
        print(f"maskserve serve: {str(error).removeprefix('[model] path: ')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
