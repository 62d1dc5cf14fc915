"""Train the demo edit model, a small FLUX.2 klein, and write it as a diffusers folder.

Its VAE is the demo model's, with batch-norm statistics. Its text encoder is trained first, then
frozen. The transformer then learns to change the object that a prompt names in a reference picture
(demo_model/reference_edits.py). Each stage continues from its checkpoint in the work folder.

    OMP_NUM_THREADS=1 python scripts/bench train_demo_edit
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.utils import logging
from PIL import Image
from torch import nn
from torch.nn import functional

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_EDIT, DEMO_MODEL
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_studies.demo_model.captioned_pictures import (
    draw_captioned_picture,
    held_out_pictures,
)
from maskserve_studies.demo_model.evaluation import verdicts_of
from maskserve_studies.demo_model.reference_edits import (
    MAX_LENGTH,
    PlacedObject,
    answer_of,
    make_object_scene,
    named_edits,
)
from maskserve_studies.training.attention import FusedMatmulAttention, MatmulAttention
from maskserve_studies.training.data import linear_code
from maskserve_studies.training.edit_text import (
    ENCODER_LAYERS,
    WIDTH,
    build_encoder,
    build_tokenizer,
    draw_wish,
    ids_of,
    states_of,
    train_encoder,
)
from maskserve_studies.training.export import export
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.transformer import optimisers, pack, sample_times
from maskserve_studies.training.vae import to_tensor

FACTOR: Final = 4  # pixels a side of a latent of the demo's VAE
TOKEN: Final = 2 * FACTOR  # pixels
FARTHEST: Final = 21  # most rows and columns of a picture
TOKENS_PER_BATCH: Final = 2600
EMPTY_SHARE: Final = 0.08  # share of samples with an empty prompt, whose picture stays
OUTSIDE_WEIGHT: Final = 0.15  # weight of the loss on tokens that the edit does not touch
BEHIND_WEIGHT: Final = 0.4  # weight of the loss on tokens of a new picture without an object
EDIT_LATENESS: Final = 1.8  # of `sample_times`
LATENESS: Final = 1.0  # the same of new pictures, whose edges no source shows
SHEET_COLUMNS: Final = 8
REFERENCE: Final = 10  # FLUX.2's position of the reference on the first axis


@dataclass(frozen=True)
class Batch:
    """Edits of one token grid."""

    clean: torch.Tensor
    """(B, N, 32) latents of the right answers."""
    reference: torch.Tensor | None
    """(B, N, 32) latents of the sources; None: text to image."""
    prompt: torch.Tensor
    """(B, T, 3 · WIDTH) text states."""
    ids: torch.Tensor
    """(N, 4) position ids of the answer's tokens."""
    token_objects: torch.Tensor
    """(B, N, 2): colour and shape of the object at each token, -1 elsewhere."""
    new_objects: torch.Tensor
    """(B, N, 2): colour and shape of the new object at each token, -1 where there is none."""
    edited_tokens: torch.Tensor
    """(B, N): 1 at the tokens of the edited object, or of every object of a new picture."""
    offsets: torch.Tensor
    """(B, N, 3) in tokens: the way from each token to the centre of the edited object, or of the
    nearest one of a new picture, and its radius.
    """


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--work", type=Path, default=CHECKOUT / ".cache/edit-train", help="work folder")
    add("--out", type=Path, default=DEMO_EDIT, help="folder to export to")
    add("--text-minutes", type=float, default=4, help="CPU time of the text encoder")
    add("--minutes", type=float, default=145, help="CPU time of the transformer")
    add("--rate", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the samples, the noise and the times")
    add("--pictures", type=float, default=0.0, help="share of steps of text to image")
    add("--start", type=Path, default=DEMO_EDIT, help="folder that --pictures goes on from")
    add("--export-only", action="store_true", help="export the latest checkpoints and stop")
    add("--judge", type=int, default=0, help="judge so many held-out edits of --out instead")
    add("--judge-pictures", type=int, default=0, help="judge so many new pictures of --out instead")
    add("--sheet", type=Path, help="PNG file of the judged pictures, eight a row")
    add("--steps", type=int, default=20, help="of the judged edits and pictures")
    return parser.parse_args()


def build_transformer() -> Flux2Transformer2DModel:
    """An untrained transformer with 2 double and 4 single blocks, 128 wide."""
    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=len(ENCODER_LAYERS) * WIDTH,
        mlp_ratio=3.0,
        axes_dims_rope=(4, 10, 10, 8),
        guidance_embeds=False,
    )


