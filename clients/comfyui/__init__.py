"""ComfyUI: edits and pictures by a maskserve server, as nodes.

Put this folder, or a link to it, into ComfyUI's `custom_nodes`, and `pip install CHECKOUT` of
maskserve where ComfyUI runs; the server may be anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from maskserve_client import Client, Final, Progress

try:  # inside of ComfyUI
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar
    from folder_paths import get_filename_list
except ImportError:
    ProgressBar = get_filename_list = None

_MOST_SEEDS = 2**53
_AT_A_TIME = 16
_PROMPT = ("STRING", {"multiline": True})
_SEED = (
    "INT",
    {"default": 0, "min": 0, "max": _MOST_SEEDS - 1, "control_after_generate": True},
)
_URL = ("STRING", {"default": "localhost:8081", "tooltip": "HOST:PORT of gRPC"})
_ABOUT_SETTINGS = "settings of an edit as JSON, such as num_inference_steps or loras"
_LORAS = "MASKSERVE_LORAS"
_OPTIONAL = {
    "loras": (_LORAS,),
    "settings": ("STRING", {"default": "{}", "multiline": True, "tooltip": _ABOUT_SETTINGS}),
    "key": ("STRING", {"default": "", "tooltip": "API key of the router"}),
}


_REFERENCES = ("references", "references_2", "references_3")
"""Inputs for pictures that the model sees beside the edited one; those of a batch have one size."""


class MaskserveEdit:
    """Repaints the masked part of a picture; the rest stays unchanged. Without a mask, edits the
    whole picture, with models that do. References are further pictures that the prompt may name,
    with models that see several.
    """

    CATEGORY = "maskserve"
    DESCRIPTION = __doc__
    FUNCTION = "edit"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {"image": ("IMAGE",), "prompt": _PROMPT, "seed": _SEED, "url": _URL},
            "optional": {
                "mask": ("MASK",),
                **dict.fromkeys(_REFERENCES, ("IMAGE",)),
                **_OPTIONAL,
            },
        }

    def edit(
        self,
        image: torch.Tensor,
        prompt: str,
        seed: int,
        url: str,
        mask: torch.Tensor | None = None,
        settings: str = "{}",
        key: str = "",
        loras: Sequence[dict[str, Any]] = (),
        **references: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        """Edit the pictures of a batch at the same time, so that their steps share the server's
        batch.

        Args:
            image: [B, H, W, 3] from 0 to 1.
            prompt: what to paint there; without a mask, what to change.
            seed: seed of the first picture; the others use the following numbers.
            url: gRPC address of a worker or router.
            mask: [1 or B, H, W] from 0 to 1; values from 0.5 on are edited, or with `mask_mode:
                strength` in proportion. None: all of the picture.
            settings: further settings, as JSON.
            key: API key of the router.
            loras: LoRAs beside those of the settings (`MaskserveLora`).
            references: pictures that the model sees beside each edited one, a batch for an input.
        """
        pictures = _levels(image)
        batches = [references[name] for name in _REFERENCES if name in references]
        further = [picture for batch in batches if batch is not None for picture in _levels(batch)]
        if mask is None:
            edits = [_Edit(picture, None, further) for picture in pictures]
            return _made(url, key, edits, prompt, _settings(settings, loras, seed=seed))
        masks = _levels(mask)
        edits = [
            _Edit(picture, masks[min(number, len(masks) - 1)], further)
            for number, picture in enumerate(pictures)
        ]
        of_masks = _settings(settings, loras, seed=seed, mask_mode="white")
        return _made(url, key, edits, prompt, of_masks)


class MaskserveGenerate:
    """Makes pictures from a text alone, with models that do."""

    CATEGORY = "maskserve"
    DESCRIPTION = __doc__
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        about = "auto: the model's own size; or WIDTHxHEIGHT, in multiples of the model's grid"
        return {
            "required": {
                "prompt": _PROMPT,
                "size": ("STRING", {"default": "auto", "tooltip": about}),
                "pictures": ("INT", {"default": 1, "min": 1, "max": _AT_A_TIME}),
                "seed": _SEED,
                "url": _URL,
            },
            "optional": _OPTIONAL,
        }

    def generate(
        self,
        prompt: str,
        size: str,
        pictures: int,
        seed: int,
        url: str,
        settings: str = "{}",
        key: str = "",
        loras: Sequence[dict[str, Any]] = (),
    ) -> tuple[torch.Tensor]:
        """Make pictures at the same time.

        Args:
            prompt: what to show.
            size: "auto" or "WIDTHxHEIGHT".
            pictures: how many.
            seed: seed of the first picture; the others use the following numbers.
            url: gRPC address of a worker or router.
            settings: further settings, as JSON.
            key: API key of the router.
            loras: LoRAs beside those of the settings (`MaskserveLora`).
        """
        edits = [_Edit(None, None)] * pictures
        shared = _settings(settings, loras, seed=seed, size=size)
        return _made(url, key, edits, prompt, shared)


class MaskserveLora:
    """Chooses one of ComfyUI's LoRA files for maskserve's nodes. The server reads it from the same
    folder (`maskserve serve --adapters models/loras`). Several stand one behind the other.
    """

    CATEGORY = "maskserve"
    DESCRIPTION = __doc__
    FUNCTION = "chosen"
    RETURN_TYPES = (_LORAS,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        files = [] if get_filename_list is None else get_filename_list("loras")
        scale = {"default": 1.0, "min": -4.0, "max": 4.0, "step": 0.05}
        return {
            "required": {"file": (files,), "scale": ("FLOAT", scale)},
            "optional": {"loras": (_LORAS,)},
        }

    def chosen(
        self, file: str, scale: float, loras: Sequence[dict[str, Any]] = ()
    ) -> tuple[tuple[dict[str, Any], ...]]:
        """Return the LoRAs with one more.

        Args:
            file: its path in ComfyUI's folder, which the server calls `A--B` for A/B.safetensors.
            scale: its strength.
            loras: those before it.
        """
        path = PureWindowsPath(file)  # ComfyUI joins folders as its system does
        return ((*loras, {"name": "--".join((*path.parts[:-1], path.stem)), "scale": scale}),)


class _Edit(NamedTuple):
    """The pictures of an edit, uint8; None: it has none."""

    picture: npt.NDArray[np.uint8] | None
    mask: npt.NDArray[np.uint8] | None
    references: Sequence[npt.NDArray[np.uint8]] = ()


def _levels(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return values from 0 to 1 as levels from 0 to 255."""
    return (values.cpu().numpy() * 255).round().clip(0, 255).astype(np.uint8)


