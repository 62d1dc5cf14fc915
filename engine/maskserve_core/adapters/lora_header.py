"""What a LoRA file says of itself before any weight of it is read.

Files are safetensors only: other formats may run code when they are read.

    module.lora_A.weight   A, [rank, in] or [rank, in, k, k]      also lora_down, lora.down
    module.lora_B.weight   B, [out, rank] or [out, rank, 1, 1]    also lora_up, lora.up
    module.alpha           scalar: the update is B A · alpha / rank; without it B A
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maskserve_core.files import safetensors_header
from maskserve_core.files.safetensors_header import BadHeader, Header, TensorPlace, short

PARTS = ("denoiser", "text_encoder", "text_encoder_2")

_DTYPES = ("F16", "BF16", "F32")
_DOWN = re.compile(
    r"(?P<module>.+?)(\.lora_A(\.default)?|\.lora\.down|\.lora_down|\.lora_linear_layer\.down"
    r"|_lora\.down|(?<=_lora[12])\.down)\.weight"
)
_UP = re.compile(
    r"(?P<module>.+?)(\.lora_B(\.default)?|\.lora\.up|\.lora_up|\.lora_linear_layer\.up"
    r"|_lora\.up|(?<=_lora[12])\.up)\.weight"
)
_ROLES = {"down": _DOWN, "up": _UP, "alpha": re.compile(r"(?P<module>.+?)\.(alpha|lora_alpha)")}
# Other kinds of adapters, by what their tensors' names hold.
_OTHER_KINDS = {
    "DoRA": re.compile(r"dora_scale|lora_magnitude_vector"),
    "LoKr": re.compile(r"\.lokr_"),
    "LoHa": re.compile(r"\.hada_"),
    "OFT": re.compile(r"\.oft_|\.oft_blocks"),
    "GLoRA": re.compile(r"\.[ab][12]\.weight$"),
    "IA3": re.compile(r"\.on_input$"),
    "Tucker-decomposed LoRA": re.compile(r"\.lora_mid\."),
    "LoRA with biases": re.compile(r"\.(lora_[AB]|lora_down|lora_up|lora\.down|lora\.up)\.bias$"),
    "textual inversion": re.compile(r"emb_params|string_to_param|^bundle_emb"),
    "full difference of weights": re.compile(r"\.(diff|diff_b|set_weight)$"),
    "LoRA with norms": re.compile(r"norm\w*\.(scale|weight|bias)$|\.[wb]_norm$"),
}
_PREFIXES = (
    ("text_encoder_2", ("text_encoder_2.", "lora_te2_", "lora_te3_")),
    ("text_encoder", ("text_encoder.", "lora_te_", "lora_te1_")),
    (
        "denoiser",
        (
            "base_model.model.transformer.",
            "base_model.model.unet.",
            "base_model.model.",
            "transformer.",
            "unet.",
            "diffusion_model.",
            "lora_transformer_",
            "lora_unet_",
        ),
    ),
)


class BadAdapter(ValueError):
    """A file that is not served as an adapter; the text is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class LoraHeader:
    """The checked header of a LoRA file."""

    layers: Mapping[tuple[str, str], Layer]
    """By part (of PARTS) and the layer's name there, as the file spells it without its prefix."""
    names: Mapping[tuple[str, str], Names]
    tensors: Mapping[str, TensorPlace]
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest of its layers'."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that it changes."""
        changed = {part for part, _ in self.layers}
        return tuple(part for part in PARTS if part in changed)


class Names(NamedTuple):
    """Tensors of one layer's update; the alpha may be missing."""

    down: str = ""
    up: str = ""
    alpha: str = ""


class Layer(NamedTuple):
    """What an adapter adds to one layer."""

    rank: int
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    """Of a convolution: its sides; of a linear layer: ()."""


def read_tensors(read: Callable[[int, int], bytes], nbytes: int) -> Header:
    """Tensors and metadata of a file, in dtypes that are served.

    Args:
        read: gives the file's bytes [begin, end).
        nbytes: of the file.

    Raises:
        BadAdapter: it is no safetensors file, or cut short.
    """
    try:
        header = safetensors_header.read_header(read, nbytes)
    except BadHeader as error:
        raise BadAdapter(str(error)) from error
    for name, place in header.tensors.items():
        if place.dtype not in _DTYPES:
            raise BadAdapter(f"holds {short(name)} in {place.dtype}; served: {', '.join(_DTYPES)}")
    return header


