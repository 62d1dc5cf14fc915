"""Reader of LoRA files' headers, before any weight is read.

Files are safetensors only: other formats may run code when they are read.

    module.lora_A.weight   A, [rank, in] or [rank, in, k, k]      also lora_down, lora.down
    module.lora_B.weight   B, [out, rank] or [out, rank, 1, 1]    also lora_up, lora.up
    module.lora_mid.weight a core, [rank, rank, k, k], with A of [rank, in, 1, 1] (Tucker)
    module.alpha           scalar: the update is B A · alpha / rank; without it B A

LoKr's and LoHa's matrices (`products`) take the places of A and B, as do an OFT's (`rotations`).
With `dora_scale`, or PEFT's `lora_magnitude_vector`, [out], the layer's rows get these lengths
after the update (DoRA).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from maskserve_common.files import safetensors_header
from maskserve_common.files.safetensors_header import (
    BadHeader,
    Header,
    TensorPlace,
    encode_header,
    reader_of,
    short,
)
from maskserve_lora.products import ROLES as PRODUCT_ROLES
from maskserve_lora.products import Kind, product_of
from maskserve_lora.rotations import COLUMNS, RESCALE, Rotation, rotation_of
from maskserve_lora.rotations import ROLES as ROTATION_ROLES

PEFT_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Files that PEFT's `save_pretrained` writes into a folder; only the second has alphas."""
CONFIG_KEY = "adapter_config"
"""Key of the second file in the metadata of an adapter on this host, where both are one file."""
MAX_CONFIG_BYTES = 2**20
MAX_TENSORS = 2**14
PARTS = ("denoiser", "text_encoder", "text_encoder_2")

ROLES: Mapping[str, Kind] = {**PRODUCT_ROLES, **dict.fromkeys(ROTATION_ROLES, "OFT")}
"""Names of the matrices of updates that are no LoRA, behind their layer's, and their kind."""
_EXPONENTS = {
    "F8_E4M3": ("u1", 0x7F),  # has no infinity, and one NaN of either sign
    "F8_E5M2": ("u1", 0x7C),
    "F16": ("u2", 0x7C00),
    "BF16": ("u2", 0x7F80),
    "F32": ("u4", 0x7F800000),
    "F64": ("u8", 0x7FF0000000000000),
}
_ENDS = {
    "down": (".lora_A", ".lora_down", ".lora.down", ".lora_linear_layer.down", "_lora.down"),
    "up": (".lora_B", ".lora_up", ".lora.up", ".lora_linear_layer.up", "_lora.up"),
    "core": (".lora_mid",),
    "alpha": (".alpha", ".lora_alpha"),
    "magnitude": (".dora_scale", ".lora_magnitude_vector"),
}
"""Name endings of an update's tensors, without `.weight`."""
_OTHER_TENSORS = {
    "biases": tuple([f"{end}.bias" for role in ("down", "up") for end in _ENDS[role]]),
    "differences of biases": (".diff_b",),
    "differences of weights": (".diff",),
}
"""Name endings of tensors of other kinds."""
_ONE_TRAINER = (".scaled_oft", ".clipped_oft", ".cans_oft", ".dora_log_multiplier")
"""Marks of OneTrainer's other forms of an OFT; `.oft_r` was PEFT's until 0.15."""
# Other kinds of adapters, by parts of their tensors' names, or after $ by their ends.
_OTHER_KINDS = {
    "LoKr with a core in its first side": (".lokr_t1",),
    "OFT of another form": (".oft_r", ".oft_embedding", ".boft_", *_ONE_TRAINER),
    "GLoRA": ("$.a1.weight", "$.a2.weight", "$.b1.weight", "$.b2.weight"),
    "IA3": ("$.on_input",),
    "new weights": ("$.set_weight",),
    "LoRA with norms": ("$.w_norm", "$.b_norm"),
}
_PREFIXES = (
    (
        "text_encoder_2",
        ("text_encoder_2.", "lora_te2_", "text_encoders.clip_g.transformer."),
    ),
    (
        "text_encoder",
        ("text_encoder.", "lora_te_", "lora_te1_", "text_encoders.clip_l.transformer."),
    ),
    ("t5", ("text_encoder_3.", "lora_te3_", "text_encoders.t5xxl.transformer.")),
    (
        "denoiser",
        (
            "base_model.model.transformer.",
            "base_model.model.unet.",
            "base_model.model.",
            "transformer.",
            "unet.",
            "model.diffusion_model.",
            "diffusion_model.",
            "lora_transformer_",
            "lora_unet__",
            "lora_unet_",
            "oft_unet_",
            "lycoris_",
        ),
    ),
)


