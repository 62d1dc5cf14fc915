"""A digest of the served weights, for the names of cached activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from maskserve_common.config import Config
from maskserve_common.files.digests import file_digest
from maskserve_engine.spec.fused_loras import FusedLora, fused_loras
from maskserve_engine.spec.model_index import read_model_index

_STAGE_PARTS = (
    "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2",
    "tokenizer_3", "processor", "text_processor",
)  # fmt: skip
_PARTS = ("transformer", "unet", "scheduler", *_STAGE_PARTS)


def stages_revision(config: Config) -> str:
    """Return the revision of encoder and decoder; equal revisions give the same moments, embeddings
    and pixels. A stage service compares it with that of its workers. An IP-Adapter's file may come
    later, so edits name its digest themselves (`ResolvedIpAdapter.content`).
    """
    model = config.model
    pipeline = read_model_index(Path(model.path)).get("_class_name")
    fused = " ".join(_content(lora) for lora in fused_loras(config))
    form = f"{pipeline} {model.max_sequence_length} {fused} {model.variant}"
    if config.ip_adapters.folder:
        images = config.ip_adapters.encoder_folder.absolute()
        form += f" {model_revision(images.parent, parts=(images.name,))}"
    return model_revision(model.path, form, _STAGE_PARTS)


def _content(lora: FusedLora) -> str:
    """Return the digest and scale of a fused LoRA; only its name if it cannot be read, which the
    part that fuses it says.
    """
    path, scale = lora.path.absolute(), lora.scale
    try:
        if path.is_dir():
            return f"{model_revision(path.parent, parts=(path.name,))} {scale!r}"
        return f"{file_digest(path.parent, path.name)} {scale!r}"
    except OSError:
        return str(path)


def model_revision(folder: str | Path, form: str = "", parts: Sequence[str] = _PARTS) -> str:
    """Return 32 hexadecimal digits over every byte of every part that shapes activations.

    Entries outlive a process, so two trainings must never share a name. File digests are stored
    beside the files (`files.digests`): tens of gigabytes are read at the first start only.

    Args:
        folder: folder of the model.
        form: form to which weights are converted on loading; empty: none.
        parts: subfolders to include.
    """
    folder, digest = Path(folder), xxhash.xxh3_128()
    for part in parts:
        for path in sorted(p for p in (folder / part).glob("*") if p.is_file()):
            name = f"{part}/{path.name}"
            digest.update(f"{name}:{path.stat().st_size}:{file_digest(folder, name)};".encode())
    if form:
        digest.update(f"weights:{form};".encode())
    return digest.hexdigest()
