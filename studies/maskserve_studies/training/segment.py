"""Train `segment`, a small SAM that masks the clicked object, or judge it.

It sees a picture in patches of eight pixels and gives one mask for each prompt. Most training
prompts are one click on a thing. Some are clicks on and beside it, or a box. A click on the
background asks for the whole background.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamProcessor,
    SamPromptEncoderConfig,
    SamVisionConfig,
)
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.scenes import Mask
from maskserve_studies.demo_model.named_scenes import NamedScene, draw_named
from maskserve_studies.demo_model.node_judges import SIDE, click_iou
from maskserve_studies.training.loop import Step, Training, node_options
from maskserve_studies.training.muon import optimisers
from maskserve_studies.training.vae import to_tensor

FOLDER: Final = CHECKOUT / "assets" / "nodes" / "segment"
_PATCH: Final = 8
_WIDTH: Final = 96
_SPREAD: Final = 2.0
"""Standard deviation of the positions' frequencies. It decides how near two places look alike."""
_SCENES: Final = 12
_PROMPTS: Final = 3
"""Prompts per scene of a batch."""


class Prompts(NamedTuple):
    """The prompts of a batch: P prompts for each of its B scenes."""

    model_inputs: dict[str, torch.Tensor]
    """Arguments for SamModel: points [B, P, n, 2] and their labels, or boxes [B, P, 4]."""
    right: torch.Tensor
    """The right masks [B, P, SIDE, SIDE], 0 or 1."""


def new_model() -> SamModel:
    """An untrained model."""
    config = SamConfig(
        vision_config=SamVisionConfig(
            hidden_size=_WIDTH,
            output_channels=_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=_PATCH,
            mlp_dim=3 * _WIDTH,
            use_rel_pos=False,
            window_size=0,
            global_attn_indexes=[0, 1, 2],
            num_pos_feats=_WIDTH // 2,
        ),
        prompt_encoder_config=SamPromptEncoderConfig(
            hidden_size=_WIDTH, image_size=SIDE, patch_size=_PATCH, mask_input_channels=4
        ),
        mask_decoder_config=SamMaskDecoderConfig(
            hidden_size=_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_downsample_rate=1,
            mlp_dim=2 * _WIDTH,
            num_multimask_outputs=1,
            iou_head_hidden_dim=_WIDTH,
        ),
    )
    model = SamModel(config)
    places = model.shared_image_embedding.positional_embedding
    torch.nn.init.normal_(places, std=_SPREAD)
    places.requires_grad_(False)
    layers = model.mask_decoder.transformer
    for attention in (
        *(layer.cross_attn_token_to_image for layer in layers.layers),
        layers.final_attn_token_to_image,
    ):
        # A click attends to its own place from the first step on, because equal places look alike.
        for projection in (attention.q_proj, attention.k_proj):
            torch.nn.init.eye_(projection.weight)
    return model


