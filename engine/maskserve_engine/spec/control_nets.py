"""ControlNets that edits may name: a folder for each, as diffusers saves them.

A ControlNet has gigabytes, and a deployment a handful: they lie in a folder of the host, or in a
mounted volume. A net is looked up when an edit names it. Only the denoiser reads it, when it first
needs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from maskserve_common.config import Config
from maskserve_common.contracts.keys import ADAPTER_NAME
from maskserve_common.errors import AdapterNotFound, InvalidRequest
from maskserve_common.files.digests import file_digest
from maskserve_common.files.safetensors_header import BadHeader, header_of
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.spec.model_spec import ControlNetSpec, ModelSpec

_CONFIG = "config.json"
MASK_NUMBERS = 4
"""Numbers of a token of a mask: one for each of its latents."""


class KnownControlNet(NamedTuple):
    name: str
    path: Path
    version: str
    """32 hexadecimal digits that change when a file is replaced; computed without
    reading any file.
    """
    nbytes: int = 0
    """Bytes of its weight files."""
    numbers: int = 0
    """Number of its weights."""
    modes: int = 0
    """Kinds of control pictures among which an edit must choose; 0: it has no choice."""
    config: Mapping[str, Any] = MappingProxyType({})
    """Contents of its config.json."""
    fills: bool = False
    """Whether it fills the edit's mask."""
    problem: str = ""
    """Reason why it is not served; empty: it is."""


class ControlNets:
    """The ControlNets of `[controls] folder`; every look-up reads the disk."""

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        self._folder = Path(config.controls.folder) if config.controls.folder else None
        self._spec = spec
        self._known: dict[str, KnownControlNet] = {}

    def all(self) -> list[KnownControlNet]:
        """Return all ControlNets by name, those with a problem too."""
        if self._folder is None or not self._folder.is_dir():
            return []
        names = sorted(path.parent.name for path in self._folder.glob(f"*/{_CONFIG}"))
        return [self._describe(name) for name in names if ADAPTER_NAME.fullmatch(name)]

    def find(self, name: str, field: str) -> KnownControlNet:
        """Return the ControlNet of this name.

        Raises:
            AdapterNotFound: there is none.
            InvalidRequest: it is not served, or ControlNets are not.
        """
        if self._folder is None:
            raise InvalidRequest(field, "ControlNets are not served here", "no controls")
        if ADAPTER_NAME.fullmatch(name) is None or not (self._folder / name / _CONFIG).is_file():
            raise AdapterNotFound(f"{field}: there is no ControlNet {name}")
        net = self._describe(name)
        if net.problem:
            raise InvalidRequest(field, f"ControlNet {name} {net.problem}")
        return net

    def _describe(self, name: str) -> KnownControlNet:
        assert self._folder is not None
        path = self._folder / name
        try:
            version = version_of(path)
            net = self._known.get(name)
            if net is None or net.version != version:
                net = self._known[name] = self._read(KnownControlNet(name, path, version))
            return net
        except OSError as error:
            return KnownControlNet(
                name, path, "", problem=f"cannot be read: {error.strerror or error}"
            )

    def _read(self, plain: KnownControlNet) -> KnownControlNet:
        try:
            config = json.loads((plain.path / _CONFIG).read_text(encoding="utf-8"))
            check_config(config, self._spec)
            files = weight_files(plain.path).files
            if not files:
                raise ValueError("has no safetensors weights, and no others are read")
            numbers = sum(map(_numbers, files))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return plain._replace(problem=str(error))
        return plain._replace(
            nbytes=sum(file.stat().st_size for file in files),
            numbers=numbers,
            modes=int(config.get("num_mode") or 0),
            config=config,
            fills=self._spec.control is not None and self._spec.control.fills(config),
        )


def check_config(config: dict[str, Any], spec: ModelSpec) -> None:
    """Check that a ControlNet's config.json fits the served model.

    Raises:
        ValueError: it does not; a sentence whose subject is the net.
    """
    control_spec = spec.control
    if control_spec is None:
        raise ValueError("does not go with the served model, which takes no ControlNets")
    if config.get("_class_name") != control_spec.net:
        raise ValueError(
            f"is a {config.get('_class_name')}; the served model takes {control_spec.net}"
        )
    channels = spec.latent_channels * (spec.patch**2 if control_spec.patched else 1)
    base = {**spec.denoiser, "in_channels": channels}
    for key in ("in_channels", *control_spec.equal):
        is_said = config.get(key) is not None and key in base
        if is_said and _plain(config[key]) != _plain(base[key]):
            raise ValueError(
                f"is for another model: its {key} is {config[key]}, the served model's {base[key]}"
            )
    if problem := further_input(config, control_spec):
        raise ValueError(problem)


def further_input(config: Mapping[str, Any], control_spec: ControlNetSpec) -> str:
    """Return the sentence, whose subject is the net, about an input that is not served; empty: the
    net has none.
    """
    key = next((key for key in control_spec.without if config.get(key)), None)
    if control_spec.fills(config) and config[control_spec.mask] != MASK_NUMBERS:
        key = control_spec.mask
    return f"has {key} = {config[key]}, and nets with it are not served" if key else ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def version_of(path: Path) -> str:
    """Return the version of a ControlNet's folder (`KnownControlNet.version`).

    Raises:
        OSError: the folder is gone.
    """
    stats = [(file.name, file.stat()) for file in _files(path)]
    return _digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def content_of(path: Path) -> str:
    """Digest the bytes of a ControlNet's files, in 32 hexadecimal digits; hosts with copies get the
    same digest.

    Raises:
        OSError: a file cannot be read.
    """
    return _digest([(file.name, file_digest(path, file.name)) for file in _files(path)])


def _files(path: Path) -> list[Path]:
    return [path / _CONFIG, *sorted(path.glob("*.safetensors"))]


def _digest(content: object) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _numbers(file: Path) -> int:
    """Return the number of weights in a safetensors file.

    Raises:
        ValueError: the file is cut off, or no safetensors file.
    """
    try:
        return sum(prod(tensor.shape) for tensor in header_of(file).tensors.values())
    except BadHeader as error:
        raise ValueError(f"has a file {file.name} that {error}") from error
