"""A tiny folder of every pipeline that is served: `python -m tests.fakes.tiny_families F` writes
all, or those that are named, each with a LoRA and, if its family takes them, a ControlNet, for
`scripts/bench every_edit --models F/models/* --adapters F/adapters --controlnets F/controlnets`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.fakes import loras
from tests.fakes.control_nets import (
    random_net,
    random_qwen_net,
    random_sd3_net,
    random_unet_net,
    random_z_image_net,
)
from tests.fakes.tiny_chroma import build_tiny_chroma
from tests.fakes.tiny_flux2 import build_tiny_flux2, build_tiny_flux2_dev
from tests.fakes.tiny_flux3 import build_tiny_flux3
from tests.fakes.tiny_joyimage import build_tiny_joyimage
from tests.fakes.tiny_longcat import build_tiny_longcat
from tests.fakes.tiny_model import build_tiny_model
from tests.fakes.tiny_qwen_image import EDIT, PLUS, PLUS_2511, build_tiny_qwen_image
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.fakes.tiny_unet import build_tiny_unet
from tests.fakes.tiny_z_image import build_tiny_z_image

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux-fill": partial(build_tiny_model, semantics="fill"),
    "flux-base": partial(build_tiny_model, semantics="inpaint"),
    "flux-kontext": partial(build_tiny_model, semantics="reference"),
    "klein": build_tiny_flux2,
    "klein-base": partial(build_tiny_flux2, distilled=False),
    "klein-kv": partial(build_tiny_flux2, exact=True),
    "flux2-dev": build_tiny_flux2_dev,
    "flux3-klein": build_tiny_flux3,
    "flux3-base": partial(build_tiny_flux3, distilled=False),
    "joyimage-edit": build_tiny_joyimage,
    "longcat-image": build_tiny_longcat,
    "longcat-image-edit": partial(build_tiny_longcat, edits=True),
    "chroma": build_tiny_chroma,
    "sd3-large": build_tiny_sd3,
    "sd3-medium": partial(build_tiny_sd3, medium=True),
    "qwen-image": build_tiny_qwen_image,
    "qwen-image-edit": partial(build_tiny_qwen_image, edits=EDIT),
    "qwen-image-edit-2509": partial(build_tiny_qwen_image, edits=PLUS),
    "qwen-image-edit-2511": partial(build_tiny_qwen_image, edits=PLUS_2511),
    "qwen-image-21": build_tiny_qwen_image21,
    "z-image": build_tiny_z_image,
    "z-image-turbo": partial(build_tiny_z_image, turbo=True),
    "sd21-base": partial(build_tiny_unet, xl=False, fill=False),
    "sd21-fill": partial(build_tiny_unet, xl=False, fill=True),
    "sdxl-base": partial(build_tiny_unet, xl=True, fill=False),
    "sdxl-fill": partial(build_tiny_unet, xl=True, fill=True),
}

DENSE = ("sd3-medium",)
"""Models that are served without a cache."""
WITH_NETS: dict[str, Callable[[], Any]] = {
    "flux-fill": partial(random_net, 1, 1, 1),
    "flux-base": partial(random_net, 1, 1, 1),
    "qwen-image": partial(random_qwen_net, 1, 2),
    "sd3-large": partial(random_sd3_net, 1, 2),
    "sd3-medium": partial(random_sd3_net, 1, 2),
    "z-image": partial(random_z_image_net, 1),
}
"""A net of each model that takes ControlNets, apart from UNets."""


def build_with_adapters(folder: Path, *names: str) -> None:
    """Write folders for pictures of 128 pixels a side, with enough tokens for masks of many sizes.

    Args:
        folder: gets `models`, `adapters` and `controlnets`, each with a folder for a name.
        names: keys of `FAMILIES`; none: all.
    """
    from diffusers import UNet2DConditionModel

    for name in names or FAMILIES:
        model = FAMILIES[name](folder / "models" / name)
        file = model / "maskserve.toml"
        text = file.read_text("utf-8").replace("[model]\n", "[model]\nnative_resolution = 128\n")
        text += "\n[cache]\nenabled = false\n" if name in DENSE else ""
        file.write_text(text, "utf-8")
        unet = (model / "unet").is_dir()
        denoiser = "unet" if unet else "transformer"
        tensors = load_file(model / denoiser / "diffusion_pytorch_model.safetensors")
        queries = {
            layer.removesuffix(".weight"): tensor.shape[::-1]
            for layer, tensor in tensors.items()
            if layer.endswith(("to_q.weight", "attn_qkv.weight"))
        }
        lora = loras.lora(queries, prefix=f"{denoiser}.", seed=0)
        loras.write(folder / "adapters" / name / "queries.safetensors", lora)
        net = folder / "controlnets" / name / "net"
        if unet:
            base = UNet2DConditionModel.from_pretrained(model / "unet")
            random_unet_net(base, 1).save_pretrained(net)
        elif name in WITH_NETS:
            WITH_NETS[name]().save_pretrained(net)


if __name__ == "__main__":
    build_with_adapters(Path(sys.argv[1]), *sys.argv[2:])
