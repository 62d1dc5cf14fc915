"""Plan of the layers of the served model that each tensor of a LoRA file changes, from the header
alone. `adapters check`, the catalogue and the loader follow the same plan. Diffusers' own loader is
the oracle: the plan also skips what it skips, and notes it. Tensors that it cannot read are served
if their meaning is plain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from maskserve_common.files.safetensors_header import short
from maskserve_lora.base_layers import BaseLayers, NamedLayers
from maskserve_lora.lora_header import (
    CONFIG_FILE,
    CONFIG_KEY,
    PARTS,
    BadAdapter,
    LoraHeader,
    Names,
    check_values,
    header_of_file,
)
from maskserve_lora.rotations import PeftKeys, Rotation

_DIFFUSERS_KEY = "lora_adapter_metadata"
_OTHER_WEIGHTS = ("pissa", "olora", "corda", "loftq")
"""Initialisations of a training that also change the base's weights."""
_NEEDED = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA with biases",
    "modules_to_save": "LoRA with whole layers (modules_to_save)",
    "layer_replication": "LoRA of a model with layers repeated (layer_replication)",
}
"""Keys of PEFT's configuration for adapters that are more than two factors."""


class LayerUpdate(NamedTuple):
    """The update of one layer: `scale` times the rows of B times A."""

    part: str
    """One of `lora_header.PARTS`."""
    layer: str
    """Dotted name in the served model."""
    names: Names
    scale: float | None
    """Scale given by the metadata. None: alpha over rank if there is an alpha, else 1."""
    rows: tuple[tuple[int, int], ...]
    """Row ranges [begin, end) of B, concatenated; none: all rows."""
    inputs: int
    """Input features of the layer, or of flat factors all numbers that an output sees. A may have
    fewer columns: the others are 0."""
    kernel: tuple[int, ...] = ()
    """[in, kh, kw] of a convolution whose factors are flat, or which an OFT rotates."""
    inner_rank: int = 0
    """As in `lora_header.Layer`."""
    rotation: Rotation | None = None
    """Shape of an OFT in the file, which a single update need not cover."""
    peft: PeftKeys = PeftKeys()
    """Keys of PEFT's configuration of an OFT."""


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Everything of a file that is served."""

    updates: tuple[LayerUpdate, ...]
    notes: tuple[str, ...]
    """One sentence for each sort of skipped tensor, and for each assumption."""
    zeros: tuple[str, ...]
    """Tensors that are left out if they are all zero; else the file is not served."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that it changes."""
        changed = {update.part for update in self.updates}
        return tuple(part for part in PARTS if part in changed)

    @property
    def tensors(self) -> set[str]:
        """Names of the tensors that are read."""
        return {name for update in self.updates for name in update.names.tensors}


def plan_of(header: LoraHeader, base: BaseLayers | None) -> LoraPlan:
    """Plan which tensors of a file change which layers.

    Args:
        header: header of the file.
        base: layers of the model; None: the fit is not checked.

    Raises:
        BadAdapter: it is for another model, or has unsupported content.
    """
    if base is None:
        return _unplaced(header)
    transformer, alphas = base.denoiser == "transformer", _Alphas(header)
    omitted: dict[str, list[str]] = {}
    targets: dict[tuple[str, str], NamedLayers] = {}
    unknown: dict[str, list[str]] = {}
    for (part, module), names in header.names.items():
        target = base.named_layers(part, module) if part in base.parts else None
        if target is not None:
            targets[part, module] = target
        else:
            has_part = part in base.parts
            fixed = part in base.fixed
            reason = _why_not(part, module, transformer=transformer, known=has_part, fixed=fixed)
            sort = omitted if reason else unknown
            sort.setdefault(reason or part, []).append(names.tensors[0])
    native_layers = {
        (part, candidate.layers[0])
        for (part, _), candidate in targets.items()
        if not candidate.published
    }
    updates: dict[tuple[str, str], LayerUpdate] = {}
    for (part, module), meaning in targets.items():
        if meaning.published and {(part, name) for name in meaning.layers} <= native_layers:
            omitted.setdefault("the same layers are there under another name", []).append(
                header.names[part, module].tensors[0]
            )
            continue
        base.check_layer(part, meaning, header.layers[part, module])
        for update in _updates(part, module, meaning, header, base, alphas):
            if (part, update.layer) in updates:
                raise BadAdapter(
                    f"holds the matrices of {short(update.layer)} twice, under two spellings"
                )
            updates[part, update.layer] = update
    if not updates:
        _refuse(unknown, omitted)
    for part, tensors in unknown.items():
        omitted[f"the served {part} has no such layer"] = tensors
    zeros = []
    for name, description in header.other_tensors.items():
        if transformer and _dropped(name, description):
            omitted.setdefault(f"{description}; diffusers drops them", []).append(name)
        else:
            omitted.setdefault(f"{description}, all zero", []).append(name)
            zeros.append(name)
    notes = [*_notes(omitted), *alphas.notes]
    return LoraPlan(tuple(updates.values()), tuple(notes), tuple(zeros))


