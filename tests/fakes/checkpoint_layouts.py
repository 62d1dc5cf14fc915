"""The names under which publishers store the models that diffusers stores under its own.

Each function takes the tensors of a part of a diffusers folder and returns them as published: by
the inverse of diffusers' map, written from the publishers' names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]
Renames = Mapping[str, str]


def renamed(name: str, renames: Renames) -> str:
    """Replace parts of a name, in order."""
    for new, old in renames.items():
        name = name.replace(new, old)
    return name


def joined(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with the layers of each joint one in its place, by its name: a name's parts."""
    firsts = {names[0]: (joint, names) for joint, names in layers.items()}
    later_layers = {name for names in layers.values() for name in names[1:]}
    for name, tensor in tensors.items():
        layer = next((layer for layer in (*firsts, *later_layers) if f".{layer}." in name), "")
        if layer in firsts:
            joint, names = firsts[layer]
            parts = [tensors[name.replace(f".{layer}.", f".{other}.")] for other in names]
            yield name.replace(f".{layer}.", f".{joint}."), torch.cat(parts)
        elif layer not in later_layers:
            yield name, tensor


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Scale and shift of a norm, in the other order."""
    return torch.cat(tensor.chunk(2)[::-1])


def z_image(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Z-Image's names, with queries, keys and values in one matrix."""
    renames = {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        ".attention.to_out.0.": ".attention.out.",
        ".attention.norm_k.": ".attention.k_norm.",
        ".attention.norm_q.": ".attention.q_norm.",
    }
    joint = {"attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v")}
    return {renamed(name, renames): tensor for name, tensor in joined(tensors, joint)}


