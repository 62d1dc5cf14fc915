"""A digest of the served weights, for the names of cached activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from maskserve_common.config import Config
from maskserve_common.config_file import read_json
from maskserve_common.files.digests import file_digest

_OF_STAGES = (
    "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2",
    "tokenizer_3", "processor",
)  # fmt: skip
_PARTS = ("transformer", "unet", "scheduler", *_OF_STAGES)


def stages_revision(config: Config) -> str:
    """Of encoder and decoder: models that have it give the same moments, embeddings and pixels. So
    a service has it of the worker that asks it.
    """
    model = config.model
    pipeline = read_json(Path(model.path) / "model_index.json").get("_class_name")
    how = f"{pipeline} {model.max_sequence_length} {' '.join(model.fuse_loras)} {model.variant}"
    return model_revision(model.path, how, _OF_STAGES)


def model_revision(folder: str | Path, form: str = "", parts: Sequence[str] = _PARTS) -> str:
    """32 hexadecimal digits over every byte of every part that shapes activations.

    Entries outlive a process, so two trainings must never share a name. Digests of files are kept
    beside them (`files.digests`): tens of gigabytes are read at the first start only.

    Args:
        folder: of the model.
        form: that the weights are brought to when they are loaded; empty: none.
        parts: folders in it.
    """
    folder, digest = Path(folder), xxhash.xxh3_128()
    for part in parts:
        for path in sorted(p for p in (folder / part).glob("*") if p.is_file()):
            name = f"{part}/{path.name}"
            digest.update(f"{name}:{path.stat().st_size}:{file_digest(folder, name)};".encode())
    if form:
        digest.update(f"weights:{form};".encode())
    return digest.hexdigest()