def read_header(
    read: Callable[[int, int], bytes], nbytes: int, *, max_bytes: int, max_rank: int
) -> LoraHeader:
    """What a LoRA file changes, by its header alone.

    Args:
        read: gives the file's bytes [begin, end).
        nbytes: of the file.
        max_bytes: that it may have.
        max_rank: that its layers may have.

    Raises:
        BadAdapter: it cannot be served.
    """
    if nbytes > max_bytes:
        raise BadAdapter(f"is {nbytes} bytes long; at most {max_bytes} are served")
    tensors, metadata, _ = read_tensors(read, nbytes)
    _refuse_other_kinds(tensors, metadata)
    named = by_module(tensors)
    layers = {}
    for (part, module), names in named.items():
        layer = _layer(module, tensors[names.down].shape, tensors[names.up].shape)
        if layer.rank > max_rank:
            raise BadAdapter(f"has rank {layer.rank} in {short(module)}; at most {max_rank} served")
        if names.alpha and math.prod(tensors[names.alpha].shape) != 1:
            raise BadAdapter(f"holds an alpha for {short(module)} that is no single number")
        layers[part, module] = layer
    return LoraHeader(layers, named, tensors, nbytes, metadata)


def by_module(tensors: Iterable[str]) -> dict[tuple[str, str], Names]:
    """The tensors of each module that a LoRA file changes, by part and the module's name there.

    Raises:
        BadAdapter: a tensor is no part of a LoRA, or one is missing.
    """
    found: dict[str, Names] = {}
    for name in tensors:
        for role, form in _ROLES.items():
            match = form.fullmatch(name)
            if match is not None:
                module = match["module"]
                before = found.get(module, Names())
                if getattr(before, role):
                    raise BadAdapter(f"holds the matrices of {short(module)} twice")
                found[module] = before._replace(**{role: name})
                break
        else:
            raise BadAdapter(f"holds {short(name)}, which is no part of a LoRA")
    if not found:
        raise BadAdapter("holds no LoRA: no tensor is named like lora_A or lora_down")
    for module, names in found.items():
        if names.alpha and not names.down and not names.up:
            raise BadAdapter(f"holds an alpha for {short(module)}, and no matrices")
        if not names.down or not names.up:
            missing = "up" if names.down else "down"
            raise BadAdapter(f"is not whole: {short(module)} has no {missing} matrix")
    parts = {split_part(module): names for module, names in found.items()}
    if len(parts) != len(found):
        raise BadAdapter("holds the matrices of one layer twice, under two spellings")
    return parts


def split_part(module: str) -> tuple[str, str]:
    """The part (of PARTS) that a module of a LoRA file belongs to, and its name there."""
    for part, prefixes in _PREFIXES:
        for prefix in prefixes:
            if module.startswith(prefix):
                return part, module[len(prefix) :]
    return "denoiser", module


def check_values(data: npt.NDArray[np.uint8], tensors: Mapping[str, TensorPlace]) -> None:
    """Refuse weights that are no finite numbers.

    Args:
        data: [bytes of the file], such as a memory map.
        tensors: of its header.

    Raises:
        BadAdapter: naming the tensor.
    """
    for name, place in tensors.items():
        raw = data[place.begin : place.end]
        # A number is infinite or NaN if all bits of its exponent are set.
        if place.dtype == "F32":
            words, exponent = raw.view(np.uint32), 0x7F800000
        else:
            words = raw.view(np.uint16)
            exponent = 0x7C00 if place.dtype == "F16" else 0x7F80
        if bool(((words & exponent) == exponent).any()):
            raise BadAdapter(f"holds NaN or infinity in {short(name)}")


def _refuse_other_kinds(tensors: Mapping[str, TensorPlace], metadata: Mapping[str, str]) -> None:
    for kind, mark in _OTHER_KINDS.items():
        for name in tensors:
            if mark.search(name) is not None:
                raise BadAdapter(f"is of a kind that is not served: {kind} ({short(name)})")
    if re.search(r"use_dora\"?: ?true", metadata.get("lora_adapter_metadata", "")):
        raise BadAdapter("is of a kind that is not served: DoRA (its metadata says use_dora)")


def _layer(name: str, down: tuple[int, ...], up: tuple[int, ...]) -> Layer:
    """The update's form, if the matrices fit one another."""
    if len(down) != len(up) or len(down) not in (2, 4):
        raise BadAdapter(f"has matrices of other forms in {short(name)}: {down}, {up}")
    rank, inputs, *kernel = down
    outputs, inner, *sides = up
    if min(down) < 1 or min(up) < 1 or inner != rank or any(side != 1 for side in sides):
        raise BadAdapter(f"has matrices that do not fit in {short(name)}: {list(down)}, {list(up)}")
    return Layer(rank, inputs, outputs, tuple(kernel))
