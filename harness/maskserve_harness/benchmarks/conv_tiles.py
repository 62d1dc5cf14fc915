"""What a UNet would gain by convolving tiles round the mask alone, with cached features outside.

Counted from the true models' configurations, without weights; masks are squares, as in
`bench step`. A tile is the mask's bounding box at each level, widened by a halo:

- so many positions (`[cache] conv_halo`): what has spread farther is cut off;
- `exact`: as far as the mask's change has spread by then, so that what the picture's convolutions
  compute is computed (GroupNorm's sums apart). It is not built: it hardly pays.

Limits are dense FLOPs over cached ones, blocks run as `kv`.

    python scripts/bench conv_tiles
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from maskserve_core.models.unet import unet_work
from maskserve_core.planning.entry_bytes import FORMATS, entry_bytes, map_bytes
from maskserve_core.planning.flops import ModelWork
from maskserve_harness.benchmarks.models import SD21, SDXL

TEXT = 77


@dataclass(frozen=True)
class Convolution:
    """A convolution of one forward pass."""

    name: str
    side: int
    """Positions of its output along a side."""
    flops: float
    spread: int
    """Positions of its output to which a change has spread from the mask's edge."""

    def computed(self, mask_ratio: float) -> float:
        """Share of its output that an exact tile computes."""
        wide = math.ceil(math.sqrt(mask_ratio) * self.side) + 2 * self.spread
        return min(1.0, (wide / self.side) ** 2)


def convolutions(config: dict[str, Any]) -> list[Convolution]:
    """A UNet's convolutions, in the order they run."""
    with torch.device("meta"):
        model = UNet2DConditionModel(**config)
        side, pooled = int(config["sample_size"]), {
            "text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)
        }  # fmt: skip
        inputs = torch.zeros(1, 4, side, side), torch.zeros(1, TEXT, config["cross_attention_dim"])
    found: list[Convolution] = []

    def watch(name: str) -> Any:
        def meet(conv: nn.Conv2d, args: tuple[Tensor], out: Tensor) -> None:
            spread = found[-1].spread if found else 0
            if "upsamplers" in name:
                spread *= 2
            spread += conv.kernel_size[0] // 2
            if conv.stride[0] > 1:
                spread = math.ceil(spread / conv.stride[0])
            area = conv.kernel_size[0] * conv.kernel_size[1]
            flops = 2.0 * out[0].numel() * conv.in_channels * area
            found.append(Convolution(name, out.shape[-1], flops, spread))

        return meet

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(watch(name))
    model(inputs[0], 1, inputs[1], added_cond_kwargs=pooled)
    return found


def limits(config: dict[str, Any], masks: Sequence[float], halos: Sequence[int]) -> str:
    """Speed-up limits per mask ratio as a markdown table: as served, then with tiles."""
    work, all_of_them = _work(config), convolutions(config)
    total = sum(conv.flops for conv in all_of_them)
    dense = work.step_flops([work.row_at(1.0, TEXT)], "dense")
    names = ["exact", *(f"halo {halo}" for halo in halos)]
    lines = [_row("m", "convolutions' share", "limit as served", *names)]
    lines.append("|---" * (4 + len(halos)) + "|")
    for m in masks:
        served = work.step_flops([work.row_at(m, TEXT)], "kv")
        cells = [f"{m:.2f}", f"{total / served:.0%}", f"{dense / served:.2f}x"]
        left = sum(conv.flops * conv.computed(m) for conv in all_of_them)
        cells.append(f"{dense / (served - total + left):.2f}x")
        for halo in halos:
            tiled = _work(config, halo)
            cells.append(f"{dense / tiled.step_flops([tiled.row_at(m, TEXT)], 'kv'):.2f}x")
        lines.append(_row(*cells))
    return "\n".join(lines)


def per_level(config: dict[str, Any], mask_ratio: float) -> str:
    """Where the FLOPs of convolutions are, and how much of each level an exact tile computes."""
    all_of_them = convolutions(config)
    total = sum(conv.flops for conv in all_of_them)
    lines = [_row("level", "on the way", "share of convolutions' FLOPs", "spread", "computed")]
    lines.append("|---" * 5 + "|")
    for side in sorted({conv.side for conv in all_of_them}, reverse=True):
        for way in ("down", "mid", "up"):
            own = [conv for conv in all_of_them if conv.side == side and _way(conv) == way]
            if own:
                flops = sum(conv.flops for conv in own)
                left = sum(conv.flops * conv.computed(mask_ratio) for conv in own)
                spread = f"{own[0].spread} to {own[-1].spread}"
                share = f"{flops / total:.0%}"
                lines.append(_row(f"{side}x{side}", way, share, spread, f"{left / flops:.0%}"))
    return "\n".join(lines)


def bytes_line(config: dict[str, Any]) -> str:
    """Bytes of the maps beside what entries hold without them."""
    work, tiled = _work(config), _work(config, 1)
    held = []
    for name in ("bfloat16", "int4"):
        own = entry_bytes(work, "kv", FORMATS[name]) / 2**20
        maps = map_bytes(tiled, FORMATS[name]) / 2**20
        held.append(f"{name} {maps:.0f} beside {own:.0f} of kv")
    return "MiB per anchor of feature maps: " + ", ".join(held)


def _way(conv: Convolution) -> str:
    return {"conv_in": "down", "conv_out": "up"}.get(conv.name, conv.name.split("_")[0])


def _work(config: dict[str, Any], halo: int = 0) -> ModelWork:
    side = int(config["sample_size"])
    return unet_work(config, side, side, guidance=False, halo=halo)


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.35, 0.5])
    parser.add_argument("--halos", type=int, nargs="+", default=[8, 4, 2, 1])
    args = parser.parse_args()
    for name, config in (("SDXL 1024", SDXL), ("SD 2.1 768", SD21)):
        print(f"{name}\n\n{limits(config, args.mask_ratios, args.halos)}\n")
        print(f"m = 0.2, exact tiles:\n\n{per_level(config, 0.2)}\n\n{bytes_line(config)}\n")
    return 0
