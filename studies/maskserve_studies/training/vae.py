"""The demo model's VAE: `factor` x `factor` pixels to a few channels.

The encoder is not trained. Its weights spell out a principal component analysis of the patches of
drawn scenes. A linear code suits such pictures well. It also makes the latents of training pictures
one matrix product, and a patch's latents independent of its neighbours. The decoder is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import nn

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import Picture, draw_object, finish, make_scene
from maskserve_studies.training.loop import Step, Training

_WHITENING: Final = 0.5  # exponent: 0 keeps the components' own spread, 1 makes them alike
_ENCODER_BIAS: Final = 200.0  # a constant beside the signal makes GroupNorm (nearly) linear
_DECODER_BIAS: Final = 20.0
_LOG_VARIANCE: Final = -12.0  # of the posterior, which is then almost a point


Crops = Callable[[np.random.Generator, int, int], list[Picture]]
"""Draws crops of one picture, given their side in pixels and their number. A VAE is made for such
pictures.
"""


def build_vae(
    latent_channels: int, resolution: int, factor: int = 4, crops: Crops | None = None
) -> AutoencoderKL:
    """A VAE with `factor` (4 or 8) pixels per latent side: encoder final, decoder untrained.

    It is made for pictures of `crops`; None: drawn scenes.
    """
    crops = crops or scene_crops(resolution)
    torch.manual_seed(0)
    channels = {4: (16, 32, 64), 8: (16, 48, 64, 128)}[factor]
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=2,
        sample_size=resolution,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    components, deviation = _principal_components(factor, latent_channels, resolution, crops)
    spread = deviation[:, None, None, None] ** _WHITENING
    _write_encoder(vae, components / spread)
    _begin_decoder(vae, components * spread)
    normalise(vae, crops)
    return vae.eval()


def _principal_components(
    factor: int, count: int, side: int, crops: Crops
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The strongest `count` patch directions (count, 3, f, f) and their deviations (count,)."""
    rng = np.random.default_rng(5)
    moment = np.zeros((3 * factor**2,) * 2)
    for _ in range(400):
        x = to_tensor(crops(rng, side, 1))
        rows = nn.functional.unfold(x, factor, stride=factor)[0].T.double().numpy()
        moment += rows.T @ rows / len(rows) / 400
    values, vectors = np.linalg.eigh(moment)
    vectors = vectors[:, ::-1][:, :count].T.reshape(count, 3, factor, factor)
    return vectors.astype(np.float32), np.sqrt(values[::-1][:count]).astype(np.float32)


