"""A GGUF file of a model folder's transformer."""

from __future__ import annotations

from pathlib import Path

FORMS = ("Q8_0", "Q4_0", "Q5_1", "BF16", "F16")
"""Of products, in turn; vectors stay in F32, as files have them."""


def write_gguf(folder: Path, file: Path, forms: tuple[str, ...] = FORMS) -> Path:
    """The transformer of a model folder as a GGUF file."""
    import gguf
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    writer = gguf.GGUFWriter(file, "flux")
    for number, (name, tensor) in enumerate(model.state_dict().items()):
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
