"""The layers of the served model, and whether an adapter was made for them.

Read from the headers of the model's own safetensors files: no weight is touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from maskserve_core.adapters.lora_header import BadAdapter, LoraHeader, read_tensors

_FOLDERS = {
    "denoiser": ("transformer", "unet"),
    "text_encoder": ("text_encoder",),
    "text_encoder_2": ("text_encoder_2",),
}
# Names that the models' first publishers gave their layers. What they mean is known to the
# converters of diffusers, which the engine reads such files by.
_PUBLISHED_NAMES = {
    "transformer": re.compile(
        r"(double_blocks|single_blocks|final_layer|img_in|txt_in|time_in|vector_in|guidance_in)[._]"
    ),
    "unet": re.compile(r"(input_blocks|middle_block|output_blocks|time_embed|label_emb|out)[._]"),
}


class BaseLayers:
    """Shapes of the served model's layers, by part.

    Args:
        shapes: of the weights, by part (of `lora_header.PARTS`) and the layer's dotted name.
        denoiser: the name of its folder.
    """

    def __init__(
        self, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], denoiser: str = "transformer"
    ) -> None:
        self._dotted = shapes
        # kohya's files have underscores in place of dots.
        self._flat = {
            part: {name.replace(".", "_"): shape for name, shape in layers.items()}
            for part, layers in shapes.items()
        }
        self._published = _PUBLISHED_NAMES[denoiser]

    @classmethod
    def of_folder(cls, folder: str | Path) -> BaseLayers | None:
        """Those of a model in diffusers format; None if its weights are no safetensors files.

        Raises:
            OSError: they cannot be read.
        """
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        denoiser = ""
        for part, names in _FOLDERS.items():
            for name in names:
                files = sorted(Path(folder, name).glob("*.safetensors"))
                if files and part == "denoiser":
                    denoiser = name
                for file in files:
                    shapes.setdefault(part, {}).update(_shapes(file))
        return cls(shapes, denoiser) if denoiser else None

    def check(self, header: LoraHeader) -> None:
        """Refuse an adapter that was made for another model.

        Raises:
            BadAdapter: naming the layer.
        """
        for (part, name), layer in header.layers.items():
            if part not in self._dotted:
                raise BadAdapter(f"changes {part}, which the served model has not")
            # PEFT's files of text encoders leave out the model's own first name, or keep it.
            shape = self._dotted[part].get(name) or self._flat[part].get(name)
            if shape is None:
                if part == "denoiser" and self._published.match(name):
                    continue
                raise BadAdapter(
                    f"is for another model: the served one's {part} has no layer {name[:80]}"
                )
            outputs, inputs, *kernel = shape
            if layer.inputs > inputs and layer.outputs == outputs:
                raise BadAdapter(
                    f"widens the inputs of {name[:80]} from {inputs} to {layer.inputs}, "
                    "which is not served"
                )
            if (layer.outputs, layer.inputs) != (outputs, inputs) or (
                list(layer.kernel) != kernel and any(side != 1 for side in layer.kernel)
            ):
                raise BadAdapter(
                    f"is for another model: {name[:80]} is {inputs} to {outputs} wide in the "
                    f"served one's {part}, and {layer.inputs} to {layer.outputs} in the adapter"
                )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights with two sides or more, by layer."""
    with file.open("rb") as opened:

        def read(begin: int, end: int) -> bytes:
            opened.seek(begin)
            return opened.read(end - begin)

        tensors, _ = read_tensors(read, file.stat().st_size)
    return {
        name.removesuffix(".weight"): place.shape
        for name, place in tensors.items()
        if name.endswith(".weight") and len(place.shape) >= 2
    }
