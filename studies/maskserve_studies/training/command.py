"""Train the demo model and write it as a diffusers folder.

Stages, each skipped when its result lies in the work folder: the VAE's decoder, the text
encoders, the drawn samples, the transformer (resumes from its checkpoints). Then export.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.utils import logging

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_studies.training import data
from maskserve_studies.training.export import assemble, export
from maskserve_studies.training.flux import merged_ema, train
from maskserve_studies.training.sampler import Sampler, encode_prompts
from maskserve_studies.training.text import TEXT_PARTS, demo_language, train_text
from maskserve_studies.training.transformer import build_transformer
from maskserve_studies.training.vae import build_vae, train_decoder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--work", type=Path, default=CHECKOUT / ".cache/demo-train", help="work folder")
    add("--out", type=Path, default=DEMO_MODEL, help="folder to export to")
    add("--start", type=Path, default=None, help="diffusers folder to train on from")
    add("--resolution", type=int, default=128, help="native picture side in pixels")
    add("--factor", type=int, default=4, choices=(4, 8), help="pixels per latent side")
    add("--latent-channels", type=int, default=8, help="channels of the VAE's latents")
    add("--heads", type=int, default=4, help="attention heads of 32; width = 32 * heads")
    add("--layers", type=int, default=2, help="double-stream blocks")
    add("--single-layers", type=int, default=4, help="single-stream blocks")
    add("--scenes", type=int, default=20_000, help="square scenes to draw; 2/5 more are oblong")
    add("--vae-minutes", type=float, default=20, help="training time of the VAE's decoder")
    add("--minutes", type=float, default=90, help="CPU time of each worker; 0: samples alone")
    add("--rate", type=float, default=3e-3, help="peak learning rate")
    add("--workers", type=int, default=1, help="training processes that average weights")
    add("--worker", type=int, default=None, help="run as this worker only, do not export")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--export-only", action="store_true", help="export the latest checkpoints and stop")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    vae = _vae(args)
    text = args.work / "text"
    if not (text / "tokenizer_2").exists():
        if args.start is None:
            train_text(text, demo_language())
        else:
            for part in TEXT_PARTS:
                shutil.copytree(args.start / part, text / part)
    transformer = _transformer(args)
    pipe = assemble(vae, text, transformer)
    if not args.export_only:
        parts = [data.read_part(folder) for folder in _data(args, vae)]
        if not args.minutes:
            return 0
        helpers = [] if args.worker is not None else start_helpers(args.workers)
        worker = args.worker or 0
        train(
            transformer,
            Sampler(parts, encode_prompts(pipe), worker),
            4 * args.factor**2,
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
    transformer.load_state_dict(weights)
    export(pipe, args.out, MAX_SEQUENCE_LENGTH)
    print(f"exported to {args.out} after {samples} samples")
    return 0


def _vae(args: argparse.Namespace) -> AutoencoderKL:
    folder = args.work / "vae"
    if not (folder / "config.json").exists() and args.start is not None:
        shutil.copytree(args.start / "vae", folder)
    if not (folder / "config.json").exists():
        vae = build_vae(args.latent_channels, args.resolution, args.factor)
        train_decoder(vae, folder, args.vae_minutes * 60)
    return AutoencoderKL.from_pretrained(folder).eval()


def _transformer(args: argparse.Namespace) -> FluxTransformer2DModel:
    if args.start is not None:
        return FluxTransformer2DModel.from_pretrained(args.start / "transformer")
    torch.manual_seed(0)
    return build_transformer(
        args.latent_channels, args.factor, args.heads, args.layers, args.single_layers
    )


def _data(args: argparse.Namespace, vae: AutoencoderKL) -> list[Path]:
    """Folders of drawn samples: square, landscape and portrait, of about equal area."""
    side, token = args.resolution, 2 * args.factor
    long, short = round(side * 1.2 / token) * token, round(side / 1.2 / token) * token
    for seed, (size, share) in enumerate(
        [((side, side), 1.0), ((short, long), 0.2), ((long, short), 0.2)]
    ):
        for kind, part in (("plain", 1.0), ("relations", 1.0), ("structures", 0.4)):
            folder = args.work / "data" / f"{kind}-{size[0]}x{size[1]}"
            data.write_part(vae, folder, kind, size, int(args.scenes * share * part), seed)
    return sorted(marker.parent for marker in (args.work / "data").glob("*/done"))


def start_helpers(workers: int) -> list[subprocess.Popen[bytes]]:
    """Start the running command again, once for each worker but the first."""
    name = sys.argv[0].split()[-1]  # scripts/bench stands before it
    command = [sys.executable, str(CHECKOUT / "scripts" / "bench"), name, *sys.argv[1:]]
    return [subprocess.Popen([*command, "--worker", str(i)]) for i in range(1, workers)]
