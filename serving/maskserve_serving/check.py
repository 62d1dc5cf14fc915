"""`maskserve check`: the kind of a folder, file or hub id, and whether and how it can be served.

It reads configs and headers, never weights. Problems are the sentences with which `maskserve serve`
refuses the same model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from maskserve_common.config import AdaptersConfig, ConfigError
from maskserve_common.files.safetensors_header import BadHeader, header_of
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.checkpoints.request import Card, CheckpointRequest
from maskserve_engine.families.licences import published_licence
from maskserve_engine.families.specs import FAMILIES, load_spec
from maskserve_engine.spec.control_nets import check_config
from maskserve_engine.spec.ip_adapters import (
    LAYOUTS,
    accepted_forms,
    form_of,
    image_encoder_of,
    layout_of,
    problem_of,
    shapes_of,
    text_width_of,
)
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.spec.model_spec import IpLayout, ModelSpec
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter, header_of_file
from maskserve_lora.lora_plan import plan_of
from maskserve_lora.storage import FOLDER_FILES
from maskserve_serving.checkpoint import CheckpointParts, report_of
from maskserve_serving.errors import ServeError
from maskserve_serving.file_kind import ENDS, check_denoiser, kind_of, names_of
from maskserve_serving.source import (
    checkpoint_request,
    from_hub,
    parts_without_weights,
    resolve_model,
)

_SHAPES = ["*.json", "README.md"]
"""Files of a hub model that say its shapes and its licence."""
_CONFIG = "config.json"
_LICENCES = ("modelspec.license", "license", "general.license")
"""Keys of a file's metadata that name its licence."""
_LAYERS = {
    r"(double|single)_blocks|single_transformer_blocks": "FLUX.1, FLUX.2, Chroma or LongCat-Image",
    r"img_(mlp|mod)": "Qwen-Image models",
    r"attention(?!s)": "Z-Image",
    r"joint_blocks": "Stable Diffusion 3.5",
    r"(down|up|input|output)_blocks|mid(dle)?_block": "SDXL or SD 2.1",
}
"""Parts of layers' names that only these models have."""
_PROMPTS = {768: "SD 1.5", 1024: "SD 2.1", 2048: "SDXL", 4096: "FLUX.1"}
"""Models by the width of their prompts."""
_HALF = 2
"""Bytes of a number in half precision."""
_IMAGE_ENCODERS: Mapping[IpLayout, str] = {
    "h94": "ViT-H 1.2 GiB, ViT-bigG 3.4 GiB",
    "xlabs": "ViT-L 0.6 GiB",
}
"""Published image encoders in half precision."""


class Check(msgspec.Struct, kw_only=True):
    """Everything that `maskserve check` says of a model, a file, an adapter, an IP-Adapter or a
    ControlNet.
    """

    name: str
    it: str
    """Its kind and family, in words."""
    form: str = ""
    """Form of the numbers of most of its bytes."""
    bytes: dict[str, int] = {}
    """Bytes by part."""
    jobs: list[str] = []
    """Kinds of edits that it serves."""
    missing: list[str] = []
    """Sentences about what is missing, with the flags that give it."""
    problem: str = ""
    """Reason why it is not served."""
    adapters: str = ""
    controlnets: str = ""
    ip_adapters: str = ""
    licence: str = ""
    notes: list[str] = []
    cards: list[Card] = []
    """Rows and templates by card."""

    @property
    def served(self) -> bool:
        return not self.problem and not self.missing


def checked(model: str, parts: CheckpointParts) -> Check:
    """Return what a folder, a file or a hub id is.

    Args:
        model: as `--model`, or an adapter, IP-Adapter or ControlNet.
        parts: what stands beside a checkpoint file; its base is also the model of an adapter, an
            IP-Adapter or a ControlNet.
    """
    path = Path(model).expanduser()
    check = Check(name=model, it="unknown")
    try:
        if path.is_file():
            _check_file(path, parts, check)
        elif any((path / name).is_file() for name in FOLDER_FILES):
            file = next(path / name for name in FOLDER_FILES if (path / name).is_file())
            _check_adapter(file, parts, check)
        elif (path / _CONFIG).is_file():
            _check_net(path, parts, check)
        else:
            _check_folder(model, check)
    except ServeError as error:
        check.problem = str(error)
    except ConfigError as error:
        check.problem = f"--model: {str(error).removeprefix('[model] path: ')}"
    return check


def _check_folder(model: str, check: Check) -> None:
    folder = resolve_model(model, files=_SHAPES)
    _describe(folder, check, "a folder in diffusers format")
    for name in read_model_index(folder):
        files = weight_files(folder / name).files if (folder / name).is_dir() else ()
        if files:
            check.bytes[name] = sum(file.stat().st_size for file in files)
            if name in ("transformer", "unet"):
                check.form = _form(files[0])
    if Path(model).expanduser().is_dir():
        check.missing = parts_without_weights(folder)
    check.cards = list(report_of(CheckpointRequest("", str(folder))).cards)


