"""Kinds of files that people have of models, by the names of their tensors, and the flag that takes
each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from maskserve_common.files.gguf_header import BadGguf, read_gguf
from maskserve_common.files.safetensors_header import BadHeader, header_of
from maskserve_engine.spec.ip_adapters import layout_of
from maskserve_lora.lora_header import is_adapter
from maskserve_serving.errors import ServeError

Kind = Literal["checkpoint", "adapter", "IP-Adapter", "ControlNet", "VAE", "text encoder"]

ENDS = (".safetensors", ".safetensors.index.json")
_GGUF = ".gguf"
_CONTROL = re.compile(
    r"(controlnet_(\w+_)?blocks|control_model|control_layers|control_noise_refiner|input_hint_block"
    r"|controlnet_x_embedder|controlnet_cond_embedding)\b.*"
)
_VAE = re.compile(
    r"(first_stage_model\.|vae\.)?(encoder|decoder|(post_)?quant_conv|conv[12]|bn)\..*"
)
_TEXT = re.compile(r".*(embed_tokens|token_embedding|text_projection|shared)(\.weight)?")
_DENOISER = re.compile(
    r"(model\.)?(diffusion_model\.)?(transformer\.)?((single_)?transformer_blocks|double_blocks"
    r"|joint_blocks|layers\.\d+\.attention\b|input_blocks|(down|up|mid)_blocks?|time_embed|x_embedder).*"
)
_USES = {
    "adapter": "an adapter; accepted: the model's folder, with --adapters and the folder of this "
    "file, or --fuse-lora {file}",
    "IP-Adapter": "an IP-Adapter; accepted: the model's folder, with the folder of this file as "
    "[ip_adapters] folder of the configuration",
    "ControlNet": "a ControlNet; accepted: the model's folder, with --controlnets and a folder of "
    "ControlNets in diffusers format",
    "VAE": "a VAE alone; accepted: a denoiser's file or folder, with --vae {file}",
    "text encoder": "a text encoder alone; accepted: a denoiser's file or folder, with "
    "--text-encoder {file}",
}


def kind_of(names: Collection[str]) -> Kind:
    """Return the kind of a file with tensors of these names; an unknown one is a checkpoint."""
    if layout_of(names) is not None:
        return "IP-Adapter"
    if is_adapter(names):
        return "adapter"
    if any(_CONTROL.match(name) for name in names):
        return "ControlNet"
    if any(_DENOISER.match(name) for name in names):
        return "checkpoint"
    if names and all(_VAE.match(name) for name in names):
        return "VAE"
    if any(_TEXT.match(name) for name in names):
        return "text encoder"
    return "checkpoint"


def names_of(file: Path) -> Collection[str]:
    """Return the names of a file's tensors; none for an index of several files.

    Raises:
        ServeError: it is damaged, or of another format.
    """
    try:
        if file.name.endswith(ENDS[1]):
            return ()
        if file.name.endswith(ENDS[0]):
            return header_of(file).tensors
        if file.suffix == _GGUF:
            with file.open("rb") as handle:
                return read_gguf(handle, os.fstat(handle.fileno()).st_size)
    except (BadHeader, BadGguf) as error:
        raise ServeError(f"--model: {file} {error}") from error
    except OSError as error:
        raise ServeError(f"--model: {file}: {error.strerror or error}") from error
    raise ServeError(
        f"--model: {file} is not a safetensors file; other formats are not read, as they may run "
        "code"
    )


def check_denoiser(file: Path) -> None:
    """Check that a file may have a denoiser.

    Raises:
        ServeError: it is damaged, or of another kind; the text names the flag that takes it.
    """
    kind = kind_of(names_of(file))
    if kind != "checkpoint":
        raise ServeError(f"--model: {file} is {_USES[kind].format(file=file)}")