class BadAdapter(ValueError):
    """A file that is not served as an adapter; the text is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class LoraHeader:
    """The checked header of a LoRA file."""

    layers: Mapping[tuple[str, str], Layer]
    """Layers by part (of PARTS) and by the layer's name there, as the file spells it without its
    prefix."""
    names: Mapping[tuple[str, str], Names]
    other_tensors: Mapping[str, str]
    """Kinds of the tensors that are no matrices of an update, by name."""
    tensors: Mapping[str, TensorPlace]
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def product_bytes(self) -> int:
        """Bytes of all factors in half precision, for a file with LoKr or LoHa; else 0: the file
        has them as they are.
        """
        if not any(layer.flat for layer in self.layers.values()):
            return 0
        return sum(2 * x.rank * (x.inputs + x.outputs) for x in self.layers.values())


class Names(NamedTuple):
    """Tensors of one layer's update; the alpha may be missing."""

    down: str = ""
    up: str = ""
    alpha: str = ""
    magnitude: str = ""
    """Lengths of the layer's rows (DoRA); empty: they are not set."""
    core: str = ""
    """Between down and up, the places of a convolution's kernel; empty: down has them."""
    matrices: tuple[tuple[str, str], ...] = ()
    """Names by role (`ROLES`) of the matrices of a LoKr, LoHa or OFT, in place of down and up."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names; the first is one of a matrix."""
        factors = (self.down, self.core, self.up)
        names = (*dict(self.matrices).values(), *factors, self.alpha, self.magnitude)
        return tuple(name for name in names if name)

    @property
    def of_peft(self) -> bool:
        """Whether they have the prefix of PEFT's files."""
        return self.tensors[0].startswith("base_model.model.")

    @property
    def kind(self) -> Kind:
        return ROLES[self.matrices[0][0]] if self.matrices else "LoRA"


class Layer(NamedTuple):
    """Shape of the update of one layer."""

    rank: int
    """Rank of its factors."""
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    """Sides of a convolution's kernel; () for a linear layer."""
    flat: bool = False
    """Whether `inputs` are those of a convolution, times the places of its kernel."""
    inner_rank: int = 0
    """Rank by which an alpha is divided; 0: by `rank`; -1: no alpha counts."""
    rotation: Rotation | None = None
    """Shape of an OFT; its rank is the side of its blocks, inputs and outputs are 0."""

    @property
    def alpha_rank(self) -> int:
        return self.inner_rank or self.rank


def is_adapter(tensors: Iterable[str]) -> bool:
    """Whether tensors of these names are a LoRA, or an adapter of another kind."""
    return any(
        _parts_of(name)[1] not in ("", "alpha", RESCALE) or _other_kind(name) for name in tensors
    )


def read_tensors(read: Callable[[int, int], bytes], nbytes: int) -> Header:
    """Read the header of a safetensors file (`safetensors_header.read_header`).

    Raises:
        BadAdapter: it is not a safetensors file, or cut short.
    """
    try:
        return safetensors_header.read_header(read, nbytes)
    except BadHeader as error:
        raise BadAdapter(str(error)) from error


def read_header(
    read: Callable[[int, int], bytes],
    nbytes: int,
    *,
    max_bytes: int = sys.maxsize,
    max_rank: int = sys.maxsize,
    config: bytes = b"",
    fused: bool = False,
) -> LoraHeader:
    """Read which layers a LoRA file changes, from its header alone.

    Args:
        read: gives the file's bytes [begin, end).
        nbytes: length of the file.
        max_bytes: largest file that is served.
        max_rank: largest rank of a layer that is served.
        config: PEFT's adapter_config.json, where one lies beside the file.
        fused: whether it is fused into the weights: then it may be a DoRA or an OFT, which depend
            on them.

    Raises:
        BadAdapter: it cannot be served.
    """
    if nbytes > max_bytes:
        raise BadAdapter(f"is {nbytes} bytes long; at most {max_bytes} are served")
    tensors, metadata, _ = read_tensors(read, nbytes)
    if len(tensors) > MAX_TENSORS:
        raise BadAdapter(f"holds {len(tensors)} tensors; at most {MAX_TENSORS} are served")
    if config:
        metadata[CONFIG_KEY] = config.decode("utf-8", "replace")
    _refuse_other_kinds(tensors)
    named, other_tensors = by_module(tensors)
    layers = {}
    for (part, module), names in named.items():
        layer = _layer(module, names, tensors)
        if (names.magnitude or layer.rotation) and not fused:
            raise BadAdapter(
                f"is {'an OFT' if layer.rotation else 'a DoRA'} ({short(module)}), which depends "
                "on the model's own weights; accepted: --fuse-lora, for all edits of a worker"
            )
        if layer.rank > max_rank:
            raise BadAdapter(
                f"has rank {layer.rank} in {short(module)}; at most {max_rank} served, and any if "
                "it is fused (--fuse-lora)"
            )
        for name in names.tensors:
            if name != names.alpha and tensors[name].dtype not in _EXPONENTS:
                raise BadAdapter(
                    f"holds {short(name)} in {tensors[name].dtype}; served: {', '.join(_EXPONENTS)}"
                )
        if names.magnitude:
            _check_magnitude(module, layer, tensors[names.magnitude].shape)
        if names.alpha and math.prod(tensors[names.alpha].shape) != 1:
            raise BadAdapter(f"holds an alpha for {short(module)} that is not a single number")
        layers[part, module] = layer
    return LoraHeader(layers, named, other_tensors, tensors, nbytes, metadata)


