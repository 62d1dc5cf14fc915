"""The layers of the served model, and whether an adapter was made for them.

Read from the headers of the model's own safetensors files: no weight is touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from maskserve_core.adapters.lora_header import BadAdapter, Layer, LoraHeader
from maskserve_core.files.safetensors_header import BadHeader, header_of

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

_ONCE = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


class BaseLayers:
    """Shapes of the served model's layers, by part.

    Args:
        shapes: of the weights, by part (of `lora_header.PARTS`) and the layer's dotted name.
        denoiser: the name of its folder.
    """

    def __init__(
        self, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], denoiser: str = "transformer"
    ) -> None:
        self._shapes = shapes
        self._spellings = {part: _spellings(layers) for part, layers in shapes.items()}
        self._published = _PUBLISHED_NAMES[denoiser]
        self.denoiser = denoiser

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
                if part == "text_encoder_2" and denoiser == "transformer":
                    continue  # FLUX's T5, to which diffusers applies no LoRA
                files = sorted(Path(folder, name).glob("*.safetensors"))
                if files and part == "denoiser":
                    denoiser = name
                for file in files:
                    shapes.setdefault(part, {}).update(_shapes(file))
        return cls(shapes, denoiser) if denoiser else None

    def name_of(self, part: str, module: str) -> str | None:
        """The dotted name of a layer that a LoRA file spells in one of the usual ways.

        Args:
            part: of the model, of `lora_header.PARTS`.
            module: as `lora_header.split_part` gives it.

        Returns:
            None: the file's names are those of the model's first publisher.

        Raises:
            BadAdapter: the model has no such layer.
        """
        if part not in self._shapes:
            raise BadAdapter(f"changes {part}, which is not served with this model")
        found = self._spellings[part].get(_modern(part, module))
        if found is None and not (part == "denoiser" and self._published.match(module)):
            raise BadAdapter(
                f"is for another model: the served one's {part} has no layer {module[:80]}"
            )
        return found

    def check_layer(self, part: str, name: str, layer: Layer) -> None:
        """Refuse an update that does not fit the layer of this dotted name.

        Raises:
            BadAdapter: naming the layer.
        """
        outputs, inputs, *kernel = self._shapes[part][name]
        if layer.inputs > inputs and layer.outputs == outputs:
            raise BadAdapter(
                f"widens the inputs of {name[:80]} from {inputs} to {layer.inputs}, "
                "which is not served"
            )
        # A linear layer may be kept as a convolution of side 1, and the other way round.
        same_kernel = list(layer.kernel) == kernel or {*layer.kernel, *kernel} == {1}
        if (layer.outputs, layer.inputs) != (outputs, inputs) or not same_kernel:
            raise BadAdapter(
                f"is for another model: {name[:80]} takes {inputs} numbers to {outputs} in the "
                f"served one's {part}, and {layer.inputs} to {layer.outputs} in the adapter"
            )

    def check(self, header: LoraHeader) -> None:
        """Refuse an adapter that was made for another model, as far as its header shows.

        Raises:
            BadAdapter: naming the layer.
        """
        for (part, module), layer in header.layers.items():
            name = self.name_of(part, module)
            if name is not None:
                self.check_layer(part, name, layer)


def _spellings(layers: Iterable[str]) -> dict[str, str]:
    """Dotted names by the ways to spell them: kohya's files have underscores, and text models
    have lost the first part of their names in the course of time.
    """
    spelled = {}
    for name in layers:
        for own in (name, name.removeprefix("text_model.")):
            spelled[own] = spelled[own.replace(".", "_")] = name
    return spelled


def _modern(part: str, module: str) -> str:
    """A layer's name by today's spelling: it was once that of an attention processor's own."""
    if part == "denoiser":
        if ".processor." in module:
            module = module.replace(".processor.", ".")
            module = f"{module}.0" if module.endswith(".to_out") else module
        return module
    module = module.removeprefix("text_model.").removeprefix("text_model_")
    for once, now in _ONCE.items():
        module = re.sub(rf"(?<=self_attn.){once}$", now, module)
    return module


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of linear layers and convolutions."""
    try:
        header = header_of(file)
    except BadHeader as error:
        raise OSError(f"{file} {error}") from error
    return {
        name.removesuffix(".weight"): place.shape
        for name, place in header.tensors.items()
        if name.endswith(".weight") and len(place.shape) >= 2 and "_embedding." not in name
    }