def check_file(
    path: Path, base: BaseLayers | None, *, fused: bool = False, **bounds: int
) -> tuple[LoraHeader, LoraPlan]:
    """Check a file on this host to its last weight.

    Args:
        path: the LoRA file.
        base: layers of the model; None: the fit is not checked.
        fused: as in `read_header`.
        bounds: limits for `read_header`.

    Raises:
        BadAdapter: it would not be served.
        OSError: it cannot be read.
    """
    header = header_of_file(path, fused=fused, **bounds)
    plan = plan_of(header, base)
    data = np.memmap(path, np.uint8, mode="r")
    check_values(data, header.tensors, sorted(plan.tensors), plan.zeros)
    return header, plan


def _unplaced(header: LoraHeader) -> LoraPlan:
    """Plan for a model with unknown layers: nothing is placed."""
    updates = [
        LayerUpdate(part, module, names, None, (), header.layers[part, module].inputs)
        for (part, module), names in header.names.items()
    ]
    return LoraPlan(tuple(updates), (), ())


def _why_not(part: str, module: str, *, transformer: bool, known: bool, fixed: bool) -> str:
    """Return why diffusers skips a module that the served model lacks; empty: no special reason.

    Args:
        part: part of the module.
        module: name of the module in the file.
        transformer: whether the served denoiser is a transformer, not a UNet.
        known: whether adapters may change the part of the served model.
        fixed: whether the served model has the part, and diffusers applies no LoRA to it.
    """
    if part == "t5" or (part == "text_encoder_2" and transformer and not known):
        return "T5's; diffusers applies no LoRA to T5"
    if fixed:
        return f"diffusers applies no LoRA to the served model's {part}"
    if not known:
        return f"the served model has no {part}"
    if part != "denoiser" and ("text_projection" in module or "_embedding" in module):
        return "diffusers applies none to this part of the text encoder"
    if part == "denoiser" and transformer and "guidance" in module:
        return "the served model has no guidance embedding"
    return ""


def _dropped(name: str, reason: str) -> bool:
    """Return whether diffusers' loaders of transformers skip such a tensor."""
    return reason != "biases" and (reason != "differences of weights" or "norm" in name)


def _refuse(unknown: Mapping[str, list[str]], unmatched: Mapping[str, list[str]]) -> None:
    for part, [name, *_] in unknown.items():
        raise BadAdapter(
            f"is for another model: the served one's {part} has no layer {short(name)}"
        )
    raise BadAdapter(f"changes nothing that is served: it {'; '.join(_notes(unmatched))}")


def _notes(unmatched: Mapping[str, list[str]]) -> Iterator[str]:
    for reason, [name, *other_names] in unmatched.items():
        more = f" and {len(other_names)} more" if other_names else ""
        yield f"leaves out {short(name)}{more} ({reason})"


