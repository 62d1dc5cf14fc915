"""A model folder with random weights, of the widths that a folder of shapes names.

No weights travel to a machine without a network: it draws them, in bfloat16 on a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

_STD = 0.02
_SHARD = 4 * 2**30
"""Bytes of a file of weights."""
_LIBRARY_FILE = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_DONE = "maskserve.toml"
"""The file that is written last: a folder without it is incomplete."""


def write_random_model(
    shapes: Path, words: Path, folder: Path, settings: dict[str, Any], device: torch.device
) -> dict[str, float]:
    """Write the folder, and return the GiB of each part. A complete folder stays as it is.

    Args:
        shapes: folder whose config.json files have the widths.
        words: model folder with the tokenizers.
        folder: folder to write.
        settings: table `[model]` of its maskserve.toml.
        device: where the weights are drawn; equal seeds give equal weights on one kind of device.
    """
    if (folder / _DONE).is_file():
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    index = json.loads((shapes / "model_index.json").read_text(encoding="utf-8"))
    generator, sizes = torch.Generator(device).manual_seed(0), dict[str, float]()
    for part, class_path in index.items():
        if (
            not isinstance(class_path, list)
            or class_path[0] is None
            or part.startswith("tokenizer")
        ):
            continue
        if part == "scheduler":
            shutil.copytree(shapes / part, folder / part, dirs_exist_ok=True)
            continue
        (folder / part).mkdir(exist_ok=True)
        shutil.copy(shapes / part / "config.json", folder / part / "config.json")
        model = _draw_weights(
            _make_empty(class_path[0], class_path[1], folder / part), device, generator
        )
        sizes[part] = round(_save(model, folder / part / _LIBRARY_FILE[class_path[0]]) / 2**30, 3)
        del model
    words_index = json.loads((words / "model_index.json").read_text(encoding="utf-8"))
    for part, class_path in words_index.items():
        if part.startswith("tokenizer"):
            index[part] = class_path
            shutil.copytree(words / part, folder / part, dirs_exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (folder / _DONE).write_text(tomli_w.dumps({"model": settings}), encoding="utf-8")
    return sizes


def _make_empty(library: str, name: str, folder: Path) -> Any:
    """Return the part without memory for its weights."""
    import diffusers
    import transformers

    with torch.device("meta"):
        if library == "diffusers":
            cls = getattr(diffusers, name)
            return cls.from_config(cls.load_config(folder))
        return getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))


@torch.no_grad()
def _draw_weights(model: Any, device: torch.device, generator: torch.Generator) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(dtype).to_empty(device=device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _STD, generator=generator)
    return model


def _save(model: Any, stem: Path) -> int:
    """Write the weights as diffusers and transformers read them, and return their bytes. Tensors
    that share memory are written once.
    """
    places, tensors = set[tuple[int, torch.Size]](), dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        if (tensor.data_ptr(), tensor.shape) not in places:
            places.add((tensor.data_ptr(), tensor.shape))
            tensors[name] = tensor
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(item.nbytes for item in shards[-1].values()) >= _SHARD:
            shards.append({})
        shards[-1][name] = tensor
    count = len(shards)
    files = [f"{stem.name}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    if count == 1:
        files = [f"{stem.name}.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        copies = {name: tensor.to("cpu").contiguous() for name, tensor in shard.items()}
        save_file(copies, stem.with_name(file), {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    if count > 1:
        by_name = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
        stem.with_name(f"{stem.name}.safetensors.index.json").write_text(
            json.dumps(index), encoding="utf-8"
        )
    return total
