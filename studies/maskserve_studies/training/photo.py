"""Train the photo model, a FLUX Fill of 512 x 512 pixels, and write it as a diffusers folder.

The stages are: photographs out of packages, the VAE, the text encoders, the transformer, then the
export. The VAE's encoder is final as built, so its decoder may learn before or after all else.
Existing results in the work folder are kept, and training resumes from checkpoints. Most samples
are windows of 192 or 256 pixels a side; whole pictures come last.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline, FluxTransformer2DModel
from diffusers.utils import logging
from torch import nn

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_benchmarks.demo_model.scenes import Picture
from maskserve_studies.photo_model.scenes import Example, Stock, draw_example
from maskserve_studies.photo_model.sources import CACHE, stock
from maskserve_studies.photo_model.words import LOOKS, THINGS, draw_prompts, phrase, words
from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.command import start_helpers
from maskserve_studies.training.data import linear_code
from maskserve_studies.training.exchange import Exchange
from maskserve_studies.training.export import assemble, export
from maskserve_studies.training.flux import merged_ema
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.text import TEXT_PARTS, Language, train_text
from maskserve_studies.training.transformer import (
    Batch,
    build_transformer,
    loss_of,
    optimisers,
    pack,
    pack_mask,
)
from maskserve_studies.training.vae import Crops, build_vae, to_tensor, train_decoder

RESOLUTION: Final = 512
STEPS: Final = 12
_FACTOR: Final = 8
_TOKEN: Final = 2 * _FACTOR  # pixels a side
_LATENT_CHANNELS: Final = 32
_HEAD_DIM: Final = 64
_HEADS, _LAYERS, _SINGLE_LAYERS = 6, 1, 9
_COUNTS: Final = {192: 12, 256: 7, RESOLUTION: 2}  # samples per batch, by pixels a side
_PHASES: Final = ((0.0, (1.0, 0.0, 0.0)), (0.4, (0.2, 0.8, 0.0)), (0.75, (0.1, 0.5, 0.4)))
"""From this progress on, batches have these shares of the sides of _COUNTS."""
_FUSED_SINCE: Final = 512  # tokens; shorter sequences train faster with plain matrix products
_AVERAGE_EVERY: Final = 10  # steps between exchanges of weights
_LATENESS: Final = 0.6  # of the sampled times: less coarse shape to learn than in drawn scenes


class PhotoSampler:
    """Draws batches of examples and encodes them like FluxFillPipeline."""

    def __init__(self, pictures: Stock, pipe: FluxFillPipeline, seed: list[int]) -> None:
        self._stock = pictures
        self._pipe = pipe
        self._kernel = linear_code(pipe.vae)
        self._rng = np.random.default_rng(seed)

    def draw(self, count: int, side: int) -> Batch:
        """`count` examples of `side` x `side` pixels, of all kinds."""
        drawn = [draw_example(self._rng, self._stock, (side, side)) for _ in range(count)]
        return self.encode(drawn, [phrase(self._rng, example.wish) for example in drawn])

    @torch.no_grad()
    def encode(self, examples: list[Example], prompts: list[str]) -> Batch:
        """These examples of one size, at a random place in a picture of the model's own size."""
        answers = to_tensor([example.answer for example in examples])
        masks = torch.from_numpy(np.stack([x.mask for x in examples]).astype(np.float32))
        latents = nn.functional.conv2d(
            torch.cat([answers, answers * (1 - masks[:, None])]), *self._kernel, stride=_FACTOR
        )
        clean, masked = pack(latents).chunk(2)
        states, pooled, _ = self._pipe.encode_prompt(
            prompt=prompts, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
        rows, columns = answers.shape[2] // _TOKEN, answers.shape[3] // _TOKEN
        free = RESOLUTION // _TOKEN
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1] = torch.arange(rows)[:, None] + self._rng.integers(max(1, free - rows + 1))
        ids[..., 2] = torch.arange(columns)[None] + self._rng.integers(max(1, free - columns + 1))
        condition = torch.cat([masked, pack_mask(masks, _FACTOR)], dim=2)
        return Batch(clean, condition, states, pooled, ids.view(-1, 3))


