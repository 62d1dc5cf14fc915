"""Text to image with as many ControlNets and LoRAs as Katz measured: the model, its adapters, and
requests that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from maskserve_benchmarks.adapter_calls import SERVICES, draw_calls, draw_numbers
from maskserve_benchmarks.checkout import CHECKOUT, DEMO_UNET
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_common.imaging.images import encode_png

NETS: Final = tuple(f"net-{number}" for number in range(8))
LORAS: Final = tuple(f"lora-{number}" for number in range(8))
"""As many as Katz's service B has popular ones."""
SERVICE: Final = SERVICES[1]


def picture_unet(folder: Path) -> Path:
    """Make a text-to-image model of the demo UNet: the input channels of source and mask are left
    out, so its pictures mean nothing.
    """
    from diffusers import UNet2DConditionModel

    filling = UNet2DConditionModel.from_pretrained(DEMO_UNET / "unet")
    unet = UNet2DConditionModel.from_config({**filling.config, "in_channels": 4})
    weights = filling.state_dict()
    weights["conv_in.weight"] = weights["conv_in.weight"][:, :4]
    unet.load_state_dict(weights)
    folder.mkdir()
    for part in DEMO_UNET.iterdir():
        if part.name not in ("unet", "model_index.json", ".maskserve-digests.json"):
            (folder / part.name).symlink_to(part.resolve())
    index = (DEMO_UNET / "model_index.json").read_text(encoding="utf-8")
    index = index.replace("StableDiffusionInpaintPipeline", "StableDiffusionPipeline")
    (folder / "model_index.json").write_text(index, encoding="utf-8")
    unet.save_pretrained(folder / "unet")
    return folder


def write_adapters(
    folder: Path, nets: Sequence[str], loras: Sequence[str]
) -> tuple[list[Path], list[Path]]:
    """Write ControlNets and LoRAs of the demo UNet below `folder`: those of the demo, each with
    other weights. Return their paths.
    """
    source = CHECKOUT / "assets" / "controlnets" / "unet-outline"
    weights = "diffusion_pytorch_model.safetensors"
    net_paths, lora_paths = [folder / "nets" / name for name in nets], list[Path]()
    for number, path in enumerate(net_paths):
        path.mkdir(parents=True)
        (path / "config.json").write_bytes((source / "config.json").read_bytes())
        _scaled(source / weights, path / weights, 1.0 + 0.01 * number)
    (folder / "loras").mkdir()
    lora = CHECKOUT / "assets" / "adapters" / "unet-ninth-colour.safetensors"
    for number, name in enumerate(loras):
        lora_paths.append(folder / "loras" / f"{name}.safetensors")
        _scaled(lora, lora_paths[-1], 1.0 - number / len(loras))
    return net_paths, lora_paths


def _scaled(source: Path, target: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: factor * tensor for name, tensor in load_file(source).items()}, target)


def with_adapters(edits: Sequence[Edit], size: int) -> list[Edit]:
    """Return the edits with as many ControlNets and LoRAs as the calls of Katz's service B; popular
    ones are more frequent. The control pictures are drawn.
    """
    rng = np.random.default_rng(0)
    counts = [draw_numbers(shares, len(edits), rng) for shares in (SERVICE.nets, SERVICE.loras)]
    most = [len(SERVICE.nets) - 1, len(SERVICE.loras) - 1]
    calls = [draw_calls(SERVICE, 4 * n * len(edits), seed) for seed, n in enumerate(most)]
    pictures = [encode_png(_outline(size, rng)) for _ in NETS]
    adapted = []
    for edit, net_count, lora_count in zip(edits, *counts, strict=True):
        nets, loras = (
            _distinct(drawn, names, count)
            for drawn, names, count in zip(
                calls, (NETS, LORAS), (net_count, lora_count), strict=True
            )
        )
        settings = dict(edit.settings)
        if nets:
            settings["controls"] = [{"name": name} for name in nets]
        if loras:
            settings["loras"] = [{"name": name, "scale": 0.8} for name in loras]
        control = tuple(pictures[NETS.index(name)] for name in nets)
        adapted.append(replace(edit, settings=settings, control=control))
    return adapted


def _distinct(calls: list[int], names: Sequence[str], count: int) -> list[str]:
    """Take calls until they name `count` adapters; those beyond the popular ones stand for one of
    these.
    """
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[names[calls.pop() % len(names)]] = None
    return list(chosen)


def _outline(size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Draw a white ring on black, [size, size, 3]."""
    y, x = np.mgrid[:size, :size] - rng.uniform(0.3, 0.7, 2)[:, None, None] * size
    ring = np.abs(np.hypot(x, y) - rng.uniform(0.15, 0.3) * size) < size / 32
    return np.repeat((ring * np.uint8(255))[..., None], 3, axis=2)
