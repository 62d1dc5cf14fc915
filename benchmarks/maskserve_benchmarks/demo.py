"""Edit one masked photograph through a real Triton, from start to stop.

    python scripts/bench demo            (or: make demo)

Writes demo-output/{source,mask,edited,side_by_side}.png, checks that the picture outside the mask
is the source's, bit for bit, and says what the steps left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from tqdm import tqdm

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_client import Client, EditResult, Final, MaskserveError, Progress
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

ASSETS = CHECKOUT / "assets" / "demo"
SHEET = CHECKOUT / "docs" / "images" / "demo_model_sheet.png"
Pixels = npt.NDArray[np.uint8]


class DemoFailed(Exception):
    """The demonstration did not show the expected result; the message is one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(argv)
        image = options.image
        options.out.mkdir(parents=True, exist_ok=True)
        with Supervisor(serve_options(options)) as supervisor:
            with Client(supervisor.workers[0].grpc_url) as client:
                result = edit(client, image, options)
                compare(client, image, options, result)
            print("stopping the server", flush=True)
        show(options.out, upright(image, "RGB"), upright(options.mask, "L"), result)
        if Path(options.model).resolve() == DEMO_MODEL:
            shutil.copyfile(SHEET, options.out / SHEET.name)
            print(f"the demo model's 200 held-out edits: {options.out / SHEET.name}")
        served = os.path.relpath(options.model)
        print(f"next: .venv/bin/maskserve serve --model {served} --router", flush=True)
    except (ServeError, MaskserveError, DemoFailed, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the server is stopped", file=sys.stderr)
        return 130
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default=str(DEMO_MODEL), help="model folder")
    add("--image", type=Path, help="source picture; default: one that the model can edit")
    add("--mask", type=Path, help="white is edited")
    add("--prompt")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("demo-output"), help="folder for the pictures")
    options = parser.parse_args(argv)
    model_inputs = ASSETS / Path(options.model).name  # its prompts name objects in the picture
    inputs = model_inputs if model_inputs.is_dir() else ASSETS
    options.image = options.image or find_source(inputs)
    options.mask = options.mask or inputs / "mask.png"
    options.prompt = options.prompt or (inputs / "prompt.txt").read_text().strip()
    return options


def find_source(folder: Path) -> Path:
    sources = sorted(folder.glob("source.*"))
    if not sources:
        raise DemoFailed(f"{folder} holds no source picture")
    return sources[0]


def serve_options(options: argparse.Namespace) -> ServeOptions:
    logs = options.out / "logs"
    print(f"starting Triton with {options.model}; its log is in {logs}", flush=True)
    return ServeOptions(
        model=options.model,
        base_port=free_base_port(),
        log_dir=logs,
        entries=options.out / "entries",
    )


def edit(client: Client, image: Path, options: argparse.Namespace) -> EditResult:
    """Send the edit and show a progress bar."""
    print(f"editing {image.name}: {options.prompt!r}", flush=True)
    began = time.perf_counter()
    with tqdm(unit="step", leave=True) as bar:
        for event in client.edit_stream(image, options.mask, options.prompt, seed=options.seed):
            if isinstance(event, Progress):
                bar.total = event.steps
                bar.update(event.step - bar.n)
            elif isinstance(event, Final):
                bar.total = event.result.meta["steps"]
                bar.update(bar.total - bar.n)
                result = event.result
    seconds = time.perf_counter() - began
    timings = ", ".join(f"{name} {ms:.0f}" for name, ms in result.meta["timings_ms"].items())
    print(f"edited in {seconds:.2f} s (ms: {timings})", flush=True)
    return result


def compare(client: Client, image: Path, options: argparse.Namespace, first: EditResult) -> None:
    """Print how much the cached steps saved against the same edit with all tokens computed."""
    meta = first.meta
    total, steps = meta["total_tokens"], meta["steps"]
    if meta["cache"] not in ("hit", "own"):
        print(f"cache: {meta['cache']}; every step computed all {total} tokens")
        return
    # The first edit of a shape also prepares kernels, so both modes are timed on their second edit.
    repeats = {}
    for cache in ("off", "auto", "off", "auto"):
        repeats[cache] = client.edit(
            image, options.mask, options.prompt, seed=options.seed, cache=cache
        )
    dense, repeat_meta = repeats["off"], repeats["auto"].meta
    saved = dense.meta["timings_ms"]["denoise"] / repeat_meta["timings_ms"]["denoise"]
    difference = np.abs(np.asarray(dense.image, int) - np.asarray(first.image, int))
    inside = upright(options.mask, "L").point(lambda value: 255 * (value >= 128))
    level = difference[np.asarray(inside) > 0].mean()
    if "window" in meta:
        left, top, right, bottom = meta["window"]["box"]
        print(f"the model saw the {right - left}x{bottom - top} pixels round the mask")
    print(
        f"{meta.get('dense_steps', 0)} of {steps} steps computed all {total} tokens; of those of "
        f"all steps {meta['computed_tokens'] / (steps * total):.0%} were computed"
    )
    print(
        f"denoising took {repeat_meta['timings_ms']['denoise']:.0f} ms, with all tokens in "
        "each step "
        f"{dense.meta['timings_ms']['denoise']:.0f} ms ({saved:.1f}x); the two pictures differ by "
        f"{level:.1f} of 255 levels on average inside the mask"
    )


def upright(path: Path, mode: str) -> Image.Image:
    """Return a picture as a viewer shows it, read without the server's code."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert(mode)


def show(out: Path, source: Image.Image, mask: Image.Image, result: EditResult) -> None:
    """Check the response and write the pictures.

    Raises:
        DemoFailed: a pixel outside the mask differs, or no pixel inside differs.
    """
    edited = result.image
    pictures = {"source": source, "mask": mask, "edited": edited}
    pictures["side_by_side"] = side_by_side(source, mask, edited)
    for name, picture in pictures.items():
        picture.save(out / f"{name}.png")
    source_pixels, edited_pixels, inside = (
        np.asarray(source),
        np.asarray(edited),
        np.asarray(mask) >= 128,
    )
    if source_pixels.shape != edited_pixels.shape:
        raise DemoFailed(f"the answer is {edited_pixels.shape}, not {source_pixels.shape}")
    changed = (source_pixels != edited_pixels).any(axis=2)
    if changed[~inside].any():
        raise DemoFailed(f"{changed[~inside].sum()} pixels outside the mask differ from the source")
    if not changed[inside].any():
        raise DemoFailed("nothing inside the mask was edited")
    print(f"outside the mask: all {(~inside).sum()} pixels equal the source's")
    print(f"inside the mask: {changed[inside].sum()} of {inside.sum()} pixels were repainted")
    print("written:", ", ".join(str(out / f"{name}.png") for name in pictures))


def side_by_side(*pictures: Image.Image, gap: int = 8) -> Image.Image:
    """Return pictures of one size in a row on white."""
    width, height = pictures[0].size
    row = Image.new("RGB", (len(pictures) * (width + gap) - gap, height), "white")
    for i, picture in enumerate(pictures):
        row.paste(picture.convert("RGB"), (i * (width + gap), 0))
    return row
