"""ComfyUI: an edit by a maskserve server, as a node.

Put this folder, or a link to it, into ComfyUI's `custom_nodes`, and `pip install CHECKOUT` of
maskserve where ComfyUI runs; the server may be anywhere.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from maskserve_client import Client, Final, Progress

try:  # inside of ComfyUI
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar
except ImportError:
    ProgressBar = None

_MOST_SEEDS = 2**53
_AT_A_TIME = 16


class MaskserveEdit:
    """Repaints the masked part of a picture; the rest stays unchanged."""

    CATEGORY = "maskserve"
    DESCRIPTION = __doc__
    FUNCTION = "edit"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        seeds = {"default": 0, "min": 0, "max": _MOST_SEEDS - 1, "control_after_generate": True}
        about = "settings of an edit as JSON, such as num_inference_steps or loras"
        return {
            "required": {
                "image": ("IMAGE",),
                "mask": ("MASK",),
                "prompt": ("STRING", {"multiline": True}),
                "seed": ("INT", seeds),
                "url": ("STRING", {"default": "localhost:8081", "tooltip": "HOST:PORT of gRPC"}),
            },
            "optional": {
                "settings": ("STRING", {"default": "{}", "multiline": True, "tooltip": about}),
                "key": (
                    "STRING",
                    {"default": "", "tooltip": "API key of the router"},
                ),
            },
        }

    def edit(
        self,
        image: torch.Tensor,
        mask: torch.Tensor,
        prompt: str,
        seed: int,
        url: str,
        settings: str = "{}",
        key: str = "",
    ) -> tuple[torch.Tensor]:
        """Edit the pictures of a batch at the same time, so that their steps share the server's
        batch.

        Args:
            image: [B, H, W, 3] from 0 to 1.
            mask: [1 or B, H, W] from 0 to 1; values from 0.5 on are edited, or with `mask_mode:
                strength` in proportion.
            prompt: what to paint there.
            seed: seed of the first picture; the others use the following numbers.
            url: gRPC address of a worker or router.
            settings: further settings, as JSON.
            key: API key of the router.
        """
        given = {"seed": seed, "mask_mode": "white", **json.loads(settings)}
        pictures = (image.cpu().numpy() * 255).round().clip(0, 255).astype(np.uint8)
        masks = (mask.cpu().numpy() * 255).round().clip(0, 255).astype(np.uint8)
        done: dict[int, tuple[int, int]] = {}
        bar = None if ProgressBar is None else ProgressBar(100)
        with Client(url, headers={"x-api-key": key} if key else {}) as client:

            def one(number: int) -> Any:
                own = {**given, "seed": given["seed"] + number}
                where = masks[min(number, len(masks) - 1)]
                for event in client.edit_stream(pictures[number], where, prompt, **own):
                    if bar is not None:  # an interrupt leaves the stream, which cancels the edit
                        throw_exception_if_processing_interrupted()
                    if bar is not None and isinstance(event, Progress):
                        done[number] = event.step, event.steps
                        step, steps = (sum(each) for each in zip(*done.values(), strict=True))
                        bar.update_absolute(step, steps)
                    if isinstance(event, Final):
                        return np.asarray(event.result.image.convert("RGB"))
                raise RuntimeError("the stream ended without a picture")

            with ThreadPoolExecutor(_AT_A_TIME) as threads:
                made = np.stack(list(threads.map(one, range(len(pictures)))))
        return (torch.from_numpy(made.astype(np.float32) / 255),)


NODE_CLASS_MAPPINGS = {"MaskserveEdit": MaskserveEdit}
NODE_DISPLAY_NAME_MAPPINGS = {"MaskserveEdit": "maskserve: edit"}