def new_processor() -> SamProcessor:
    """The processor that turns a picture of any size, and its clicks, into the model's inputs."""
    square, longest = {"height": SIDE, "width": SIDE}, {"longest_edge": SIDE}
    images = SamImageProcessorPil(
        size=longest, mask_size=longest, pad_size=square, mask_pad_size=square,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    return SamProcessor(images)


class Likeness(nn.Module):
    """A training hint, not part of the model: the likeness between the encoder's patches and the
    clicked patch. Without it the decoder learns late or never to look at the click.
    """

    def __init__(self, model: SamModel) -> None:
        super().__init__()
        self.project = nn.Linear(_WIDTH, _WIDTH)
        self._patches = torch.empty(0)
        model.vision_encoder.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._patches = output.last_hidden_state

    def loss(self, model_inputs: dict[str, torch.Tensor], right: torch.Tensor) -> torch.Tensor:
        """Cross entropy; 0 for prompts with boxes.

        Args:
            model_inputs: the field of `Prompts`.
            right: the field of `Prompts`.
        """
        if "input_points" not in model_inputs:
            return torch.zeros(())
        channels_last = self._patches.permute(0, 2, 3, 1).flatten(1, 2)
        patches = self.project(functional.layer_norm(channels_last, (_WIDTH,)))
        column, row = (model_inputs["input_points"][:, :, 0] // _PATCH).long().unbind(2)
        number = (row * (SIDE // _PATCH) + column)[..., None].expand(-1, -1, _WIDTH)
        likeness = patches.gather(1, number) @ patches.transpose(1, 2) * _WIDTH**-0.5
        shares = functional.avg_pool2d(right, _PATCH).flatten(2)
        return functional.binary_cross_entropy_with_logits(likeness, shares)


def loss_of(
    model: SamModel, hint: Likeness, rng: np.random.Generator
) -> tuple[torch.Tensor, float]:
    """The loss of a random batch, and the mean IoU of its masks. The loss adds cross entropy and
    overlap of masks, the error of the model's own IoU scores, and the hint's loss.
    """
    scenes = [_draw_scene(rng) for _ in range(_SCENES)]
    pictures = torch.stack([_padded(to_tensor([scene.picture])[0]) for scene in scenes])
    model_inputs, right = _prompts(rng, scenes)
    answer = model(pixel_values=pictures, **model_inputs)
    logits = answer.pred_masks[:, :, 0]
    hint_loss = hint.loss(model_inputs, right)
    right = functional.adaptive_avg_pool2d(right, logits.shape[-1])
    probabilities = torch.sigmoid(logits)
    shared, totals = (probabilities * right).sum((2, 3)), (probabilities + right).sum((2, 3))
    overlap = 1 - (2 * shared + 1) / (totals + 1)
    entropy = functional.binary_cross_entropy_with_logits(logits, right)
    with torch.no_grad():
        predicted, is_inside = logits > 0, right > 0.5
        fits = (predicted & is_inside).sum((2, 3)) / (predicted | is_inside).sum((2, 3)).clamp(
            min=1
        )
    wrong = functional.mse_loss(answer.iou_scores[:, :, 0], fits)
    return 4 * entropy + overlap.mean() + 0.3 * wrong + hint_loss, fits.mean().item()


def _draw_scene(rng: np.random.Generator) -> NamedScene:
    """A scene with at least one thing. Every third scene is lower or narrower than the model's
    square.
    """
    size = [SIDE, SIDE]
    if rng.random() < 1 / 3:
        size[int(rng.integers(2))] = int(rng.integers(SIDE // 2, SIDE))
    while True:
        scene = draw_named(rng, (size[0], size[1]))
        if scene.things:
            return scene


def _padded(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., h, w] in the upper left corner of the model's square of zeros."""
    height, width = x.shape[-2:]
    return functional.pad(x, (0, SIDE - width, 0, SIDE - height))


def _prompts(rng: np.random.Generator, scenes: list[NamedScene]) -> Prompts:
    kind = str(rng.choice(["click", "clicks", "box"], p=[0.75, 0.1, 0.15]))
    masks = [[_target(rng, scene) for _ in range(_PROMPTS)] for scene in scenes]
    right = torch.stack(
        [
            torch.stack([_padded(torch.from_numpy(x).float()) for x in scene_masks])
            for scene_masks in masks
        ]
    )
    if kind == "box":
        boxes = [[_box(rng, x) for x in scene_masks] for scene_masks in masks]
        return Prompts({"input_boxes": torch.tensor(boxes, dtype=torch.float32)}, right)
    labels = [1] if kind == "click" else [1, int(rng.integers(2))]
    clicks = [[[_click(rng, x if of_it else ~x) for of_it in labels] for x in y] for y in masks]
    shape = (len(scenes), _PROMPTS, len(labels))
    model_inputs = {
        "input_points": torch.tensor(clicks, dtype=torch.float32),
        "input_labels": torch.tensor(labels).expand(shape),
    }
    return Prompts(model_inputs, right)


def _target(rng: np.random.Generator, scene: NamedScene) -> Mask:
    """A mask of a thing of the scene, or sometimes of the whole background."""
    if rng.random() < 0.08:
        return ~np.logical_or.reduce([thing.covers for thing in scene.things])
    return scene.things[int(rng.integers(len(scene.things)))].covers


def _click(rng: np.random.Generator, mask: Mask) -> tuple[int, int]:
    """x, y of a pixel of the mask."""
    rows, columns = np.nonzero(mask)
    at = int(rng.integers(len(rows)))
    return int(columns[at]), int(rows[at])


def _box(rng: np.random.Generator, mask: Mask) -> tuple[float, ...]:
    """A box round the mask as people draw one: each side is up to a tenth off."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], np.float64)
    off = 0.1 * np.tile(box[2:] - box[:2], 2) * rng.uniform(-0.3, 1, 4)
    box += off * np.array([-1, -1, 1, 1])
    height, width = mask.shape
    return tuple(np.clip(box, 0, [width, height, width, height]))


def train(folder: Path, checkpoint: Path, seconds: float, rate: float) -> None:
    """Train for this much CPU time in all, and write the model on the way and at the end."""
    model = new_model()
    hint = Likeness(model)
    module = nn.ModuleDict({"model": model, "hint": hint})
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    linear = [p for layer in layers for p in layer.parameters() if p.ndim == 2]
    fits: list[float] = []

    def save() -> None:
        model.save_pretrained(folder)
        new_processor().save_pretrained(folder)

    def take(step: int, progress: float) -> Step:
        loss, fit = loss_of(model, hint, np.random.default_rng([12, step]))
        fits.append(fit)
        return Step(loss, samples=_SCENES, value=loss.item())

    Training(
        "segment", module, optimisers(module, linear, rate), seconds, rate,
        checkpoint=checkpoint, save=save, report_text=lambda: f" IoU {np.mean(fits[-50:]):.3f}",
    ).run(take)  # fmt: skip


def main() -> int:
    parser = node_options(__doc__.split("\n\n")[0], FOLDER, minutes=110, rate=2e-3)
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N clicks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.judge:
        model_iou, disc = click_iou(args.out, args.judge)
        print(f"segment: mean IoU {model_iou:.3f} over {args.judge} clicks; a disc's {disc:.3f}")
        return 0
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train(args.out, args.checkpoint, args.minutes * 60, args.rate)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