def _describe(folder: Path, check: Check, words: str) -> None:
    """Say what the spec of a model folder says."""
    spec, index = load_spec(folder), read_model_index(folder)
    pipeline = str(index["_class_name"])
    check.it = f"{pipeline} (of {FAMILIES[spec.family].NAME}), {words}"
    check.jobs = sorted(spec.edit_kinds, key=("inpaint", "edit", "generate").index)
    parts = [name for name in index if name in ("transformer", "unet")]
    parts += [name for name, value in index.items() if _is_clip(name, value)]
    check.adapters = f"LoRAs; they may change {', '.join(parts)}"
    check.controlnets = spec.control.net if spec.control else "none"
    check.ip_adapters = _ip_adapters_of(spec)
    published = published_licence(spec.family, pipeline)
    check.licence = _of_readme(folder) or (
        f"{published} (its publisher's; the folder has none)" if published else ""
    )


def _ip_adapters_of(spec: ModelSpec) -> str:
    takes = spec.ip_adapters
    if takes is None:
        return "none"
    return (
        f"{' and '.join(LAYOUTS[takes.layout].forms)}, in [ip_adapters] folder; a file's layers "
        f"take {_size(_HALF * takes.numbers)} beside the image encoder "
        f"({_IMAGE_ENCODERS[takes.layout]})"
    )


def _is_clip(name: str, value: Any) -> bool:
    return name.startswith("text_encoder") and isinstance(value, list) and "CLIP" in str(value[-1])


def _check_file(file: Path, parts: CheckpointParts, check: Check) -> None:
    kind = kind_of(names_of(file))
    if kind in ("adapter", "IP-Adapter"):
        (_check_adapter if kind == "adapter" else _check_ip_adapter)(file, parts, check)
        return
    check.it, check.bytes = kind, {"file": file.stat().st_size}
    check.licence = _of_metadata(file)
    check_denoiser(file)
    is_hub = bool(parts.base) and not Path(parts.base).expanduser().is_dir()
    request = CheckpointRequest(str(file.absolute()))
    if parts.base:
        base = resolve_model(parts.base, files=_SHAPES)
        _describe(base, check, "a checkpoint file")
        check.licence = _of_metadata(file) or check.licence
        request = checkpoint_request(file, base, parts, _SHAPES, from_hub)
    report = report_of(request)
    assert report.description is not None
    about = report.description
    check.form, check.bytes, check.cards = about.form, {"file": about.nbytes}, list(report.cards)
    inside = ["VAE"] * about.vae + [f"{about.text_encoders} text encoders"] * bool(
        about.text_encoders
    )
    check.notes = [f"the file has: {', '.join(['denoiser', *inside])}"]
    if not parts.base:
        check.it = f"{about.cls or 'denoiser of several models'}, a checkpoint file"
        usual = f"; serve takes that of {about.base} from the hub" if about.base else ""
        check.missing = [
            f"--base: the folder or hub id of its model in diffusers format{usual}; with it, check "
            "says jobs and memory"
        ]
    elif not is_hub:  # the hub has the weights
        check.missing = list(report.missing)


def _check_adapter(file: Path, parts: CheckpointParts, check: Check) -> None:
    check.it, check.bytes = "an adapter", {"file": file.stat().st_size}
    check.licence = _of_metadata(file)
    limits = AdaptersConfig()
    try:
        header = header_of_file(file, max_bytes=limits.max_bytes, max_rank=limits.max_rank)
        models = _models_of(name for _, name in header.layers)
        check.it = f"a LoRA of rank {header.rank}, {len(header.layers)} layers{models}"
        check.form = max(header.tensors.values(), key=lambda place: place.nbytes).dtype.lower()
        base = BaseLayers.of_folder(resolve_model(parts.base)) if parts.base else None
        plan = plan_of(header, base)
    except BadAdapter as error:
        check.problem = f"{file} {error}"
        return
    except OSError as error:
        check.problem = f"{file}: {error.strerror or error}"
        return
    check.adapters = f"changes {', '.join(plan.parts)}; --adapters DIR, or --fuse-lora {file}"
    check.notes = list(plan.notes)
    if base is None:
        check.notes.append("--base MODEL also checks that it fits this model")


def _models_of(names: Iterator[str]) -> str:
    models = {
        next((model for part, model in _LAYERS.items() if re.search(part, name)), "")
        for name in names
    } - {""}
    return f", by its names for {' or '.join(sorted(models))}" if len(models) == 1 else ""


