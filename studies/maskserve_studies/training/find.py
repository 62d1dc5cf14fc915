"""Train `find`, a small CLIPSeg that masks a named object ("a red star"), or judge it.

The tokenizer and the text encoder are the demo model's. They know the words already and stay as
they are. The projection, the picture's encoder and the decoder learn. A linear head must read the
colour and shape that cover each patch. So the encoder learns to see long before the decoder has
learnt to choose. The head is not part of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPSegProcessor,
    CLIPTextModel,
    CLIPTokenizer,
    ViTImageProcessor,
)

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import phrase
from maskserve_studies.demo_model.named_scenes import NamedScene, draw_named
from maskserve_studies.demo_model.node_judges import SIDE, find_iou
from maskserve_studies.training.loop import Step, Training, node_options
from maskserve_studies.training.vae import to_tensor

FOLDER: Final = CHECKOUT / "assets" / "nodes" / "find"
_PATCH: Final = 8
_WIDTH: Final = 96
_DECODER_LAYERS: Final = (0, 1, 2)
"""Layers whose outputs the decoder reads."""
_SCENES: Final = 12
_NAMES: Final = 3
"""Names per scene of a batch."""
_HINT: Final = 0.3  # weight of the head's loss
_NUMBERS: Final = len(COLOURS) + len(SHAPES) + 2  # one more number of each kind for none


def new_model(tokenizer: CLIPTokenizer) -> CLIPSegForImageSegmentation:
    """An untrained model with the demo model's text encoder."""
    text = CLIPTextModel.from_pretrained(DEMO_MODEL / "text_encoder")
    config = CLIPSegConfig(
        text_config={
            **text.config.to_dict(),
            "model_type": "clipseg_text_model",
            "_name_or_path": "",  # else it holds the path of this checkout
        },
        vision_config={
            "hidden_size": _WIDTH,
            "intermediate_size": 3 * _WIDTH,
            "num_hidden_layers": len(_DECODER_LAYERS),
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": _PATCH,
        },
        projection_dim=64,
        extract_layers=list(_DECODER_LAYERS),
        reduce_dim=64,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=192,
    )
    config.text_config.eos_token_id = tokenizer.eos_token_id
    model = CLIPSegForImageSegmentation(config)
    weights = {name.removeprefix("text_model."): x for name, x in text.state_dict().items()}
    model.clip.text_model.load_state_dict(weights, strict=False)
    model.clip.text_model.requires_grad_(False)
    return model


class Learner(nn.Module):
    """The model and its training head."""

    def __init__(self, model: CLIPSegForImageSegmentation, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.model, self._tokenizer = model, tokenizer
        self.head = nn.Linear(_WIDTH, _NUMBERS)

    def loss(self, rng: np.random.Generator) -> torch.Tensor:
        """Loss of a random batch: cross entropy and overlap of masks, and the head's loss."""
        scenes = [draw_named(rng, (SIDE, SIDE)) for _ in range(_SCENES)]
        queries = [query for scene in scenes for query in _queries(rng, scene)]
        pictures = to_tensor([scene.picture for scene in scenes])
        hidden_states = self.model.clip.vision_model(
            pictures, output_hidden_states=True
        ).hidden_states
        layer_states = [
            hidden_states[i + 1].repeat_interleave(_NAMES, dim=0) for i in _DECODER_LAYERS
        ]
        words = [phrase(rng, colour, shape) for _, colour, shape in queries]
        ids = self._tokenizer(words, padding="longest", return_tensors="pt").input_ids
        names = self.model.clip.get_text_features(ids).pooler_output
        logits = self.model.decoder(layer_states, names).logits
        right = torch.from_numpy(
            np.stack([scene.mask(colour, shape) for scene, colour, shape in queries])
        ).float()
        probabilities = torch.sigmoid(logits)
        shared, totals = (probabilities * right).sum((1, 2)), (probabilities + right).sum((1, 2))
        overlap = 1 - (2 * shared + 20) / (totals + 20)
        entropy = functional.binary_cross_entropy_with_logits(logits, right)
        return 4 * entropy + overlap.mean() + _HINT * self._hint(scenes, hidden_states[-1][:, 1:])

    def _hint(self, scenes: list[NamedScene], tokens: torch.Tensor) -> torch.Tensor:
        colours, shapes = _covering(scenes)
        logits = self.head(functional.layer_norm(tokens, tokens.shape[-1:])).flatten(0, 1)
        colour_logits, shape_logits = logits.split([len(COLOURS) + 1, len(SHAPES) + 1], dim=1)
        return functional.cross_entropy(colour_logits, colours) + functional.cross_entropy(
            shape_logits, shapes
        )


def _queries(rng: np.random.Generator, scene: NamedScene) -> list[tuple[NamedScene, str, str]]:
    """Names of things in the scene, and one name that shares at most its colour or its shape with a
    thing.
    """
    thing_names = [(x.colour, x.shape) for x in scene.things]
    names = [thing_names[int(i)] for i in rng.permutation(len(thing_names))[: _NAMES - 1]]
    while len(names) < _NAMES:
        colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        if thing_names and rng.random() < 0.6:
            near = thing_names[int(rng.integers(len(thing_names)))]
            colour, shape = (near[0], shape) if rng.random() < 0.5 else (colour, near[1])
        names.append((colour, shape))
    return [(scene, colour, shape) for colour, shape in names]


def _covering(scenes: list[NamedScene]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the colour and of the shape that cover most of each patch. The last number means
    none.
    """
    grid = SIDE // _PATCH
    colours = np.full((len(scenes), grid, grid), len(COLOURS))
    shapes = np.full((len(scenes), grid, grid), len(SHAPES))
    for i, scene in enumerate(scenes):
        for thing in scene.things:
            share = thing.covers.reshape(grid, _PATCH, grid, _PATCH).mean((1, 3))
            colours[i][share > 0.2] = list(COLOURS).index(thing.colour)
            shapes[i][share > 0.2] = SHAPES.index(thing.shape)
    return torch.from_numpy(colours.reshape(-1)), torch.from_numpy(shapes.reshape(-1))


def train(folder: Path, checkpoint: Path, seconds: float, rate: float) -> None:
    """Train for this much CPU time in all, and write the model on the way and at the end."""
    tokenizer = CLIPTokenizer.from_pretrained(DEMO_MODEL / "tokenizer")
    model = new_model(tokenizer)
    learner = Learner(model, tokenizer)
    optimiser = torch.optim.AdamW(
        [p for p in learner.parameters() if p.requires_grad], lr=rate, weight_decay=0.01
    )
    images = ViTImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )

    def save() -> None:
        model.save_pretrained(folder)
        CLIPSegProcessor(images, tokenizer).save_pretrained(folder)

    def take(step: int, progress: float) -> Step:
        loss = learner.loss(np.random.default_rng([11, step]))
        return Step(loss, samples=_SCENES, value=loss.item())

    Training(
        "find", learner, [optimiser], seconds, rate, warm_up=100, checkpoint=checkpoint, save=save
    ).run(take)


def main() -> int:
    parser = node_options(__doc__.split("\n\n")[0], FOLDER, minutes=50, rate=1.5e-3)
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N scenes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.judge:
        print(f"find: mean IoU {find_iou(args.out, args.judge):.3f} over {args.judge} scenes")
        return 0
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train(args.out, args.checkpoint, args.minutes * 60, args.rate)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
