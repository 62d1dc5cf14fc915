"""A GGUF file of a model folder's transformer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FORMS = ("Q8_0", "Q4_0", "Q5_1", "BF16", "F16")
"""Formats of the matrices, used in turn. Vectors stay in F32, as in published files."""


def write_gguf(
    folder: Path,
    file: Path,
    forms: tuple[str, ...] = FORMS,
    published: Mapping[str, tuple[str, ...]] | None = None,
) -> Path:
    """Write the transformer of a model folder as a GGUF file.

    Args:
        folder: of the model.
        file: to write.
        forms: formats of the matrices, used in turn.
        published: the first publisher's names, each with its layers, if the file uses them. A layer
            with several names gets the first one.
    """
    import gguf
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    tensors = model.state_dict()
    for name, layers in (published or {}).items():
        for kind in ("weight", "bias"):
            keys = [f"{layer}.{kind}" for layer in layers]
            if all(key in tensors for key in keys):
                tensors[f"{name}.{kind}"] = torch.cat([tensors.pop(key) for key in keys])
    writer = gguf.GGUFWriter(file, "flux")
    for number, (name, tensor) in enumerate(tensors.items()):
        numbers, form = tensor.float().numpy(), "F32"
        if tensor.ndim == 2:
            form = forms[number % len(forms)]
        kind = gguf.GGMLQuantizationType[form]
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