def _settings(text: str, loras: Sequence[dict[str, Any]], **defaults: Any) -> dict[str, Any]:
    """Return settings over their defaults, with further LoRAs behind their own."""
    settings = {**defaults, **json.loads(text)}
    return {**settings, "loras": [*settings.get("loras", ()), *loras]} if loras else settings


def _made(
    url: str, key: str, edits: list[_Edit], prompt: str, settings: dict[str, Any]
) -> tuple[torch.Tensor]:
    """Return the pictures of edits that run at the same time: [B, H, W, 3] from 0 to 1.

    Args:
        url: gRPC address of a worker or router.
        key: API key of the router; empty: none.
        edits: the pictures of each.
        prompt: prompt of all.
        settings: settings of all; each edit's seed is `seed` plus its number.
    """
    done: dict[int, tuple[int, int]] = {}
    bar = None if ProgressBar is None else ProgressBar(100)
    with Client(url, headers={"x-api-key": key} if key else {}) as client:

        def one(number: int) -> Any:
            own = {**settings, "seed": settings["seed"] + number}
            picture, mask, references = edits[number]
            for event in client.edit_stream(picture, mask, prompt, images=references, **own):
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
            made = np.stack(list(threads.map(one, range(len(edits)))))
    return (torch.from_numpy(made.astype(np.float32) / 255),)


NODE_CLASS_MAPPINGS = {
    "MaskserveEdit": MaskserveEdit,
    "MaskserveGenerate": MaskserveGenerate,
    "MaskserveLora": MaskserveLora,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "MaskserveEdit": "maskserve: edit",
    "MaskserveGenerate": "maskserve: generate",
    "MaskserveLora": "maskserve: LoRA",
}