def _check_magnitude(module: str, layer: Layer, shape: tuple[int, ...]) -> None:
    if math.prod(shape) != layer.outputs or shape[0] != layer.outputs:
        raise BadAdapter(
            f"has a magnitude of shape {list(shape)} in {short(module)}; expected: one number for "
            f"each of {layer.outputs} rows"
        )


def header_of_file(path: Path, *, fused: bool = False, **bounds: int) -> LoraHeader:
    """Read the header of a file on this host, with PEFT's configuration if it lies beside it.

    Raises:
        BadAdapter: as `read_header`.
        OSError: it cannot be read.
    """
    config = config_of(path)
    with path.open("rb") as handle:
        nbytes = os.fstat(handle.fileno()).st_size
        return read_header(reader_of(handle), nbytes, config=config, fused=fused, **bounds)


def config_of(path: Path) -> bytes:
    """Return PEFT's adapter_config.json beside its file; empty: there is none.

    Raises:
        BadAdapter: it is too long.
        OSError: it cannot be read.
    """
    config_path = path.with_name(CONFIG_FILE)
    if path.name != PEFT_FILE or not config_path.is_file():
        return b""
    with config_path.open("rb") as handle:
        config = handle.read(MAX_CONFIG_BYTES + 1)
    if len(config) > MAX_CONFIG_BYTES:
        raise BadAdapter(f"has an {CONFIG_FILE} of more than {MAX_CONFIG_BYTES} bytes")
    return config


def with_config(header: Header, config: bytes) -> bytes:
    """Return the bytes before the tensors of a file whose metadata hold PEFT's adapter_config.json.

    Args:
        header: header of the file as it is.
        config: content of adapter_config.json.
    """
    metadata = {**header.metadata, CONFIG_KEY: config.decode("utf-8", "replace")}
    placed = sorted(header.tensors.items(), key=lambda item: item[1][2:])
    tensors = {name: (place.dtype, place.shape, place.nbytes) for name, place in placed}
    return encode_header(tensors, metadata)


def by_module(tensors: Iterable[str]) -> tuple[dict[tuple[str, str], Names], dict[str, str]]:
    """Divide a LoRA file's tensors by the module that they change.

    Returns:
        Names of an update's tensors, by part and the module's name there; and kinds of the tensors
        that are no matrices of an update, by name.

    Raises:
        BadAdapter: there are no matrices, or one of a pair is missing.
    """
    names_by_module: dict[str, Names] = {}
    other_tensors: dict[str, str] = {}
    for name in tensors:
        module, role = _parts_of(name)
        if not role:
            other_tensors[name] = _kind_of(name)
            continue
        previous = names_by_module.get(module, Names())
        if role in ROLES:
            if previous.matrices and previous.kind != ROLES[role]:
                kinds = " and ".join(sorted((previous.kind, ROLES[role])))
                raise BadAdapter(f"is both {kinds} in {short(module)}")
            changes: dict[str, Any] = {"matrices": (*previous.matrices, (role, name))}
        else:
            changes = {role: name}
            if getattr(previous, role):
                raise BadAdapter(f"holds the matrices of {short(module)} twice")
        names_by_module[module] = previous._replace(**changes)
    for module, names in list(names_by_module.items()):
        factors = names.down or names.core or names.up
        if names.matrices and not factors:
            continue
        if names.alpha and not factors and not names.matrices:
            other_tensors[names.alpha] = "an alpha without matrices"
            del names_by_module[module]
        elif names.matrices:
            raise BadAdapter(f"is both LoRA and {names.kind} in {short(module)}")
        elif not names.down or not names.up:
            missing = "up" if names.down else "down"
            raise BadAdapter(f"is not whole: {short(module)} has no {missing} matrix")
    if not names_by_module:
        raise BadAdapter("holds no LoRA: no tensor is named like lora_A or lora_down")
    parts = {split_part(module): names for module, names in names_by_module.items()}
    if len(parts) != len(names_by_module):
        raise BadAdapter("holds the matrices of one layer twice, under two spellings")
    return parts, other_tensors