def train(
    model: FluxTransformer2DModel,
    sampler: PhotoSampler,
    folder: Path,
    *,
    seconds: float,
    rate: float,
    worker: int = 0,
    workers: int = 1,
) -> None:
    """Train `model` in place. The arguments are those of `flux.train`."""
    generator = torch.Generator().manual_seed(100 + worker + int(time.time()))
    rng = np.random.default_rng([worker, int(time.time())])
    exchange = Exchange(folder, worker, workers, model)
    model.train()
    model.set_attn_processor(MatmulAttention(_FUSED_SINCE))
    begin_s, cpu_begin_s, sample_count = time.monotonic(), time.process_time(), 0

    def take(step: int, progress: float) -> Step:
        nonlocal sample_count
        if workers > 1 and step and step % _AVERAGE_EVERY == 0:
            exchange.average()
        shares = next(shares for since, shares in reversed(_PHASES) if progress >= since)
        side = int(rng.choice(list(_COUNTS), p=shares))
        batch = sampler.draw(_COUNTS[side], side)
        sample_count += len(batch.clean)
        active = batch.condition[..., -4 * _FACTOR**2 :].amax(dim=2)
        loss = loss_of(model, batch, active, generator, _LATENESS)
        return Step(loss, len(batch.clean), loss.item())

    def rate_report() -> str:
        clock, cpu = time.monotonic() - begin_s, time.process_time() - cpu_begin_s
        return f" samples/s {sample_count / clock:.2f}, by CPU time {sample_count / cpu:.2f}"

    Training(
        "photo",
        model,
        optimisers(model, rate),
        seconds,
        rate,
        averaged=model,
        checkpoint=folder / f"worker{worker}.pt",
        save_every=600.0,
        report_every=10,
        report_text=rate_report,
    ).run(take)


def photo_crops(pictures: Stock) -> Crops:
    """Crops of answers, some with their region set to grey. The VAE has to code only
    such pictures.
    """

    def draw(rng: np.random.Generator, side: int, count: int) -> list[Picture]:
        size = max(side, 256)
        example = draw_example(rng, pictures, (size, size))
        picture = example.answer
        if rng.random() < 0.2:
            picture = np.where(example.mask[..., None], np.uint8(128), picture)
        top, left = rng.integers(size - side + 1, size=(2, count))
        return [picture[y : y + side, x : x + side] for y, x in zip(top, left, strict=True)]

    return draw


def main() -> int:
    args = _parse()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    pictures = None if args.export_only else stock()
    vae = _vae(args, pictures)
    if args.decoder_only:
        return 0
    text = args.work / "text"
    if not (text / "tokenizer_2").exists():
        _text(args, text)
    pipe = assemble(vae, text, _transformer(args))
    if pictures is not None:
        helpers = [] if args.worker is not None else start_helpers(args.workers)
        worker = args.worker or 0
        train(
            pipe.transformer,
            PhotoSampler(pictures, pipe, [worker, int(time.time())]),
            args.work,
            seconds=60 * args.minutes,
            rate=args.rate,
            worker=worker,
            workers=args.workers,
        )
        if args.worker is not None:
            return 0
        for helper in helpers:
            if code := helper.wait():
                return code
    weights, samples = merged_ema(args.work)
    pipe.transformer.load_state_dict(weights)
    export(pipe, args.out, MAX_SEQUENCE_LENGTH, halved=("transformer", "vae"), steps=STEPS)
    print(f"exported to {args.out} after {samples} samples")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    add: Any = parser.add_argument
    add("--work", type=Path, default=CACHE / "photo", help="work folder")
    add("--out", type=Path, default=DEMO_MODEL.with_name("demo-photo"), help="folder to export to")
    add("--start", type=Path, default=None, help="diffusers folder to train on from")
    add("--vae-minutes", type=float, default=30, help="CPU time of the decoder, of all runs")
    add("--minutes", type=float, default=360, help="CPU time of each worker, of all runs")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate")
    add("--workers", type=int, default=2, help="training processes that average weights")
    add("--worker", type=int, default=None, help="run as this worker only, do not export")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--decoder-only", action="store_true", help="train the decoder and stop")
    add("--export-only", action="store_true", help="export the latest checkpoints and stop")
    return parser.parse_args()


def _vae(args: argparse.Namespace, pictures: Stock | None) -> AutoencoderKL:
    folder = args.work / "vae"
    if not (folder / "config.json").exists() and args.start is not None:
        shutil.copytree(args.start / "vae", folder)
    if not (folder / "config.json").exists():
        crops = photo_crops(pictures or stock())
        build_vae(_LATENT_CHANNELS, RESOLUTION, _FACTOR, crops).save_pretrained(folder)
    vae = AutoencoderKL.from_pretrained(folder).float().eval()
    if pictures is not None and args.worker is None:
        seconds, checkpoint = args.vae_minutes * 60, args.work / "vae.pt"
        crops = photo_crops(pictures)
        train_decoder(vae, folder, seconds, crop=128, crops=crops, checkpoint=checkpoint)
    return vae


def _text(args: argparse.Namespace, folder: Path) -> None:
    if args.start is None:
        train_text(folder, Language(words(), len(LOOKS), len(THINGS), draw_prompts), steps=2000)
        return
    for part in TEXT_PARTS:
        shutil.copytree(args.start / part, folder / part)


def _transformer(args: argparse.Namespace) -> FluxTransformer2DModel:
    if args.start is not None:
        return FluxTransformer2DModel.from_pretrained(args.start / "transformer").float()
    torch.manual_seed(0)
    return build_transformer(_LATENT_CHANNELS, _FACTOR, _HEADS, _LAYERS, _SINGLE_LAYERS, _HEAD_DIM)