def build_vae(kernel: tuple[torch.Tensor, torch.Tensor], old: AutoencoderKL) -> AutoencoderKLFlux2:
    """The demo's VAE, with batch-norm statistics of drawn pictures over packed channels."""
    config = old.config
    copied_keys = (
        "down_block_types", "up_block_types", "block_out_channels", "layers_per_block", "act_fn",
        "latent_channels", "norm_num_groups", "sample_size", "use_quant_conv",
        "use_post_quant_conv", "mid_block_add_attention",
    )  # fmt: skip
    vae = AutoencoderKLFlux2(**{name: config[name] for name in copied_keys})
    load_result = vae.load_state_dict(old.state_dict(), strict=False)
    if load_result.unexpected_keys or any(
        not key.startswith("bn.") for key in load_result.missing_keys
    ):
        raise ValueError(f"vae: its weights do not fit: {load_result}")
    rng = np.random.default_rng(11)
    scenes = [make_object_scene(rng, (128, 128)) for _ in range(200)]
    pictures = to_tensor([scene.drawn(scene.things) for scene in scenes])
    tokens = pack(functional.conv2d(pictures, *kernel, stride=FACTOR)).flatten(0, 1)
    vae.bn.running_mean.copy_(tokens.mean(0))
    vae.bn.running_var.copy_(tokens.var(0))
    return vae.eval()


