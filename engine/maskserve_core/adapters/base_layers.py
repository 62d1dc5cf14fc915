"""The layers of the served model, and whether an adapter was made for them.

Read from the headers of the model's own safetensors files: no weight is touched.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from maskserve_core.adapters.lora_header import BadAdapter, Layer
from maskserve_core.files.safetensors_header import BadHeader, header_of

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
"""Names that FLUX's publisher gave its layers (kohya's files and ComfyUI's have them), and the
layers of diffusers that each is, one behind the other.
"""
_FLUX |= {
    "double_blocks.{}.qkv_lora1": _FLUX["double_blocks.{}.img_attn.qkv"],
    "double_blocks.{}.qkv_lora2": _FLUX["double_blocks.{}.txt_attn.qkv"],
    "double_blocks.{}.proj_lora1": _FLUX["double_blocks.{}.img_attn.proj"],
    "double_blocks.{}.proj_lora2": _FLUX["double_blocks.{}.txt_attn.proj"],
    "single_blocks.{}.qkv": _FLUX["single_blocks.{}.linear1"][:3],
    "single_blocks.{}.proj": _FLUX["single_blocks.{}.linear2"],
}  # x-flux, but for `.processor` (`_modern`)
_SHARED = "stream_modulation"
"""In the names of layers that FLUX.2 has and FLUX.1 has not."""
_FLUX2 = {
    **{name: own for name, own in _FLUX.items() if "attn" in name or not own[0].count(".")},
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.linear_in",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.linear_out",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.linear_in",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.linear_out",),
    "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
}
"""The same of FLUX.2."""
_Z_IMAGE = {
    f"{stack}.{{}}.attention.{name}": tuple(f"{stack}.{{}}.attention.{each}" for each in own)
    for stack in ("layers", "noise_refiner", "context_refiner")
    for name, own in {"qkv": ("to_q", "to_k", "to_v"), "out": ("to_out.0",)}.items()
}
"""The same of Z-Image, where they differ from those of diffusers."""
_SWAPPED = "final_layer.adaLN_modulation.1"
"""Of FLUX.1: its outputs are shift and scale; in diffusers scale and shift. Diffusers' loader of
FLUX.2 takes them as they are.
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
"""Layers of diffusers' UNets, and the names that Stability gave them."""
_TABLES = re.compile(r"(.*\.)?((token|position|class)_embedding|shared|embed_tokens|.*_bias)")
"""Tables that are looked up: weights of two dimensions, and no layers that multiply."""
_ONCE = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


class Meant(NamedTuple):
    """What a name in a LoRA file stands for."""

    layers: tuple[str, ...]
    """Dotted names in the served model; of several the outputs lie one behind the other."""
    published: bool = False
    """Whether it is a name of the model's first publisher."""
    swapped: bool = False
    """Whether the halves of the outputs have changed places since."""


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
        self.denoiser = denoiser
        self._spellings = {part: _spellings(layers) for part, layers in shapes.items()}
        own = self._spellings["denoiser"]
        published = _of_flux if denoiser == "transformer" else _of_unet
        self.published = published(shapes["denoiser"])
        """Layers by the names that the model's first publisher gave them."""
        swaps = not any(_SHARED in name for name in shapes["denoiser"])
        for name, layers in self.published.items():
            meant = Meant(layers, published=True, swapped=swaps and name == _SWAPPED)
            for spelled in (name, name.replace(".", "_")):
                own.setdefault(spelled, meant)

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

    @property
    def parts(self) -> frozenset[str]:
        """The parts of the model that have layers."""
        return frozenset(self._shapes)

    def meant(self, part: str, module: str) -> Meant | None:
        """The layers that a LoRA file spells in one of the usual ways; None: the model has none.

        Args:
            part: one of `parts`.
            module: as `lora_header.split_part` gives it.
        """
        return self._spellings[part].get(_modern(part, module))

    def shape(self, part: str, name: str) -> tuple[int, ...]:
        """[out, in], or [out, in, kh, kw], of the weight of the layer of this dotted name."""
        return self._shapes[part][name]

    def check_layer(self, part: str, meant: Meant, layer: Layer) -> None:
        """Refuse an update that does not fit the layers that it is meant for.

        FLUX's are also taken with fewer inputs, as diffusers takes them: others are 0 then. So
        LoRAs of FLUX.1-dev change the wider first layer of Fill.

        Raises:
            BadAdapter: naming the layer.
        """
        first, *_ = shapes = [self._shapes[part][name] for name in meant.layers]
        inputs, *kernel = first[1:]
        outputs, shown = sum(shape[0] for shape in shapes), " and ".join(meant.layers)[:80]
        if layer.inputs > inputs and layer.outputs == outputs:
            raise BadAdapter(
                f"widens the inputs of {shown} from {inputs} to {layer.inputs}, which is not served"
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
                f"is for another model: {shown} takes {_words(inputs, kernel)} to {outputs} in the "
                f"served one's {part}, and {_words(layer.inputs, layer.kernel)} to {layer.outputs} "
                "in the adapter"
            )


def _words(inputs: int, kernel: Sequence[int]) -> str:
    return f"{inputs} numbers" + (f" of {kernel[0]}x{kernel[1]} places" if kernel else "")


def _spellings(layers: Iterable[str]) -> dict[str, Meant]:
    """Layers by the ways to spell them: kohya's files have underscores, and text models have lost
    the first part of their names in the course of time.
    """
    spelled = {}
    for name in layers:
        for own in (name, name.removeprefix("text_model.")):
            spelled[own] = spelled[own.replace(".", "_")] = Meant((name,))
    return spelled


def _of_flux(layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Published names of a FLUX model's layers."""
    found = {}
    names = _FLUX2 if any(_SHARED in name for name in layers) else _FLUX
    for published, own in {**names, **_Z_IMAGE}.items():
        for number in itertools.count():
            named = tuple([each.format(number) for each in own])
            if not all(name in layers for name in named):
                break
            found[published.format(number)] = named
            if "{}" not in published:
                break
    return found


def _of_unet(layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Published names of a UNet's layers.

    Its way down is numbered layer by layer, each with what attends behind it and each downsampler
    by itself; on the way up an upsampler stands beside the last layer of its block.
    """
    found: dict[str, tuple[str, ...]] = {
        published: (own,) for own, published in _UNET.items() if own in layers
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
        way, kind, rest = parts["way"], parts["kind"], parts["rest"]
        block, layer = int(parts["block"] or 0), int(parts["layer"])
        inner = _RESNET.get(rest, rest) if kind == "resnets" else rest
        at = block * (depth + 1) + layer
        if way == "mid":
            published = f"middle_block.{2 * layer + (kind == 'attentions')}.{inner}"
        elif kind == "downsamplers":
            published = f"input_blocks.{(block + 1) * (depth + 1)}.0.op"
        elif kind == "upsamplers":
            attends = any(each.startswith(f"up_blocks.{block}.attentions.") for each in layers)
            published = f"output_blocks.{at + depth}.{2 if attends else 1}.conv"
        else:
            stage, first = ("input_blocks", 1) if way == "down" else ("output_blocks", 0)
            published = f"{stage}.{first + at}.{int(kind == 'attentions')}.{inner}"
        found[published] = (name,)
    return found


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
        if name.endswith(".weight")
        and len(place.shape) >= 2
        and _TABLES.fullmatch(name.removesuffix(".weight")) is None
    }