def flux2(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """FLUX.2's names: joint queries, keys and values, and shift before scale at the end."""
    renames = {
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
        "attn.to_add_out": "txt_attn.proj",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
    }
    double = {
        "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
        "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
        "attn.to_out.0": "img_attn.proj",
        "transformer_blocks": "double_blocks",
    }
    single = {
        "attn.norm_q.weight": "norm.query_norm.scale",
        "attn.norm_k.weight": "norm.key_norm.scale",
        "attn.to_qkv_mlp_proj": "linear1",
        "attn.to_out": "linear2",
        "single_transformer_blocks": "single_blocks",
    }
    joint = {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    }
    original: Tensors = {}
    for name, tensor in joined(tensors, joint):
        if name == "norm_out.linear.weight":
            name, tensor = "final_layer.adaLN_modulation.1.weight", swapped(tensor)
        name = "final_layer.linear.weight" if name == "proj_out.weight" else name
        blocks = single if name.startswith("single_") and "modulation" not in name else double
        original[renamed(renamed(name, renames), blocks)] = tensor
    return original


def flux3(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """FLUX.3's names, shift before scale at the end."""
    renames = {
        "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
        "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
        "timestep_embedder.linear_1": "time_in.in_layer",
        "timestep_embedder.linear_2": "time_in.out_layer",
        "x_embedders.": "emb_in.",
        "context_embedder.": "txt_in.",
        "mode_blocks.": "content_mode_blocks.",
        "txt_content_mode_blocks.": "txt_mode_blocks.",
        "single_transformer_blocks.": "single_blocks.",
        ".attn.to_q.": ".q_proj.",
        ".attn.to_k.": ".k_proj.",
        ".attn.to_v.": ".v_proj.",
        ".attn.to_out.0.": ".attn_out.",
        ".attn.norm_q.weight": ".norm.query_norm.scale",
        ".attn.norm_k.weight": ".norm.key_norm.scale",
        ".ff.linear_in.": ".mlp_in.",
        ".ff.linear_out.": ".mlp_out.",
        "norm_out.linear.": "final_layer.image.adaLN_modulation.1.",
        "proj_out.": "final_layer.image.linear.",
        ".linear.weight": ".lin.weight",
        "final_layer.image.lin.": "final_layer.image.linear.",
    }
    return {
        renamed(name, renames): swapped(tensor) if name.startswith("norm_out.") else tensor
        for name, tensor in tensors.items()
    }


_FLUX_NAMES = {
    "context_embedder.": "txt_in.",
    "x_embedder.": "img_in.",
    "linear_1.": "in_layer.",
    "linear_2.": "out_layer.",
    "time_text_embed.timestep_embedder.": "time_in.",
    "time_embed.timestep_embedder.": "time_in.",
    "time_text_embed.guidance_embedder.": "guidance_in.",
    "time_text_embed.text_embedder.": "vector_in.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
}
_FLUX_DOUBLE = {
    "transformer_blocks.": "double_blocks.",
    ".norm1.linear.": ".img_mod.lin.",
    ".norm1_context.linear.": ".txt_mod.lin.",
    ".attn.norm_q.weight": ".img_attn.norm.query_norm.scale",
    ".attn.norm_k.weight": ".img_attn.norm.key_norm.scale",
    ".attn.norm_added_q.weight": ".txt_attn.norm.query_norm.scale",
    ".attn.norm_added_k.weight": ".txt_attn.norm.key_norm.scale",
    ".attn.to_out.0.": ".img_attn.proj.",
    ".attn.to_add_out.": ".txt_attn.proj.",
    ".ff.net.0.proj.": ".img_mlp.0.",
    ".ff.net.2.": ".img_mlp.2.",
    ".ff_context.net.0.proj.": ".txt_mlp.0.",
    ".ff_context.net.2.": ".txt_mlp.2.",
}
_FLUX_SINGLE = {
    "single_transformer_blocks.": "single_blocks.",
    ".norm.linear.": ".modulation.lin.",
    ".attn.norm_q.weight": ".norm.query_norm.scale",
    ".attn.norm_k.weight": ".norm.key_norm.scale",
    ".proj_out.": ".linear2.",
}


def flux(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """FLUX.1's names, or those of models like it: joint matrices, shift before scale at the end."""
    single = {n: x for n, x in tensors.items() if n.startswith("single_transformer_blocks.")}
    original: Tensors = {}
    for name, tensor in joined(
        single, {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")}
    ):
        original[renamed(name, _FLUX_SINGLE)] = tensor
    double = {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    }
    for name, tensor in joined({n: x for n, x in tensors.items() if n not in single}, double):
        tensor = swapped(tensor) if name.startswith("norm_out.") else tensor
        name = "final_layer.linear." + name[9:] if name.startswith("proj_out.") else name
        name = renamed(name, _FLUX_NAMES | _FLUX_DOUBLE)
        original[name.replace("weight", "scale") if ".norms." in name else name] = tensor
    return original


_SD3_NAMES = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj.": "x_embedder.proj.",
    "time_text_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_text_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_text_embed.text_embedder.linear_1.": "y_embedder.mlp.0.",
    "time_text_embed.text_embedder.linear_2.": "y_embedder.mlp.2.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "transformer_blocks.": "joint_blocks.",
    ".attn.norm_q.": ".x_block.attn.ln_q.",
    ".attn.norm_k.": ".x_block.attn.ln_k.",
    ".attn.norm_added_q.": ".context_block.attn.ln_q.",
    ".attn.norm_added_k.": ".context_block.attn.ln_k.",
    ".attn.to_out.0.": ".x_block.attn.proj.",
    ".attn.to_add_out.": ".context_block.attn.proj.",
    ".attn2.norm_q.": ".x_block.attn2.ln_q.",
    ".attn2.norm_k.": ".x_block.attn2.ln_k.",
    ".attn2.to_out.0.": ".x_block.attn2.proj.",
    ".norm1.linear.": ".x_block.adaLN_modulation.1.",
    ".norm1_context.linear.": ".context_block.adaLN_modulation.1.",
    ".ff.net.0.proj.": ".x_block.mlp.fc1.",
    ".ff.net.2.": ".x_block.mlp.fc2.",
    ".ff_context.net.0.proj.": ".context_block.mlp.fc1.",
    ".ff_context.net.2.": ".context_block.mlp.fc2.",
}


def sd3(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Stable Diffusion 3.5's names, with joint matrices; shift before scale at the end, and for the
    text of the last block.
    """
    layers = {
        "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    }
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("transformer_"))
    ends = ("norm_out.", f"transformer_blocks.{last}.norm1_context.")
    original: Tensors = {}
    for name, tensor in joined(tensors, layers):
        tensor = swapped(tensor) if name.startswith(ends) else tensor
        name = "final_layer.linear." + name[9:] if name.startswith("proj_out.") else name
        original[renamed(name, _SD3_NAMES)] = tensor
    return original


def qwen_image21(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Qwen-Image-2.1's names as ComfyUI stores them: gate and projection in one matrix."""
    return dict(joined(tensors, {"img_mlp.gate_up": ("img_mlp.gate_layer", "img_mlp.proj")}))


_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip


def unet(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Stable Diffusion's and SDXL's names: blocks are numbered through all levels."""

    def count(pattern: str) -> int:
        matches = (re.match(pattern, name) for name in tensors)
        return 1 + max(int(match[1]) for match in matches if match)

    down, up = (count(rf"{side}_blocks\.0\.resnets\.(\d+)") for side in ("down", "up"))

    def layer(match: re.Match[str]) -> str:
        side, level, kind, number = match[1], int(match[2]), match[3], int(match[4])
        place = {"resnets": 0, "attentions": 1, "downsamplers": 0}
        if side == "down":
            block = level * (down + 1) + 1 + (down if kind == "downsamplers" else number)
            return f"input_blocks.{block}.{place[kind]}"
        if kind == "upsamplers":
            attentions = any(n.startswith(f"up_blocks.{level}.attentions") for n in tensors)
            return f"output_blocks.{level * up + up - 1}.{2 if attentions else 1}"
        return f"output_blocks.{level * up + number}.{place[kind]}"

    original: Tensors = {}
    for name, tensor in tensors.items():
        new = re.sub(r"^(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)", layer, name)
        new = next((o + new[len(n) :] for n, o in _UNET.items() if new.startswith(n + ".")), new)
        if ".resnets." in name:
            head, part, kind = new.rsplit(".", 2)
            new = f"{head}.{_RESNET[part]}.{kind}"
        original[new.replace(".0.conv.", ".0.op.") if "downsamplers" in name else new] = tensor
    return original


def vae(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """A VAE's names as in Stable Diffusion's and FLUX's files; its attention has convolutions."""
    levels = 1 + max(int(m[1]) for n in tensors if (m := re.match(r"decoder\.up_blocks\.(\d+)", n)))
    attention = {
        "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"
    }  # fmt: skip
    original: Tensors = {}
    for name, tensor in tensors.items():
        name = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", name)
        name = renamed(
            name,
            {
                "down_blocks.": "down.",
                "downsamplers.0.": "downsample.",
                "upsamplers.0.": "upsample.",
                "mid_block.resnets.0": "mid.block_1",
                "mid_block.resnets.1": "mid.block_2",
                "mid_block.attentions.0": "mid.attn_1",
                ".resnets.": ".block.",
                "conv_shortcut": "nin_shortcut",
                "conv_norm_out": "norm_out",
            },
        )
        if ".attn_1." in name:
            name = renamed(name, {f".attn_1.{n}.": f".attn_1.{o}." for n, o in attention.items()})
            tensor = tensor[..., None, None] if tensor.dim() == 2 else tensor
        original[name] = tensor
    return original


def open_clip(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """OpenCLIP's names of a text encoder: queries, keys and values joint, the projection
    transposed.
    """
    renames = {
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "final_layer_norm": "ln_final",
        "encoder.layers": "transformer.resblocks",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn": "attn",
        "in_proj.": "in_proj_",
    }
    original: Tensors = {}
    for name, tensor in joined(
        tensors,
        {"self_attn.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ):
        if name == "text_projection.weight":
            original["text_projection"] = tensor.T.contiguous()
        else:
            original[renamed(name.removeprefix("text_model."), renames)] = tensor
    return original


def clip(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """CLIP's names as transformers has stored them for years."""
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": x
        for name, x in tensors.items()
    }


Layout = Callable[[Mapping[str, torch.Tensor]], Tensors]
LAYOUTS: dict[str, Layout] = {
    "z-image": z_image,
    "klein": flux2,
    "flux2-dev": flux2,
    "flux3-klein": flux3,
    "flux3-base": flux3,
    "joyimage-edit": dict,
    "qwen-image": dict,
    "qwen-image-edit": dict,
    "qwen-image-21": qwen_image21,
    "sd3-large": sd3,
    "sd3-medium": sd3,
    "sdxl-base": unet,
    "sdxl-fill": unet,
    "sd21-base": unet,
    "sd21-fill": unet,
}
"""Published layouts of denoisers, by model of `tiny_families`."""
_SDXL: dict[str, tuple[str, Layout]] = {
    "text_encoder": ("conditioner.embedders.0.transformer.", clip),
    "text_encoder_2": ("conditioner.embedders.1.model.", open_clip),
    "vae": ("first_stage_model.", vae),
}
_SD21: dict[str, tuple[str, Layout]] = {
    "text_encoder": ("cond_stage_model.model.", open_clip),
    "vae": ("first_stage_model.", vae),
}
PARTS: dict[str, dict[str, tuple[str, Layout]]] = {
    "sdxl-base": _SDXL,
    "sdxl-fill": _SDXL,
    "sd21-base": _SD21,
    "sd21-fill": _SD21,
    "sd3-large": {
        "text_encoder": ("text_encoders.clip_l.transformer.", clip),
        "text_encoder_2": ("text_encoders.clip_g.transformer.", clip),
        "text_encoder_3": ("text_encoders.t5xxl.transformer.", dict),
        "vae": ("first_stage_model.", vae),
    },
}
"""Parts beside the denoiser in whole checkpoints: their prefix and layout."""