class Sampler:
    """Draws batches of edits and of pictures."""

    def __init__(self, kernel: tuple[torch.Tensor, torch.Tensor], vae: Any, encode: Any) -> None:
        self._kernel, self._encode = kernel, encode
        self._mean = vae.bn.running_mean
        self._deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        self._known: dict[str, torch.Tensor] = {}

    def edits(self, rng: np.random.Generator, size: tuple[int, int], most: int) -> Batch:
        """Draw edits of pictures of `size` (height, width) with up to `most` objects, about
        TOKENS_PER_BATCH tokens in all.
        """
        grid = (size[0] // TOKEN, size[1] // TOKEN)
        count = max(1, TOKENS_PER_BATCH // (2 * grid[0] * grid[1] + MAX_LENGTH))
        sources, answers, prompts = [], [], []
        object_labels, answer_labels, edited_tokens, offsets = [], [], [], []
        for _ in range(count):
            scene = make_object_scene(rng, size, most)
            wish = draw_wish(rng, scene)
            empty = rng.random() < EMPTY_SHARE
            source = scene.drawn(scene.things)
            sources.append(source)
            answers.append(source if empty else answer_of(scene, wish))
            prompts.append("" if empty else wish.prompt)
            object_labels.append(_token_objects(scene.things, grid))
            becomes = None if empty else wish.becomes
            answer_labels.append(_token_objects([] if becomes is None else [becomes], grid))
            area = _covers(scene.things[wish.number], grid)
            edited_tokens.append(np.zeros_like(area) if empty else area)
            offsets.append(_place(scene.things[wish.number], grid))
        return Batch(
            self._tokens(answers),
            self._tokens(sources),
            self._prompts(prompts),
            _ids(grid, [int(rng.integers(max(1, FARTHEST - side))) for side in grid]),
            torch.from_numpy(np.stack(object_labels)).flatten(1, 2),
            torch.from_numpy(np.stack(answer_labels)).flatten(1, 2),
            torch.from_numpy(np.stack(edited_tokens)).flatten(1).float(),
            torch.from_numpy(np.stack(offsets)).flatten(1, 2).float(),
        )

    def pictures(self, rng: np.random.Generator, size: tuple[int, int]) -> Batch:
        """Draw captioned pictures of `size` (height, width), about TOKENS_PER_BATCH tokens in
        all.
        """
        grid = (size[0] // TOKEN, size[1] // TOKEN)
        count = max(1, TOKENS_PER_BATCH // (grid[0] * grid[1] + MAX_LENGTH))
        drawn = [draw_captioned_picture(rng, size) for _ in range(count)]
        labels, offsets = [], []
        for one in drawn:
            labels.append(torch.from_numpy(_token_objects(one.scene.things, grid)).flatten(0, 1))
            ways = np.stack([_place(thing, grid) for thing in one.scene.things])
            nearest = np.hypot(ways[..., 0], ways[..., 1]).argmin(0)[None, ..., None]
            offsets.append(torch.from_numpy(np.take_along_axis(ways, nearest, 0)[0]).flatten(0, 1))
        objects = torch.stack(labels)
        return Batch(
            self._tokens([one.picture for one in drawn]),
            None,
            self._prompts([one.caption for one in drawn]),
            _ids(grid, (0, 0)),
            objects,
            objects,
            (objects[..., 0] >= 0).float(),
            torch.stack(offsets).float(),
        )

    def _tokens(self, pictures: list[Any]) -> torch.Tensor:
        packed = pack(functional.conv2d(to_tensor(pictures), *self._kernel, stride=FACTOR))
        return (packed - self._mean) / self._deviation

    def _prompts(self, prompts: list[str]) -> torch.Tensor:
        new = sorted({p for p in prompts if p not in self._known})
        if new:
            self._known |= dict(zip(new, self._encode(new), strict=True))
        return torch.stack([self._known[p] for p in prompts])


def _ids(grid: tuple[int, int], begin: Sequence[int]) -> torch.Tensor:
    """Position ids (N, 4) of a grid whose first row and column have the numbers `begin`."""
    ids = torch.zeros(*grid, 4)
    ids[..., 1] = (torch.arange(grid[0]) + begin[0])[:, None]
    ids[..., 2] = torch.arange(grid[1]) + begin[1]
    return ids.view(-1, 4)


def _numbers(thing: PlacedObject) -> tuple[int, int]:
    return list(COLOURS).index(thing.colour), SHAPES.index(thing.shape)


def _place(thing: PlacedObject, grid: tuple[int, int]) -> Any:
    """Offset and radius for each token (R, C, 3), as in `Batch.offsets`."""
    rows, columns = (np.arange(side) * TOKEN + TOKEN / 2 for side in grid)
    (x, y), radius = thing.centre, np.full(grid, thing.radius)
    down, right = np.meshgrid(y - rows, x - columns, indexing="ij")
    return np.stack([down, right, radius], axis=2) / TOKEN


def _covers(thing: PlacedObject, grid: tuple[int, int]) -> Any:
    """Tokens that an object's circle touches (R, C)."""
    down, right, radius = np.moveaxis(_place(thing, grid), 2, 0)
    return np.hypot(down, right) < radius + 2 / TOKEN + 1 / 3


def _token_objects(things: Sequence[PlacedObject], grid: tuple[int, int]) -> Any:
    """Colour and shape of the object at each token (R, C, 2), -1 elsewhere."""
    labels = np.full((*grid, 2), -1)
    for thing in things:
        labels[_covers(thing, grid)] = _numbers(thing)
    return labels


class Hints(nn.Module):
    """Heads on the outputs of blocks. They predict which objects stand where, which object the
    prompt means, its centre, its new look, and the answer's latents. They are not part of the
    model. With them the model learns many times sooner which tokens to look at.
    """

    def __init__(self, model: Flux2Transformer2DModel) -> None:
        super().__init__()
        width, numbers = model.inner_dim, len(COLOURS) + len(SHAPES)
        self._outputs: dict[str, Any] = {}
        self.right: dict[str, list[float]] = defaultdict(list)
        blocks = model.single_transformer_blocks
        places = {"doubles": model.transformer_blocks[-1], "first": blocks[0], "middle": blocks[1]}
        places["late"] = blocks[2]
        for name, block in places.items():
            block.register_forward_hook(self._keeper(name))
        self.token_heads = nn.ModuleDict(
            {n: nn.Linear(width, numbers) for n in ("doubles", "first")}
        )
        self.edited_heads = nn.ModuleDict(
            {n: nn.Linear(width, 2) for n in ("doubles", "first", "middle")}
        )
        self.offset_heads = nn.ModuleDict({n: nn.Linear(width, 3) for n in ("first", "middle")})
        self.new_object_heads = nn.ModuleDict(
            {n: nn.Linear(width, numbers) for n in ("first", "middle")}
        )
        self.clean = nn.Linear(width, model.config.in_channels)

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(block: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs[name] = output

        return keep

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum of the heads' losses over the blocks that have run."""
        total = torch.zeros(())
        tokens = batch.clean.shape[1]
        job = "" if batch.reference is not None else "picture's "
        for name, output in self._outputs.items():
            image = output[1] if isinstance(output, tuple) else output[:, MAX_LENGTH:]
            image = functional.layer_norm(image.float(), image.shape[-1:])
            parts = image.split(tokens, dim=1)
            answer = parts[0]
            if name in self.token_heads and len(parts) == 2:
                total = total + self._entropy(
                    job + "token", self.token_heads[name](parts[1]), batch.token_objects
                )
            if name == "late":
                error = (self.clean(answer) - batch.clean).square().mean(dim=2)
                total = total + weighted_mean(error, batch)
                continue
            if name in self.offset_heads:
                error = (self.offset_heads[name](answer) - batch.offsets).abs().mean(dim=2)
                error = (error * batch.edited_tokens).sum() / batch.edited_tokens.sum().clamp(min=1)
                self.right[job + "offset"].append(error.item())
                total = total + error
            for part in parts:
                logits = self.edited_heads[name](part)
                targets = batch.edited_tokens.long()
                total = total + functional.cross_entropy(logits.transpose(1, 2), targets)
                is_edited = targets > 0
                if name == "middle" and is_edited.any():
                    self.right[job + "edited"].append(
                        float((logits.argmax(2) == targets)[is_edited].float().mean())
                    )
            if name in self.new_object_heads:
                total = total + self._entropy(
                    job + "new object", self.new_object_heads[name](answer), batch.new_objects
                )
        self._outputs.clear()
        return total

    def _entropy(self, head: str, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        has_label = numbers[..., 0] >= 0
        if not has_label.any():
            return torch.zeros(())
        colours, shapes = logits[has_label].split([len(COLOURS), len(SHAPES)], dim=1)
        colour, shape = numbers[has_label].unbind(1)
        is_right = (colours.argmax(1) == colour) & (shapes.argmax(1) == shape)
        self.right[head].append(float(is_right.float().mean()))
        return functional.cross_entropy(colours, colour) + functional.cross_entropy(shapes, shape)


def weighted_mean(error: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean of the errors (B, N). The edited or drawn objects have most of the weight."""
    outside = BEHIND_WEIGHT if batch.reference is None else OUTSIDE_WEIGHT
    weight = outside + (1 - outside) * batch.edited_tokens
    return (error * weight).sum() / weight.sum()


def train(
    model: Any,
    sampler: Sampler,
    work: Path,
    seconds: float,
    rate: float,
    *,
    seed: int = 0,
    pictures: float = 0.0,
) -> None:
    """Train the model.

    Args:
        model: the transformer.
        sampler: draws the samples.
        work: folder of the checkpoint.
        seconds: CPU time in all.
        rate: peak learning rate.
        seed: of the samples, the noise and the times.
        pictures: share of steps with captioned pictures without a reference. The other steps are
            edits. If it is 0, they have small pictures of one or two objects first and whole
            pictures last; else the model knows edits already.
    """
    generator = torch.Generator()
    hints = Hints(model)
    module = nn.ModuleDict({"model": model, "hints": hints})
    model.train()
    for block in model.transformer_blocks:
        block.attn.set_processor(MatmulAttention())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(FusedMatmulAttention())

    def draw_edits(rng: np.random.Generator, progress: float) -> Batch:
        draw = rng.random()
        large = 0.05 if progress < 0.5 else 0.15 if progress < 0.8 else 0.4
        size, most = ((48, 56), 1) if draw < 0.6 * (1 - progress) else ((56, 88), 2)
        if draw > 1 - large:
            size, most = ((128, 128), 4) if rng.random() < 0.6 else ((104, 152), 4)
        return sampler.edits(rng, size if rng.random() < 0.5 else size[::-1], most)

    def draw_pictures(rng: np.random.Generator) -> Batch:
        size = (128, 128) if rng.random() < 0.7 else (104, 152)
        return sampler.pictures(rng, size if rng.random() < 0.5 else size[::-1])

    def take(step: int, progress: float) -> Step:
        rng = np.random.default_rng([seed, step])
        generator.manual_seed(int(rng.integers(2**62)))
        if rng.random() < pictures:
            batch = draw_pictures(rng)
        else:
            batch = draw_edits(rng, progress if pictures == 0 else 1.0)
        lateness = LATENESS if batch.reference is None else EDIT_LATENESS
        time = sample_times(len(batch.clean), generator, lateness)
        noise = torch.randn(batch.clean.shape, generator=generator)
        hidden_states = [batch.clean + time[:, None, None] * (noise - batch.clean)]
        text_ids = torch.zeros(MAX_LENGTH, 4)
        text_ids[:, 3] = torch.arange(MAX_LENGTH)
        image_ids = [batch.ids]
        if batch.reference is not None:
            hidden_states.append(batch.reference)
            image_ids.append(batch.ids + torch.tensor([REFERENCE, 0, 0, 0]))
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(
                hidden_states=torch.cat(hidden_states, dim=1),
                timestep=time,
                encoder_hidden_states=batch.prompt,
                txt_ids=text_ids,
                img_ids=torch.cat(image_ids),
                return_dict=False,
            )[0][:, : noise.shape[1]]
        error = (velocity.float() - (noise - batch.clean)).square().mean(dim=2)
        loss = weighted_mean(error, batch)
        strength = 0.2 if progress < 0.6 else 0.05
        return Step(loss + strength * hints.loss(batch), len(noise), loss.item())

    def accuracy_report() -> str:
        return "".join(f" {head} {np.mean(last[-60:]):.2f}" for head, last in hints.right.items())

    Training(
        "edit", module, optimisers(module, rate), seconds, rate, averaged=model,
        checkpoint=work / "transformer.pt", report_text=accuracy_report, report_every=25,
    ).run(take)  # fmt: skip


def assemble(work: Path, vae: Any) -> Flux2KleinInpaintPipeline:
    """A pipeline of the trained parts. The transformer's weights are their mean over time."""
    tokenizer = build_tokenizer()
    encoder = build_encoder(tokenizer)
    _restore(work / "text.pt", "learnt", encoder, "encoder.")
    model = build_transformer()
    _restore(work / "transformer.pt", "ema", model, "")
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True
    )
    return Flux2KleinInpaintPipeline(
        scheduler, vae, encoder.eval(), tokenizer, model.eval(), is_distilled=True
    )


def _restore(path: Path, part: str, model: nn.Module, prefix: str) -> None:
    if path.exists():
        state = torch.load(path, weights_only=True)[part]
        cut = len(prefix)
        model.load_state_dict({k[cut:]: v for k, v in state.items() if k.startswith(prefix)})


def judge(folder: Path, n: int, steps: int) -> None:
    """Judge diffusers' own pipeline on held-out edits, named and relational."""
    pipe = Flux2KleinInpaintPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for name, edits in (("named", named_edits(n)), ("side", named_edits(n // 4, side=True))):
        pictures = []
        for i, edit in enumerate(edits):
            image = pipe(
                prompt=edit.prompt,
                image=Image.fromarray(edit.source),
                mask_image=Image.fromarray(edit.mask.astype(np.uint8) * 255),
                num_inference_steps=steps,
                strength=1.0,
                max_sequence_length=MAX_LENGTH,
                generator=torch.Generator("cpu").manual_seed(i),
                output_type="np",
            ).images[0]
            edited = np.rint(image * 255).astype(np.uint8)
            pictures.append(np.where(edit.mask[..., None], edited, edit.source))
        right = [
            verdict.matches(edit.colour, edit.shape)
            for edit, verdict in zip(edits, verdicts_of(edits, pictures), strict=True)
        ]
        print(f"{name}: {np.mean(right):.1%} of {len(edits)} edits right at {steps} steps")


def judge_pictures(folder: Path, n: int, steps: int, sheet: Path | None) -> None:
    """Judge diffusers' own text-to-image pipeline on captions that training never drew."""
    pipe = Flux2KleinPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    drawn_pictures = []
    for held_out in (False, True):
        right, clear = [], []
        for i, one in enumerate(held_out_pictures(n, held_out=held_out)):
            height, width = one.scene.background.shape[:2]
            [image] = pipe(
                prompt=one.caption,
                height=height,
                width=width,
                num_inference_steps=steps,
                max_sequence_length=MAX_LENGTH,
                generator=torch.Generator("cpu").manual_seed(i),
                output_type="np",
            ).images
            picture = np.rint(image * 255).astype(np.uint8)
            drawn_pictures.append(picture)
            right.append(one.shown_in(picture))
            clear.append(one.shown_in(one.picture))
        name = "objects that training did not show" if held_out else "pictures"
        print(
            f"{name}: {np.mean(right):.1%} of {n} captions followed at {steps} steps "
            f"(drawn pictures: {np.mean(clear):.1%})"
        )
    if sheet is not None:
        rows = len(drawn_pictures) // SHEET_COLUMNS
        grid = np.stack(drawn_pictures[: rows * SHEET_COLUMNS])
        grid = grid.reshape(rows, SHEET_COLUMNS, *grid.shape[1:])
        Image.fromarray(np.concatenate(np.concatenate(list(grid), axis=1), axis=1)).save(sheet)


def main() -> int:
    args = parse()
    if args.judge:
        judge(args.out, args.judge, args.steps)
        return 0
    if args.judge_pictures:
        judge_pictures(args.out, args.judge_pictures, args.steps, args.sheet)
        return 0
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        old = AutoencoderKL.from_pretrained(DEMO_MODEL / "vae").eval()
        kernel, bias = linear_code(old)
        # For the VAE's raw latents, without the demo's shift and scale.
        bias = bias / old.config.scaling_factor + (old.config.shift_factor or 0.0)
        raw = kernel / old.config.scaling_factor, bias
        vae = build_vae(raw, old)
    model = build_transformer()
    if args.pictures:
        pipe = Flux2KleinInpaintPipeline.from_pretrained(args.start)
        tokenizer, encoder, vae = pipe.tokenizer, pipe.text_encoder, pipe.vae
        model = pipe.transformer
    elif not args.export_only:
        tokenizer = build_tokenizer()
        encoder = build_encoder(tokenizer)
        train_encoder(tokenizer, encoder, 60 * args.text_minutes, args.work / "text.pt")
    if not args.export_only:
        encoder.eval().requires_grad_(False)

        @torch.no_grad()
        def encode(prompts: list[str]) -> torch.Tensor:
            states = torch.stack(states_of(encoder, *ids_of(tokenizer, prompts)), dim=1)
            return states.permute(0, 2, 1, 3).flatten(2)

        train(
            model, Sampler(raw, vae, encode), args.work, 60 * args.minutes, args.rate,
            seed=args.seed, pictures=args.pictures,
        )  # fmt: skip
    if args.pictures:
        _restore(args.work / "transformer.pt", "ema", pipe.transformer, "")
    else:
        pipe = assemble(args.work, vae)
    export(pipe, args.out, MAX_LENGTH)
    print(f"exported to {args.out}")
    return 0
