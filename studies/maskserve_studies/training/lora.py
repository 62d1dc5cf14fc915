"""Train the demo models' LoRAs (`looks.py`) and write them as diffusers does.

Whole pictures are drawn and encoded as training goes on; only the adapter's matrices learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers.utils import logging
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import TEMPLATES
from maskserve_benchmarks.demo_model.scenes import Edit, finish, make_scene, to_bytes
from maskserve_studies.demo_model.looks import (
    LOOKS,
    colours_of,
    edits_with,
    finish_as,
    shows_look,
)
from maskserve_studies.training.bases import BASES, Base, learn

ADAPTERS: Final = CHECKOUT / "assets" / "adapters"
_BATCH: Final = 6
_PLAIN_SHARE: Final = 0.2  # share of samples with an object that the adapter must not change
_EMPTY_SHARE: Final = 0.05  # share of samples with an empty prompt, which continue the region
_IDENTITY_SHARE: Final = 0.05  # share of samples without a mask, as when a template is primed


def adapter_path(look: str, base: str, folder: Path = ADAPTERS) -> Path:
    """Path of the LoRA of a look. The demo model's LoRAs have the look's name alone."""
    return folder / (f"{look}.safetensors" if base == "flux" else f"{base}-{look}.safetensors")


def draw_sample(rng: np.random.Generator, look: str, size: tuple[int, int]) -> Edit:
    """An edit of `size` (height, width) whose right answer has the look. Some edits must not have
    it.
    """
    scene = make_scene(rng, size)
    draw = rng.random()
    if draw < _IDENTITY_SHARE:
        nothing = np.zeros_like(scene.mask)
        return Edit(scene.source, nothing, "", None, None, scene.source)
    if draw < _IDENTITY_SHARE + _EMPTY_SHARE:
        return Edit(scene.source, scene.mask, "", None, None, to_bytes(scene.background))
    shape = str(rng.choice(SHAPES))
    # A hollow object is always hollow; a ninth colour must not change the eight.
    is_plain = look == "ninth-colour" and draw < _IDENTITY_SHARE + _EMPTY_SHARE + _PLAIN_SHARE
    colour = str(rng.choice(list(COLOURS) if is_plain else colours_of(look)))
    answer = finish(scene, colour, shape) if is_plain else finish_as(look, scene, colour, shape)
    template = TEMPLATES[0 if rng.random() < 0.4 else int(rng.integers(len(TEMPLATES)))]
    text = template.format(c=colour, s=shape)
    return Edit(scene.source, scene.mask, text, colour, shape, answer)


def train(
    base: Base, look: str, seconds: float, rank: int, rate: float, out: Path, start: Path | None
) -> None:
    """Train one LoRA for this much CPU time, and write it to `out` on the way and at the end.
    Training starts from the file `start` if there is one.
    """
    base.ready_to_learn()
    model = base.denoiser
    torch.manual_seed(LOOKS.index(look))
    if start is None:
        model.add_adapter(
            LoraConfig(
                r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=base.targets
            )
        )
    else:
        base.pipe.load_lora_weights(str(start.parent), weight_name=start.name)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    model.train()

    def loss_of(
        rng: np.random.Generator, size: tuple[int, int], generator: torch.Generator
    ) -> torch.Tensor:
        samples = [draw_sample(rng, look, size) for _ in range(_BATCH)]
        return base.loss(model, samples, generator)

    learn(
        look,
        model,
        loss_of,
        lambda: save(base, out),
        seed=LOOKS.index(look) + (0 if start is None else 1000),
        seconds=seconds,
        rate=rate,
    )


def save(base: Base, path: Path) -> None:
    """Write the base's adapter in half precision, in the form that diffusers' own loader reads."""
    state = {
        k: v.half()
        for k, v in get_peft_model_state_dict(
            base.denoiser, adapter_name=base.denoiser.active_adapters()[0]
        ).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    base.pipe.save_lora_weights(
        path.parent, weight_name=path.name, **{f"{base.part}_lora_layers": state}
    )


def share_followed(base: Base, look: str, edits: int, adapter: Path | None) -> float:
    """Share of held-out edits whose object has the look, with diffusers' own pipeline. `adapter`
    None: without a LoRA.
    """
    base.pipe.set_progress_bar_config(disable=True)
    if adapter is not None:
        base.pipe.load_lora_weights(str(adapter.parent), weight_name=adapter.name)
    look_edits = edits_with(look, edits)
    pictures = base.edit(look_edits)
    verdicts = [
        shows_look(look, picture, edit) for picture, edit in zip(pictures, look_edits, strict=True)
    ]
    return sum(verdicts) / len(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("look", choices=LOOKS)
    parser.add_argument("--base", choices=list(BASES), default="flux", help="demo or demo-unet")
    parser.add_argument("--minutes", type=float, default=18, help="CPU time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--start", type=Path, help="a LoRA to train on, of any rank")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder to write to")
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N edits")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    path, base = adapter_path(args.look, args.base, args.out), BASES[args.base]()
    if args.judge:
        base_share = share_followed(base, args.look, args.judge, None)
        lora_share = share_followed(base, args.look, args.judge, path)
        print(
            f"{path.stem}: followed in {lora_share:.1%} of {args.judge} edits, "
            f"without {base_share:.1%}"
        )
    else:
        seconds = args.minutes * 60
        train(base, args.look, seconds, args.rank, args.rate, path, args.start)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