@torch.no_grad()
def _write_encoder(vae: AutoencoderKL, code: NDArray[np.float32]) -> None:
    """Make the encoder compute exactly `code` (channels, 3, f, f) times each patch.

    Residual branches are zero. The down convolutions gather pixels, and the last one projects them.
    x = silu(x) - silu(-x) undoes SiLU. A large constant pair of channels undoes GroupNorm.
    """
    encoder, count = vae.encoder, len(code)
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            for parameter in module.parameters():
                parameter.zero_()
    for channel in range(3):
        encoder.conv_in.weight[channel, channel, 1, 1] = 1
    _pass_on(encoder)
    weight = torch.from_numpy(code)
    downs = [block.downsamplers[0].conv for block in encoder.down_blocks if block.downsamplers]
    channel_pixels = [
        (c, 0, 0) for c in range(3)
    ]  # the colour, row and column each channel carries
    for level, down in enumerate(downs):
        gathered: list[tuple[int, int, int]] = []
        for c, (colour, row, column) in enumerate(channel_pixels):
            for y in (0, 1):
                for x in (0, 1):
                    pixel = (colour, row + (y << level), column + (x << level))
                    if level == len(downs) - 1:
                        down.weight[:count, c, y, x] = weight[:, pixel[0], pixel[1], pixel[2]]
                    else:
                        down.weight[len(gathered), c, y, x] = 1
                    gathered.append(pixel)
        channel_pixels = gathered
    top = encoder.down_blocks[-1].resnets[0]
    groups = encoder.conv_norm_out.num_groups
    group = encoder.conv_norm_out.num_channels // groups
    share = -(-count // groups)  # signal channels of a group, beside its constants
    if 2 * share + 2 > group:
        most = groups * (group // 2 - 1)
        raise ValueError(f"latent_channels: {count} do not fit; accepted: at most {most}")
    plus = [i // share * group + i % share for i in range(count)]
    minus = [channel + share for channel in plus]
    signed = torch.zeros(encoder.conv_norm_out.num_channels, count)
    signed[plus, range(count)] = 1
    signed[minus, range(count)] = -1
    if top.conv_shortcut is not None:
        top.conv_shortcut.weight.copy_(
            nn.functional.pad(signed, (0, top.conv_shortcut.in_channels - count))[..., None, None]
        )
        for first in range(2 * share, 2 * share + groups * group, group):
            top.conv_shortcut.bias[first] = _ENCODER_BIAS
            top.conv_shortcut.bias[first + 1] = -_ENCODER_BIAS
    else:
        raise ValueError("factor: the last level must widen its channels")
    undo = _ENCODER_BIAS * (2 / group) ** 0.5
    encoder.conv_out.weight[range(count), plus, 1, 1] = undo
    encoder.conv_out.weight[range(count), minus, 1, 1] = -undo
    encoder.conv_out.bias[count:] = _LOG_VARIANCE


@torch.no_grad()
def _begin_decoder(vae: AutoencoderKL, answer: NDArray[np.float32]) -> None:
    """Start the decoder as a blurred image of patch means, so that training adds only detail.

    `answer` (channels, 3, f, f) is the linear inverse of the encoder's code. Signed copies of
    the means and a constant pair travel in the first channels of every level.
    """
    decoder = vae.decoder
    mean = torch.from_numpy(answer.mean(axis=(2, 3)).T)  # (3, channels)
    decoder.conv_in.weight[:8] = 0
    decoder.conv_in.weight[:3, :, 1, 1] = mean
    decoder.conv_in.weight[3:6, :, 1, 1] = -mean
    decoder.conv_in.bias[:8] = torch.tensor([0.0] * 6 + [_DECODER_BIAS, -_DECODER_BIAS])
    for name, module in decoder.named_modules():
        if name.endswith("conv2"):
            module.weight.zero_()
            module.bias.zero_()
        elif isinstance(module, nn.Conv2d) and ("upsamplers" in name or "shortcut" in name):
            for parameter in module.parameters():
                parameter[:8] = 0
            side = module.kernel_size[0]
            tap = torch.tensor([0.25, 0.5, 0.25]) if side == 3 else torch.ones(1)
            for c in range(8):
                module.weight[c, c] = tap[:, None] * tap
    decoder.conv_out.weight.zero_()
    decoder.conv_out.bias.zero_()
    undo = _DECODER_BIAS * (2 / (decoder.conv_norm_out.num_channels // 2)) ** 0.5
    for c in range(3):
        decoder.conv_out.weight[c, c, 1, 1] = undo
        decoder.conv_out.weight[c, 3 + c, 1, 1] = -undo


def _pass_on(encoder: nn.Module) -> None:
    """Shortcut convolutions hand the channels on unchanged."""
    for name, module in encoder.named_modules():
        if name.endswith("conv_shortcut"):
            for c in range(module.in_channels):
                module.weight[c, c] = 1


def to_tensor(pictures: list[Picture]) -> torch.Tensor:
    """uint8 (H, W, 3) pictures as one float (B, 3, H, W) batch in -1..1."""
    batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return batch.float().div_(127.5).sub_(1)


def train_decoder(
    vae: AutoencoderKL,
    folder: Path,
    seconds: float,
    *,
    batch: int = 8,
    crop: int = 64,
    crops: Crops | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train the decoder in place for this much CPU time, with the time of the runs before in
    `checkpoint`. Saves to `folder` every minute and at the end.
    """
    draw, rng = (
        crops or scene_crops(int(vae.config.sample_size)),
        np.random.default_rng(int(time.time())),
    )
    vae.train()
    vae.encoder.requires_grad_(False)

    def take(step: int, progress: float) -> Step:
        x = to_tensor([p for _ in range(batch // 2) for p in draw(rng, crop, 2)])
        z = vae.encode(x).latent_dist.mode()
        with torch.autocast("cpu", torch.bfloat16, enabled=progress < 0.85):
            output = vae.decode(z).sample
        error = output.float() - x
        loss = error.square().mean() + 0.03 * error.abs().mean()
        return Step(loss, len(x), loss.item())

    optimiser = torch.optim.AdamW(
        vae.decoder.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.0
    )
    Training(
        "vae", vae.decoder, [optimiser], seconds, 2e-3, 100, decay=0.7, save_every=60.0,
        report_every=200, checkpoint=checkpoint, save=lambda: vae.save_pretrained(folder),
    ).run(take)  # fmt: skip
    vae.eval().save_pretrained(folder)


@torch.no_grad()
def normalise(vae: AutoencoderKL, crops: Crops) -> None:
    """Set shift and scaling factor so that the latents of pictures have mean 0 and variance 1."""
    rng = np.random.default_rng(2)
    side = int(vae.config.sample_size)
    samples, batch = max(48, 256 * 128**2 // side**2), max(1, 32 * 128**2 // side**2)
    pictures = [crops(rng, side, 1)[0] for _ in range(samples)]
    latents = torch.cat(
        [vae.encode(to_tensor(pictures[i : i + batch])).latent_dist.mode()
         for i in range(0, samples, batch)]
    )  # fmt: skip
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4),
        scaling_factor=round(1 / latents.std().item(), 4),
    )
    spread = latents.std(dim=(0, 2, 3)) * vae.config.scaling_factor
    print("latent std per channel", [round(float(s), 2) for s in spread], flush=True)


def scene_crops(resolution: int) -> Crops:
    """Crops of scenes of `resolution` pixels a side, as the demo model's edits show them."""

    def draw(rng: np.random.Generator, side: int, count: int) -> list[Picture]:
        return _pictures(rng, resolution, side, count)

    return draw


def _pictures(rng: np.random.Generator, resolution: int, side: int, count: int) -> list[Picture]:
    """Crops, `side` pixels square, of one scene of `resolution` pixels.

    The scene is a finished edit, an untouched source, or a source with its region set to grey.
    """
    scene = make_scene(rng, (resolution, resolution))
    colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
    draw = rng.random()
    if draw < 0.45:
        picture = finish(scene, colour, shape)
    elif draw < 0.6:
        picture = scene.source
    else:
        picture = np.where(scene.mask[..., None], np.uint8(128), scene.source)
        if draw > 0.9:
            drawn = draw_object(picture.astype(np.float32), scene.mask, colour, shape)
            picture = drawn.astype(np.uint8)
    ys, xs = np.nonzero(scene.mask)  # crops centre near the region, whose edges matter
    limit = scene.mask.shape[0] - side
    result = []
    for at in rng.integers(len(ys), size=count):
        y = int(np.clip(ys[at] - side // 2 + rng.integers(-8, 9), 0, limit))
        x = int(np.clip(xs[at] - side // 2 + rng.integers(-8, 9), 0, limit))
        result.append(picture[y : y + side, x : x + side])
    return result