def _parts_of(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and role (of `Names`); an empty role: it is no part of an
    update.
    """
    stem = name.removesuffix(".weight")
    for role in ROLES:
        if stem.endswith(f".{role}"):
            return stem[: -len(role) - 1], role
    for role, ends in _ENDS.items():
        for end in ends:
            if stem.endswith(end) and len(stem) > len(end):
                return stem[: -len(end)], role
    module, _, last = stem.rpartition(".")
    if last in ("down", "up") and module.endswith(("_lora1", "_lora2")):  # x-flux: image and text
        return module, last
    if stem != name and module.endswith((".lora_A", ".lora_B")):  # PEFT's, with its own name
        return module[: -len(".lora_A")], "down" if module.endswith("A") else "up"
    return name, ""


def _kind_of(name: str) -> str:
    for description, mark in _OTHER_TENSORS.items():
        if name.endswith(mark):
            return description
    return "no part of a LoRA"


def split_part(module: str) -> tuple[str, str]:
    """The part (of PARTS) that a module of a LoRA file belongs to, and its name there."""
    for part, prefixes in _PREFIXES:
        for prefix in prefixes:
            if module.startswith(prefix):
                return part, module[len(prefix) :]
    return "denoiser", module


def check_values(
    data: npt.NDArray[np.uint8],
    tensors: Mapping[str, TensorPlace],
    numbers: Iterable[str],
    zeros: Iterable[str] = (),
) -> None:
    """Refuse weights that are no finite numbers.

    Args:
        data: [bytes of the file], such as a memory map.
        tensors: tensors of its header.
        numbers: tensors that are used.
        zeros: tensors that are skipped because they change nothing.

    Raises:
        BadAdapter: naming the tensor.
    """
    for name in numbers:
        place = tensors[name]
        if place.dtype not in _EXPONENTS:
            continue  # an alpha in integers
        word, exponent = _EXPONENTS[place.dtype]
        words = np.frombuffer(data[place.begin : place.end], word)  # not aligned
        if bool(((words & exponent) == exponent).any()):
            raise BadAdapter(f"holds NaN or infinity in {short(name)}")
    for name in zeros:
        place = tensors[name]
        raw: npt.NDArray[Any] = data[place.begin : place.end]
        if place.dtype in _EXPONENTS:  # without the sign: -0 is zero, too
            raw = np.frombuffer(raw, _EXPONENTS[place.dtype][0]) << 1
        if bool(raw.any()):
            raise BadAdapter(f"holds {short(name)}, which is not served unless it is all zero")


def _refuse_other_kinds(tensors: Iterable[str]) -> None:
    for name in tensors:
        kind = _other_kind(name)
        module, _, last = name.rpartition(".")
        if last in ("scale", "weight", "bias") and "norm" in module.rpartition(".")[2]:
            kind = "LoRA with norms"
        if kind:
            raise BadAdapter(f"is of a kind that is not served: {kind} ({short(name)})")


def _other_kind(name: str) -> str:
    return next((kind for kind, marks in _OTHER_KINDS.items() if _has(name, marks)), "")


def _has(name: str, marks: Iterable[str]) -> bool:
    return any(name.endswith(mark[1:]) if mark[0] == "$" else mark in name for mark in marks)


def _layer(module: str, names: Names, tensors: Mapping[str, TensorPlace]) -> Layer:
    """Return the shape of the update, after checking that the matrices fit each other."""
    if names.matrices:
        shapes = {role: tensors[name].shape for role, name in names.matrices}
        try:
            if names.kind == "OFT":
                rotation = rotation_of(shapes)
                if names.magnitude or (COLUMNS in shapes and names.alpha):
                    raise ValueError("has an OFT together with a DoRA or an alpha")
                return Layer(rotation.side, 0, 0, (), rotation=rotation)
            product = product_of(names.kind, shapes)
        except ValueError as error:
            raise BadAdapter(f"{error} in {short(module)}") from error
        return Layer(
            product.rank, product.inputs, product.outputs, (), flat=True,
            inner_rank=product.inner_rank or -1,
        )  # fmt: skip
    down, up = tensors[names.down].shape, tensors[names.up].shape
    if len(down) != len(up) or len(down) not in (2, 4):
        raise BadAdapter(f"has matrices of other forms in {short(module)}: {down}, {up}")
    rank, inputs, *kernel = down
    outputs, inner, *sides = up
    if names.core:
        core = tensors[names.core].shape
        if len(core) != 4 or kernel != [1, 1] or core[1] != rank or min(core) < 1:
            raise BadAdapter(
                f"has a core that does not fit in {short(module)}: {list(down)}, {list(core)}"
            )
        rank, _, *kernel = core
    if min(down) < 1 or min(up) < 1 or inner != rank or any(side != 1 for side in sides):
        raise BadAdapter(
            f"has matrices that do not fit in {short(module)}: {list(down)}, {list(up)}"
        )
    return Layer(rank, inputs, outputs, tuple(kernel))