def _check_ip_adapter(file: Path, parts: CheckpointParts, check: Check) -> None:
    shapes, check.bytes = shapes_of(file), {"file": file.stat().st_size}
    check.licence, check.form = _of_metadata(file), _form(file)
    encoder, text = image_encoder_of(shapes), text_width_of(shapes)
    models = f", for {_PROMPTS[text]} by the width of its prompts" if text in _PROMPTS else ""
    form, layout = form_of(shapes), layout_of(shapes)
    check.it = f"an IP-Adapter of the form {form}{models}"
    if layout is not None and form not in layout.forms:
        check.problem = f"{file} has the form {form}, which is not served; {accepted_forms(layout)}"
        return
    width = (
        f"hidden states of width {encoder.hidden}"
        if encoder.hidden
        else f"an output of width {encoder.projected}"
    )
    check.ip_adapters = (
        f"[ip_adapters] folder is {file.parent}, whose image_encoder is a "
        f"CLIPVisionModelWithProjection with {width}"
    )
    if not parts.base:
        check.notes = ["--base MODEL also checks that it fits this model"]
    elif problem := problem_of(shapes, load_spec(resolve_model(parts.base, files=_SHAPES))):
        check.problem = f"{file} {problem}"


def _check_net(folder: Path, parts: CheckpointParts, check: Check) -> None:
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        cls = str(config.get("_class_name"))
    except (OSError, ValueError, AttributeError) as error:
        raise ServeError(f"{folder / _CONFIG} cannot be read: {error}") from error
    files = weight_files(folder).files
    check.it, check.controlnets = f"{cls}, a folder of one model", f"--controlnets {folder.parent}"
    check.bytes = {"weights": sum(file.stat().st_size for file in files)} if files else {}
    check.form = _form(files[0]) if files else ""
    check.licence = _of_readme(folder)
    if "ControlNet" not in cls:
        raise ServeError(
            f"--model: {folder} is one part of a model ({cls}); accepted: the whole folder, which "
            "has a model_index.json"
        )
    if not files:
        check.missing = [f"{folder} has no safetensors weights, and no others are read"]
    if not parts.base:
        check.notes = ["--base MODEL also checks that it fits this model"]
        return
    try:
        check_config(config, load_spec(resolve_model(parts.base, files=_SHAPES)))
    except ConfigError:
        raise
    except ValueError as error:
        raise ServeError(f"{folder} {error}") from error


def _form(file: Path) -> str:
    """Return the dtype of most bytes of a file."""
    counts: dict[str, int] = {}
    try:
        for place in header_of(file).tensors.values():
            counts[place.dtype] = counts.get(place.dtype, 0) + place.nbytes
    except BadHeader as error:
        raise ServeError(f"--model: {file} {error}") from error
    return max(counts, key=counts.__getitem__, default="").lower()


def _of_readme(folder: Path) -> str:
    """Return the licence that the front matter of a folder's README.md names."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8")[: 2**16].splitlines()
    except (OSError, ValueError):
        return ""
    values = {}
    for line in lines[1:] if lines[:1] == ["---"] else ():
        if line == "---":
            break
        key, _, value = line.partition(":")
        values[key] = value.strip().strip("\"'")
    name = values.get("license_name") or values.get("license", "")
    return f"{name} (by its README.md)" if name else ""


def _of_metadata(file: Path) -> str:
    if not file.name.endswith(ENDS[0]):
        return ""
    try:
        metadata = header_of(file).metadata
    except BadHeader as error:
        raise ServeError(f"--model: {file} {error}") from error
    name = next((metadata[key] for key in _LICENCES if metadata.get(key)), "")
    return f"{name[:200]} (by the file's metadata)" if name else ""


def lines_of(check: Check) -> Iterator[tuple[str, str]]:
    """Yield the rows of a check's table: a name, and what is said of it."""
    yield "it is", check.it
    if check.form:
        yield "form", check.form
    if check.bytes:
        sizes = ", ".join(f"{part} {_size(count)}" for part, count in check.bytes.items())
        yield "size", sizes
    if check.jobs:
        yield "jobs", ", ".join(check.jobs)
    for key in ("adapters", "controlnets", "ip_adapters", "licence"):
        if value := getattr(check, key):
            yield key.replace("ip_adapters", "IP-Adapters"), value
    for card in check.cards:
        rows = f"{card.weights}: {card.rows} rows and {card.templates} templates"
        with_settings = f", with {card.settings}" if card.settings else ""
        short = f"{card.weights}: {_size(card.missing)} are missing"
        yield f"{card.gigabytes} GB", short if card.missing else rows + with_settings
    for note in check.notes:
        yield "note", note
    for sentence in check.missing:
        yield "missing", sentence
    yield "served", "yes" if check.served else f"no: {check.problem or 'parts are missing'}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"


def print_check(model: str, parts: CheckpointParts, *, as_json: bool) -> int:
    """Print what a model is; return 0 if it is served as named, 2 if not."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    check = checked(model, parts)
    if as_json:
        values = msgspec.to_builtins(check)
        print(json.dumps({**values, "served": check.served}))
    else:
        rows = list(lines_of(check))
        width = max(len(name) for name, _ in rows)
        print(f"{check.name}")
        for name, value in rows:
            print(f"  {name:{width}}  {value}")
    return 0 if check.served else 2
