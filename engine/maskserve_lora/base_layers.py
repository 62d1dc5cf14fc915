"""The layers of the served model, and whether an adapter was made for them.

Read from the headers of the model's own safetensors files: no weight is touched.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from maskserve_common.files.gguf_header import BadGguf, read_gguf
from maskserve_common.files.safetensors_header import BadHeader, read_header, reader_of
from maskserve_lora.lora_header import BadAdapter, Layer

_FOLDERS = {
    "denoiser": ("transformer", "unet"),
    "text_encoder": ("text_encoder",),
    "text_encoder_2": ("text_encoder_2",),
}
_FLUX = {
    "double_blocks.{}.img_attn.qkv": (
        "transformer_blocks.{}.attn.to_q",
        "transformer_blocks.{}.attn.to_k",
        "transformer_blocks.{}.attn.to_v",
    ),
    "double_blocks.{}.txt_attn.qkv": (
        "transformer_blocks.{}.attn.add_q_proj",
        "transformer_blocks.{}.attn.add_k_proj",
        "transformer_blocks.{}.attn.add_v_proj",
    ),
    "double_blocks.{}.img_attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
    "double_blocks.{}.txt_attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.net.0.proj",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.net.2",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.net.0.proj",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.net.2",),
    "double_blocks.{}.img_mod.lin": ("transformer_blocks.{}.norm1.linear",),
    "double_blocks.{}.txt_mod.lin": ("transformer_blocks.{}.norm1_context.linear",),
    "single_blocks.{}.linear1": (
        "single_transformer_blocks.{}.attn.to_q",
        "single_transformer_blocks.{}.attn.to_k",
        "single_transformer_blocks.{}.attn.to_v",
        "single_transformer_blocks.{}.proj_mlp",
    ),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.proj_out",),
    "single_blocks.{}.modulation.lin": ("single_transformer_blocks.{}.norm.linear",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
"""FLUX's published layer names, which kohya's files and ComfyUI use, and the diffusers layers that
each one concatenates."""
_FLUX |= {
    "double_blocks.{}.qkv_lora1": _FLUX["double_blocks.{}.img_attn.qkv"],
    "double_blocks.{}.qkv_lora2": _FLUX["double_blocks.{}.txt_attn.qkv"],
    "double_blocks.{}.proj_lora1": _FLUX["double_blocks.{}.img_attn.proj"],
    "double_blocks.{}.proj_lora2": _FLUX["double_blocks.{}.txt_attn.proj"],
    "single_blocks.{}.qkv": _FLUX["single_blocks.{}.linear1"][:3],
    "single_blocks.{}.proj": _FLUX["single_blocks.{}.linear2"],
}  # x-flux, but for `.processor` (`_modern`)
_FLUX2 = {
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.linear_in",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.linear_out",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.linear_in",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.linear_out",),
    "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
}
"""Published names of FLUX.2 where its layers differ from FLUX.1's."""
_FLUX3 = {
    **{
        f"{published}.{{}}.{name}": (f"{stack}.{{}}.{layer}",)
        for published, stack in {
            "content_mode_blocks.image": "mode_blocks.image",
            "content_mode_blocks.image_cond": "mode_blocks.image_cond",
            "txt_mode_blocks": "txt_mode_blocks",
            "single_blocks": "single_transformer_blocks",
        }.items()
        for name, layer in {
            "q_proj": "attn.to_q",
            "k_proj": "attn.to_k",
            "v_proj": "attn.to_v",
            "attn_out": "attn.to_out.0",
            "mlp_in": "ff.linear_in",
            "mlp_out": "ff.linear_out",
        }.items()
    },
    **{
        f"{stream}_modulations.{mode}.lin": (f"{stream}_modulations.{mode}.linear",)
        for stream in ("early_stream", "single_stream")
        for mode in ("image", "image_cond", "txt")
    },
    "emb_in.image": ("x_embedders.image",),
    "emb_in.image_cond": ("x_embedders.image_cond",),
    "time_in.in_layer": ("timestep_embedder.linear_1",),
    "time_in.out_layer": ("timestep_embedder.linear_2",),
    "ref_time_in.in_layer": ("target_timestep_embedder.linear_1",),
    "ref_time_in.out_layer": ("target_timestep_embedder.linear_2",),
    "final_layer.image.linear": ("proj_out",),
    "final_layer.image.adaLN_modulation.1": ("norm_out.linear",),
}
"""Published names of FLUX.3."""
_CHROMA = {
    f"distilled_guidance_layer.layers.{{}}.{published}": (
        f"distilled_guidance_layer.layers.{{}}.{layer}",
    )
    for published, layer in {"in_layer": "linear_1", "out_layer": "linear_2"}.items()
}
"""Published names of Chroma beside those of FLUX.1."""
_LONGCAT = {
    f"time_in.{published}": (f"time_embed.timestep_embedder.{layer}",)
    for published, layer in {"in_layer": "linear_1", "out_layer": "linear_2"}.items()
}
"""ComfyUI's names of LongCat-Image beside those of FLUX.1."""
_Z_IMAGE = {
    **{
        f"{stack}.{{}}.attention.{name}": tuple(f"{stack}.{{}}.attention.{part}" for part in parts)
        for stack in ("layers", "noise_refiner", "context_refiner")
        for name, parts in {"qkv": ("to_q", "to_k", "to_v"), "out": ("to_out.0",)}.items()
    },
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}
"""Published names of Z-Image that differ from those of diffusers."""
_QWEN_IMAGE_21 = {
    "transformer_blocks.{}.img_mlp.gate_up": (
        "transformer_blocks.{}.img_mlp.gate_layer",
        "transformer_blocks.{}.img_mlp.proj",
    ),
}
"""ComfyUI's names of Qwen-Image-2.1."""
_SD3 = {
    **{
        f"joint_blocks.{{}}.{published}": tuple(
            f"transformer_blocks.{{}}.{layer}" for layer in layers
        )
        for published, layers in {
            "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "x_block.attn.proj": ("attn.to_out.0",),
            "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            "x_block.attn2.proj": ("attn2.to_out.0",),
            "x_block.mlp.fc1": ("ff.net.0.proj",),
            "x_block.mlp.fc2": ("ff.net.2",),
            "x_block.adaLN_modulation.1": ("norm1.linear",),
            "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "context_block.attn.proj": ("attn.to_add_out",),
            "context_block.mlp.fc1": ("ff_context.net.0.proj",),
            "context_block.mlp.fc2": ("ff_context.net.2",),
            "context_block.adaLN_modulation.1": ("norm1_context.linear",),
        }.items()
    },
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
"""Published names of Stable Diffusion 3.5."""
_TRANSFORMERS = tuple(
    names
    for table in (_FLUX, _FLUX2, _FLUX3, _CHROMA, _LONGCAT, _Z_IMAGE, _QWEN_IMAGE_21, _SD3)
    for names in table.items()
)
"""All published names; a model has those whose layers it has."""
_SWAPPED = ("norm_out.linear", "norm1_context.linear")
"""Name endings of layers whose outputs are scale and shift here, and shift and scale in published
files. A `norm1_context.linear` is one only if it has no further outputs, as in Stable Diffusion
3.5's last block. (Diffusers exchanges the two in FLUX.2's checkpoints, but not in its LoRAs.)
"""
_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
"""Layers of diffusers' UNets, and Stability's names for them."""
_TABLES = re.compile(r"(.*\.)?((token|position|class)_embedding|shared|embed_tokens|.*_bias)")
"""Embedding tables: weights of two dimensions that are looked up, not multiplied."""
_PACKED = ".quant_state.bitsandbytes__"
"""Suffix of the tensor that describes a 4-bit weight."""
_CLIP = re.compile(r"(text_model\.)?encoder\.layers\.\d+\.self_attn\.q_proj")
"""A layer that CLIP's text models have, and no other text encoder of those served."""
_OLD_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


class NamedLayers(NamedTuple):
    """The layers that a name in a LoRA file means."""

    layers: tuple[str, ...]
    """Dotted names in the served model; the outputs of several are concatenated."""
    published: bool = False
    """Whether the name is that of the model's first publisher."""
    swapped: bool = False
    """Whether the halves of the outputs have been swapped since publication."""


class BaseLayers:
    """Shapes of the served model's layers, by part.

    Args:
        shapes: shapes of the weights, by part (of `lora_header.PARTS`) and the layer's dotted name.
        denoiser: name of the denoiser's folder.
        fixed: parts that the model has, and to which diffusers applies no LoRA.
    """

    def __init__(
        self,
        shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
        denoiser: str = "transformer",
        fixed: Collection[str] = (),
    ) -> None:
        self.shapes = shapes
        self.denoiser = denoiser
        self.fixed = frozenset(fixed)
        self._spellings = {part: _spellings(layers) for part, layers in shapes.items()}
        spellings = self._spellings["denoiser"]
        published = _of_transformer if denoiser == "transformer" else _of_unet
        self.published = published(shapes["denoiser"])
        """Layers by the names that the model's first publisher gave them."""
        for name, layers in self.published.items():
            target = NamedLayers(layers, published=True, swapped=self._is_swapped(name, layers))
            for spelled in (name, name.replace(".", "_")):
                spellings.setdefault(spelled, target)

    @classmethod
    def of_folder(cls, folder: str | Path, gguf: str = "") -> BaseLayers:
        """Return the layers of a model in diffusers format.

        Args:
            folder: folder of the model.
            gguf: file whose weights replace its transformer's; empty: none.

        Raises:
            BadAdapter: the folder has no denoiser layers, so no adapter can fit it.
            OSError: a file cannot be read.
        """
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        denoiser, fixed = "", []
        if gguf:
            denoiser, shapes["denoiser"] = "transformer", _gguf_shapes(Path(gguf))
        for part, names in _FOLDERS.items():
            for name in names if part not in shapes else ():
                files = sorted(Path(folder, name).glob("*.safetensors"))
                layers = {layer: shape for file in files for layer, shape in _shapes(file).items()}
                if not files:
                    continue
                if part == "denoiser":
                    denoiser = name
                elif not any(_CLIP.fullmatch(layer) for layer in layers):
                    fixed.append(part)  # a T5, or a language model
                    continue
                shapes.setdefault(part, {}).update(layers)
        if not denoiser:
            raise BadAdapter(
                f"cannot be checked: {folder} has no safetensors files of a transformer or a UNet "
                "(a model in diffusers format has them, or a GGUF file in their place)"
            )
        return cls(shapes, denoiser, fixed)

    @property
    def parts(self) -> frozenset[str]:
        """The parts of the model that have layers."""
        return frozenset(self.shapes)

    def _is_swapped(self, name: str, layers: Sequence[str]) -> bool:
        """Return whether the halves of a layer's outputs have been swapped since publication."""
        if "adaLN_modulation" not in name or not layers[0].endswith(_SWAPPED):
            return False
        outputs, inputs, *_ = self.shapes["denoiser"][layers[0]]
        return layers[0].endswith(_SWAPPED[0]) or outputs == 2 * inputs

    def named_layers(self, part: str, module: str) -> NamedLayers | None:
        """Return the layers that a LoRA file spells in one of the usual ways; None: the model has
        none.

        Args:
            part: part in `parts`.
            module: name from `lora_header.split_part`.
        """
        return self._spellings[part].get(_modern(part, module))

    def shape(self, part: str, name: str) -> tuple[int, ...]:
        """[out, in], or [out, in, kh, kw], of the weight of the layer of this dotted name."""
        return self.shapes[part][name]

    def check_layer(self, part: str, layers: NamedLayers, layer: Layer) -> None:
        """Refuse an update that does not fit its layers.

        FLUX's layers may have more inputs than the update, as in diffusers: the others are 0 then.
        So LoRAs of FLUX.1-dev change the wider first layer of Fill.

        Raises:
            BadAdapter: naming the layer.
        """
        first, *_ = shapes = [self.shapes[part][name] for name in layers.layers]
        flat = layer.flat or layer.rotation is not None
        inputs, *kernel = (math.prod(first[1:]),) if flat else first[1:]
        outputs, layer_names = sum(shape[0] for shape in shapes), " and ".join(layers.layers)[:80]
        if layer.rotation is not None:
            if not layer.rotation.fits(outputs, inputs):
                raise BadAdapter(
                    f"is for another model: {layer_names} takes {inputs} numbers to {outputs} in "
                    f"the served one's {part}, and the adapter rotates {layer.rotation}"
                )
            return
        if layer.inputs > inputs and layer.outputs == outputs:
            raise BadAdapter(
                f"widens the inputs of {layer_names} from {inputs} to {layer.inputs}, which is "
                "not served"
            )
        narrow = (
            layer.inputs < inputs
            and part == "denoiser"
            and self.denoiser == "transformer"
            and not kernel
        )
        # A linear layer may be kept as a convolution of side 1, and the other way round.
        same_kernel = list(layer.kernel) == kernel or {*layer.kernel, *kernel} == {1}
        fits = layer.outputs == outputs and (layer.inputs == inputs or narrow) and same_kernel
        if not fits:
            raise BadAdapter(
                f"is for another model: {layer_names} takes {_words(inputs, kernel)} to "
                f"{outputs} in the "
                f"served one's {part}, and {_words(layer.inputs, layer.kernel)} to {layer.outputs} "
                "in the adapter"
            )


def _words(inputs: int, kernel: Sequence[int]) -> str:
    return f"{inputs} numbers" + (f" of {kernel[0]}x{kernel[1]} places" if kernel else "")


def _spellings(layers: Iterable[str]) -> dict[str, NamedLayers]:
    """Return layers by their spellings: kohya's files have underscores, and text models have lost
    the first part of their names over time.
    """
    spelled = {}
    for name in layers:
        for spelling in (name, name.removeprefix("text_model.")):
            spelled[spelling] = spelled[spelling.replace(".", "_")] = NamedLayers((name,))
    return spelled


def _of_transformer(layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    blocks = {number for name in layers for number in re.findall(r"(?<=\.)\d+(?=\.)", name)}
    published_layers: dict[str, tuple[str, ...]] = {}
    for published, names in _TRANSFORMERS:
        for number in blocks if "{}" in published else ("",):
            placed = tuple([name.format(number) for name in names])
            if all(name in layers for name in placed):
                published_layers.setdefault(published.format(number), placed)
    return published_layers


def _of_unet(layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return a UNet's layers by their published names.

    `input_blocks` counts layers: a ResNet with the attention behind it is one, a downsampler is one
    by itself. In `output_blocks` an upsampler belongs to the last layer of its block.
    """
    published_layers: dict[str, tuple[str, ...]] = {
        published: (layer_name,) for layer_name, published in _UNET.items() if layer_name in layers
    }
    layers_of = re.compile(r"down_blocks\.0\.resnets\.(\d+)\.conv1")
    depth = sum(layers_of.fullmatch(name) is not None for name in layers)
    form = re.compile(
        r"(?P<way>down|mid|up)_blocks?\.((?P<block>\d+)\.)?"
        r"(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<layer>\d+)\.(?P<rest>.+)"
    )
    for name in layers:
        parts = form.fullmatch(name)
        if parts is None:
            continue
        way, kind, suffix = parts["way"], parts["kind"], parts["rest"]
        block, layer = int(parts["block"] or 0), int(parts["layer"])
        inner = _RESNET.get(suffix, suffix) if kind == "resnets" else suffix
        at = block * (depth + 1) + layer
        if way == "mid":
            published = f"middle_block.{2 * layer + (kind == 'attentions')}.{inner}"
        elif kind == "downsamplers":
            published = f"input_blocks.{(block + 1) * (depth + 1)}.0.op"
        elif kind == "upsamplers":
            attends = any(
                other_layer.startswith(f"up_blocks.{block}.attentions.") for other_layer in layers
            )
            published = f"output_blocks.{at + depth}.{2 if attends else 1}.conv"
        else:
            stage, first = ("input_blocks", 1) if way == "down" else ("output_blocks", 0)
            published = f"{stage}.{first + at}.{int(kind == 'attentions')}.{inner}"
        published_layers[published] = (name,)
    return published_layers


def _modern(part: str, module: str) -> str:
    """Return a layer's name in today's spelling; older files name attention processors."""
    if part == "denoiser":
        module = re.sub(r"^sformer_blocks(?=[._])", "transformer_blocks", module)
        module = re.sub(r"\bto\.(?=[qkv]$)", "to_", module)
        if ".processor." in module:
            module = module.replace(".processor.", ".")
            module = f"{module}.0" if module.endswith(".to_out") else module
        return module
    module = module.removeprefix("text_model.").removeprefix("text_model_")
    for old_name, new_name in _OLD_NAMES.items():
        module = re.sub(rf"(?<=self_attn.){old_name}$", new_name, module)
    return module


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with file.open("rb") as handle:
            read = reader_of(handle)
            tensors = read_header(read, os.fstat(handle.fileno()).st_size).tensors
            for name, place in tensors.items():
                layer, _, suffix = name.rpartition(".weight")
                if not suffix and layer and _TABLES.fullmatch(layer) is None:
                    shapes.setdefault(layer, place.shape)
                elif suffix.startswith(_PACKED):
                    state = msgspec.json.decode(read(place.begin, place.end), type=_QuantState)
                    shapes[layer] = state.shape
    except (BadHeader, msgspec.MsgspecError) as error:
        raise OSError(f"{file} {error}") from error
    return {layer: shape for layer, shape in shapes.items() if len(shape) >= 2}


def _gguf_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GGUF file's linear layers, by diffusers' names of FLUX's.

    Where one published layer concatenates several, all but the last have as many outputs as inputs.
    """
    try:
        with file.open("rb") as handle:
            tensors = read_gguf(handle, os.fstat(handle.fileno()).st_size)
    except BadGguf as error:
        raise OSError(f"{file} {error}") from error
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        layer = name.removeprefix("model.diffusion_model.").removesuffix(".weight")
        if not name.endswith(".weight") or len(shape) != 2:
            continue
        number = next(iter(re.findall(r"(?<=\.)\d+(?=\.)", layer)), "")
        template = re.sub(r"(?<=_blocks\.)\d+(?=\.)", "{}", layer)
        *same, last = [layer_name.format(number) for layer_name in _FLUX.get(template, (layer,))]
        outputs, inputs = shape
        shapes |= dict.fromkeys(same, (inputs, inputs))
        shapes[last] = outputs - len(same) * inputs, inputs
    return shapes


class _QuantState(msgspec.Struct):
    """State that bitsandbytes keeps of a layer's 4-bit weights, which are packed in one column."""

    shape: tuple[int, ...]