def _updates(
    part: str,
    module: str,
    layers: NamedLayers,
    header: LoraHeader,
    base: BaseLayers,
    alphas: _Alphas,
) -> Iterator[LayerUpdate]:
    names, layer = header.names[part, module], header.layers[part, module]
    end = 0
    for name in layers.layers:
        outputs, inputs, *_ = base.shape(part, name)
        begin, end = end, end + outputs
        rows: tuple[tuple[int, int], ...] = ()
        if layers.swapped:
            rows = (outputs // 2, outputs), (0, outputs // 2)
        elif len(layers.layers) > 1:
            rows = ((begin, end),)
        scale = alphas.scale(part, module, layer.alpha_rank, of_module=bool(names.alpha))
        inner = tuple(base.shape(part, name)[1:])
        if layer.flat:
            inputs = math.prod(inner)
        flat = layer.flat or layer.rotation is not None
        kernel = inner if flat and len(inner) > 1 else ()
        if layer.rotation is not None and layer.rotation.of_rows:
            rows = rows or ((0, outputs),)
            _check_rows(module, layer.rotation, rows)
        yield LayerUpdate(
            part,
            name,
            names,
            scale,
            rows,
            inputs,
            kernel,
            layer.inner_rank,
            layer.rotation,
            alphas.peft,
        )


def _check_rows(module: str, rotation: Rotation, rows: Iterable[tuple[int, int]]) -> None:
    try:
        for begin, end in rows:
            rotation.within(begin, end)
    except ValueError as error:
        raise BadAdapter(f"{error} in {short(module)}") from error


class _Alphas:
    """Return the alphas in a file's metadata, not in tensors.

    Diffusers writes `lora_adapter_metadata`: PEFT's configuration of each part, with a prefix.
    `adapter_config` is PEFT's own. `lora_alpha` and `ss_network_alpha` are settings of a trainer;
    they stay in the file even after a tool has multiplied the alpha into the matrices. So diffusers
    reads neither, and they are only noted.
    """

    def __init__(self, header: LoraHeader) -> None:
        metadata = header.metadata
        self._by_part = _decoded(metadata.get(_DIFFUSERS_KEY, ""))
        self._config = _decoded(metadata.get(CONFIG_KEY, ""))
        kind = self._config.get("peft_type", "LORA")
        self.peft = _peft_keys(self._config) if kind == "OFT" else PeftKeys()
        if kind in ("LOKR", "LOHA"):
            self._config = _as_lora(self._config)
        elif kind not in ("LORA", "OFT"):
            raise BadAdapter(f"is of a kind that is not served: {short(str(kind))}")
        dora = any(names.magnitude for names in header.names.values())
        for prefix in ("transformer.", "unet.", "text_encoder.", "text_encoder_2."):
            _check_config(self._by_part, prefix, dora=dora)
        _check_config(self._config, "", dora=dora)
        self.notes: list[str] = []
        self._known: dict[str, _Patterns] = {}
        if self._config or self._by_part:
            return
        bare = [
            key
            for key, names in header.names.items()
            if not names.alpha and not header.layers[key].rotation
        ]
        for key in ("lora_alpha", "ss_network_alpha"):
            text = metadata.get(key, "").removesuffix(".0")
            if bare and text not in ("", "None", "null", str(header.rank)):
                self.notes.append(
                    f"is taken at alpha = rank, as its tensors say: {key} in its metadata is "
                    f"{short(metadata[key])} and tells how it was trained"
                )
        if any(header.names[key].of_peft for key in bare):
            self.notes.append(
                f"is taken at alpha = rank: it is PEFT's file without its {CONFIG_FILE}, which "
                "says its alpha"
            )
        if any(names.of_peft and names.kind == "OFT" for names in header.names.values()):
            self.notes.append(
                f"is taken with PEFT's own settings: it is PEFT's file without its {CONFIG_FILE}, "
                "which says how its blocks become rotations"
            )

    def scale(self, part: str, module: str, rank: int, *, of_module: bool) -> float | None:
        """Return the factor of B A; None: the file gives none.

        Args:
            part: one of `lora_header.PARTS`.
            module: name of the module in the file.
            rank: rank of the module's matrices.
            of_module: whether a tensor gives the module's alpha.

        Raises:
            BadAdapter: the factor has another form, or is given twice.
        """
        prefixes = ("transformer.", "unet.") if part == "denoiser" else (f"{part}.",)
        for values, prefix in [
            *((self._by_part, part_prefix) for part_prefix in prefixes),
            (self._config, ""),
        ]:
            alpha = values.get(f"{prefix}lora_alpha")
            if alpha is None:
                continue
            if of_module:
                raise BadAdapter(f"says the alpha of {short(module)} twice")
            try:
                alpha = float(self._patterns(values, prefix).value(module, alpha))
            except BadAdapter:
                raise
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                raise BadAdapter(
                    f"has metadata about {prefix}lora_alpha of another form"
                ) from error
            if not math.isfinite(alpha):
                raise BadAdapter(f"has an alpha for {short(module)} that is not a finite number")
            rank = values.get("product_rank", rank)  # PEFT's, even where no matrix has factors
            rooted = values.get(f"{prefix}use_rslora")
            return alpha / (math.sqrt(rank) if rooted else rank)
        return None

    def _patterns(self, values: Mapping[str, Any], prefix: str) -> _Patterns:
        if (patterns := self._known.get(prefix)) is None:
            patterns = self._known[prefix] = _Patterns(values.get(f"{prefix}alpha_pattern") or {})
        return patterns


def _peft_keys(config: Mapping[str, Any]) -> PeftKeys:
    """Return the keys of PEFT's configuration of an OFT.

    Raises:
        BadAdapter: one has another form.
    """
    try:
        return msgspec.convert(config, PeftKeys)
    except msgspec.ValidationError as error:
        raise BadAdapter(f"has metadata about its OFT of another form: {error}") from error


def _as_lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's configuration of a LoKr or LoHa with LoRA's key of the alpha.

    Raises:
        BadAdapter: layers differ in rank or alpha.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise BadAdapter(f"is of a kind that is not served: {config['peft_type']} with {key}")
    alpha, rank = config.get("alpha"), config.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        raise BadAdapter("has metadata about alpha and r of another form")
    return {"lora_alpha": alpha, "product_rank": rank}


def _decoded(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict) if text else {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadAdapter("has metadata that cannot be read") from error


def _check_config(values: Mapping[str, Any], prefix: str, *, dora: bool) -> None:
    """Refuse what PEFT's configuration says an adapter is beyond its factors. Ranks are the
    tensors' own, and fan_in_fan_out means nothing to layers that are no Conv1D (PEFT's words).
    """
    for key, description in _NEEDED.items():
        if values.get(f"{prefix}{key}") and not (dora and key == "use_dora"):
            raise BadAdapter(
                f"is of a kind that is not served: {description} (its metadata say so)"
            )
    if values.get(f"{prefix}bias", "none") != "none":
        raise BadAdapter("is of a kind that is not served: LoRA with biases (bias in its metadata)")
    begun = str(values.get(f"{prefix}init_lora_weights", ""))
    if begun.lower().startswith(_OTHER_WEIGHTS):
        raise BadAdapter(
            f"changes the base's own weights (init_lora_weights is {short(begun)}), which is not "
            "served; save it as a plain LoRA"
        )


class _Patterns:
    """Return, by PEFT's rule, the value of the first pattern that the name ends with. PEFT takes
    regular expressions. Files have names; other patterns are refused, as matching may take for
    ever.
    """

    def __init__(self, patterns: Mapping[str, Any]) -> None:
        self._known: dict[str, tuple[int, Any]] = {}
        for order, (pattern, value) in enumerate(patterns.items()):
            name = pattern.removeprefix("^")
            if not name.replace(".", "").replace("_", "").isalnum():
                raise BadAdapter(
                    f"has a pattern in its metadata that is no layer's name: {short(name)}"
                )
            self._known.setdefault(pattern, (order, value))

    def value(self, module: str, otherwise: Any) -> Any:
        parts = module.split(".")
        ends = [f"^{module}", *(".".join(parts[n:]) for n in range(len(parts)))]
        matches = [self._known[end] for end in ends if end in self._known]
        return min(matches, key=lambda match: match[0])[1] if matches else otherwise
