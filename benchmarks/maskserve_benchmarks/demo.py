"""Edit one masked photograph three times through a real Triton, then eight pictures at once, beside
the same edits with all tokens and by diffusers' own pipeline.

    python scripts/bench demo            (or: make demo)

The edits are a first one and another prompt; the demo model also has one with a LoRA, and
eight different ones at once (`demo_burst`). Writes
demo-output/{source,mask,edited,side_by_side,edits}.png, checks that the picture outside the mask is
the source's, bit for bit, and prints a table of what was measured. The server has stopped when
diffusers' pipeline runs, so each has all cores for itself. All kernels have run before on a
mirrored photograph.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from tqdm import tqdm

from maskserve_benchmarks import demo_burst
from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.demo_burst import Burst
from maskserve_benchmarks.demo_sheet import CELL, GAP, SheetRow, psnr, shaded, sheet
from maskserve_benchmarks.reports import table
from maskserve_client import Client, EditResult, Final, MaskserveError, Progress
from maskserve_client.wire import ImageInput, image_bytes
from maskserve_common.errors import InvalidRequest
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

if TYPE_CHECKING:
    from maskserve_benchmarks.rivals.pipeline_model import Pipeline

ASSETS = CHECKOUT / "assets" / "demo"
SHEET = CHECKOUT / "docs" / "images" / "demo_model_sheet.png"
LORAS, LORA = CHECKOUT / "assets" / "adapters", "hollow"
"""LoRAs of the demo model, and the one that it shows."""
_COLUMNS = (demo_burst.MASKSERVE, demo_burst.ALL_TOKENS, demo_burst.DIFFUSERS)
Pixels = npt.NDArray[np.uint8]


class DemoFailed(Exception):
    """The demonstration did not show the expected result; the message is one sentence."""


class DemoEdit(NamedTuple):
    """An edit of the demonstration."""

    name: str
    prompt: str
    loras: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {"loras": [{"name": name} for name in self.loras]} if self.loras else {}


class Measured(NamedTuple):
    """A picture and the seconds until it was there."""

    picture: Image.Image
    seconds: float


class Outcome(NamedTuple):
    """Pictures of an edit, and its answer."""

    edit: DemoEdit
    result: EditResult
    by_system: dict[str, Measured]
    """In the order of `_COLUMNS`."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(argv)
        options.out.mkdir(parents=True, exist_ok=True)
        source, mask = upright(options.image, "RGB"), upright(options.mask, "L")
        rounds = demo_burst.burst_rounds() if is_demo_model(options) else []
        with Supervisor(serve_options(options)) as supervisor:
            with Client(supervisor.workers[0].grpc_url) as client:
                outcomes = edit_all(client, options, source, mask)
                if rounds:
                    print(f"{demo_burst.NAME}, in rounds", flush=True)
                    demo_burst.run_at_server(client, rounds)
            print("stopping the server", flush=True)
        show(options.out, source, mask, outcomes[0].result)
        print("the same edits by diffusers' own pipeline", flush=True)
        pipeline = diffusers_pipeline(options)
        if rounds:
            demo_burst.run_by_diffusers(pipeline, rounds)
        add_diffusers(pipeline, options, source, mask, outcomes)
        report(options.out, source, mask, outcomes, Burst(rounds) if rounds else None)
        if is_demo_model(options):
            print(
                "The demo model is so small that its steps take little of one edit's time; README, "
                '"How fast it is", has a larger one.'
            )
            shutil.copyfile(SHEET, options.out / SHEET.name)
            print(f"the demo model's 200 held-out edits: {options.out / SHEET.name}")
        served = os.path.relpath(options.model)
        print(f"next: make page MODEL={served}    # paint masks in a browser")
        print(f"      .venv/bin/maskserve serve --model {served} --router    # serve", flush=True)
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
    add("--prompt", action="append", help="of the first edit; given again, of the next")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("demo-output"), help="folder for the pictures")
    options = parser.parse_args(argv)
    model_inputs = ASSETS / Path(options.model).name  # its prompts name objects in the picture
    inputs = model_inputs if model_inputs.is_dir() else ASSETS
    options.image = options.image or find_source(inputs)
    options.mask = options.mask or inputs / "mask.png"
    prompts = options.prompt or (inputs / "prompt.txt").read_text().splitlines()
    first, second, third = (prompts[min(number, len(prompts) - 1)] for number in range(3))
    options.edits = [DemoEdit("first edit", first), DemoEdit("another prompt", second)]
    if is_demo_model(options):
        options.edits.append(DemoEdit(f"with the LoRA {LORA!r}", third, (LORA,)))
    return options


def is_demo_model(options: argparse.Namespace) -> bool:
    return Path(options.model).resolve() == DEMO_MODEL


def find_source(folder: Path) -> Path:
    sources = sorted(folder.glob("source.*"))
    if not sources:
        raise DemoFailed(f"{folder} holds no source picture")
    return sources[0]


def serve_options(options: argparse.Namespace) -> ServeOptions:
    logs, entries = options.out / "logs", options.out / "entries"
    shutil.rmtree(entries, ignore_errors=True)  # of a run before: the first edit has no template
    print(f"starting Triton with {options.model}; its log is in {logs}", flush=True)
    return ServeOptions(
        model=options.model,
        base_port=free_base_port(),
        log_dir=logs,
        entries=entries,
        adapters=str(LORAS) if is_demo_model(options) else "",
    )


def upright(path: Path, mode: str) -> Image.Image:
    """Return a picture as a viewer shows it, read without the server's code."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert(mode)


def edit_all(
    client: Client, options: argparse.Namespace, source: Image.Image, mask: Image.Image
) -> list[Outcome]:
    """Run every edit, and the same with all tokens."""
    mirrored = ImageOps.mirror(source), ImageOps.mirror(mask)
    files = image_bytes(source), image_bytes(mask)  # once, and not in each edit's time
    client.edit(*mirrored, options.edits[0].prompt, seed=options.seed)
    for edit in options.edits:
        settings = {"seed": options.seed, **edit.settings}
        client.edit(*mirrored, edit.prompt, cache="off", **settings)
        prime(client, *mirrored, edit, settings)
    outcomes = []
    for number, edit in enumerate(options.edits):
        settings = {"seed": options.seed, **edit.settings}
        if number:
            prime(client, *files, edit, settings)
        print(f"{edit.name}: {edit.prompt!r}", flush=True)
        begin = time.perf_counter()
        result = follow(client, *files, edit, settings)
        fast = Measured(result.image, time.perf_counter() - begin)
        begin = time.perf_counter()
        dense = client.edit(*files, edit.prompt, cache="off", **settings)
        whole = Measured(dense.image, time.perf_counter() - begin)
        outcomes.append(Outcome(edit, result, {_COLUMNS[0]: fast, _COLUMNS[1]: whole}))
    return outcomes


def prime(
    client: Client,
    source: ImageInput,
    mask: ImageInput,
    edit: DemoEdit,
    settings: dict[str, Any],
) -> None:
    """Wait until the photograph's activations are cached, which the server does behind edits of a
    photograph that it has seen before; models that read none have nothing to wait for.
    """
    try:
        client.edit(source, mask, edit.prompt, cache="require", **settings)
    except InvalidRequest:
        client.edit(source, mask, edit.prompt, **settings)


def follow(
    client: Client,
    source: ImageInput,
    mask: ImageInput,
    edit: DemoEdit,
    settings: dict[str, Any],
) -> EditResult:
    """Send an edit and show a progress bar."""
    with tqdm(unit="step", leave=True) as bar:
        for event in client.edit_stream(source, mask, edit.prompt, **settings):
            if isinstance(event, Progress):
                bar.total = event.steps
                bar.update(event.step - bar.n)
            elif isinstance(event, Final):
                bar.total = event.result.meta["steps"]
                bar.update(bar.total - bar.n)
                return event.result
    raise DemoFailed("the stream ended without a picture")


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


def side_by_side(*pictures: Image.Image, gap: int = GAP) -> Image.Image:
    """Return pictures of one size in a row on white."""
    width, height = pictures[0].size
    row = Image.new("RGB", (len(pictures) * (width + gap) - gap, height), "white")
    for i, picture in enumerate(pictures):
        row.paste(picture.convert("RGB"), (i * (width + gap), 0))
    return row


def diffusers_pipeline(options: argparse.Namespace) -> Pipeline:
    quiet()
    from maskserve_benchmarks.rivals.pipeline_model import Pipeline

    return Pipeline(options.model, "whole")


def add_diffusers(
    pipeline: Pipeline,
    options: argparse.Namespace,
    source: Image.Image,
    mask: Image.Image,
    outcomes: list[Outcome],
) -> None:
    """Run every edit by diffusers' own pipeline, on the part of the photograph that the model saw
    at the server, and add the pictures to the outcomes.
    """
    from maskserve_benchmarks.rivals.pipeline_model import PipelineEdit

    box, size = view_of(outcomes[0].result.meta, source)
    view = source.crop(box).resize(size, Image.Resampling.LANCZOS)
    selected = mask.crop(box).resize(size)
    for number, outcome in enumerate(outcomes):
        edit, steps = outcome.edit, outcome.result.meta["steps"]
        if edit.loras:
            pipeline.pipe.load_lora_weights(LORAS / f"{LORA}.safetensors")
        call = PipelineEdit(view, selected, edit.prompt, options.seed, steps, (0, 0, *size), ())
        if not number or edit.loras:  # prepares kernels
            pipeline.pictures([call._replace(steps=2)])
        begin = time.perf_counter()
        [(png, _)] = pipeline.pictures([call])
        seconds = time.perf_counter() - begin
        drawn = Image.open(io.BytesIO(png)).resize((box[2] - box[0], box[3] - box[1]))
        whole = source.copy()
        whole.paste(drawn, box[:2], mask.crop(box).point(lambda value: 255 * (value >= 128)))
        outcome.by_system[_COLUMNS[2]] = Measured(whole, seconds)


def quiet() -> None:
    """Keep the notes and progress bars of the libraries' loading off the terminal."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    warnings.simplefilter("ignore")
    for library in (of_diffusers, of_transformers):
        library.set_verbosity_error()
        library.disable_progress_bar()


def view_of(
    meta: dict[str, Any], source: Image.Image
) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """Return the box (left, top, right, bottom) of the photograph that the model saw, and the
    (width, height) at which it did.
    """
    window = meta.get("window", {"box": [0, 0, *source.size], "scale": 1.0})
    left, top, right, bottom = window["box"]
    width, height = (round(side * window["scale"]) for side in (right - left, bottom - top))
    return (left, top, right, bottom), (width, height)


def report(
    out: Path,
    source: Image.Image,
    mask: Image.Image,
    outcomes: Sequence[Outcome],
    burst: Burst | None = None,
) -> None:
    """Print the table, and write its pictures."""
    inside, rows = np.asarray(mask) >= 128, []
    for edit, result, by_system in outcomes:
        meta, (fast, *rivals) = result.meta, by_system.values()
        computed = meta["computed_tokens"] / (meta["steps"] * meta["total_tokens"])
        seconds = [f"{x.seconds:.2f} s ({x.seconds / fast.seconds:.1f}x)" for x in rivals]
        pictures = (np.asarray(x.picture)[inside] for x in (fast, rivals[0]))
        likeness = f"{psnr(*pictures):.1f} dB"
        row = edit.name, f"{fast.seconds:.2f} s", *seconds, meta["cache"], f"{computed:.0%}"
        rows.append([*row, likeness])
    if burst is not None:
        rows.append(burst.cells())
    columns = ("edit", *_COLUMNS, "cache", "tokens computed", "likeness to all tokens")
    print(table(columns, rows))
    print(
        "Seconds of a whole edit; in brackets, how many times as fast maskserve is. Cache: `own` "
        "has activations of its own steps, `hit` those of the photograph. Likeness: PSNR inside "
        "the mask."
    )
    box, _ = view_of(outcomes[0].result.meta, source)
    sheet_rows = [sheet_row(source, mask, outcome, box) for outcome in outcomes]
    if burst is not None:
        print(
            f"{demo_burst.NAME}: different pictures, masks and prompts, sent together; diffusers "
            f"edits one after the other, or in one call at {burst.ratio(demo_burst.ONE_CALL)}."
        )
        sheet_rows.append(burst.sheet_row())
    sheet(sheet_rows).save(out / "edits.png")
    print(f"written: {out / 'edits.png'} and the pictures of the first edit", flush=True)


def sheet_row(
    source: Image.Image, mask: Image.Image, outcome: Outcome, box: tuple[int, int, int, int]
) -> SheetRow:
    """Return an edit's pictures around the box, with their times."""
    left, top, right, bottom = box
    size = CELL, CELL * (bottom - top) // (right - left)

    def part(whole: Image.Image) -> Image.Image:
        return whole.crop(box).resize(size, Image.Resampling.LANCZOS)

    cells = [("photograph and mask", part(shaded(source, mask)))]
    for name, measured in outcome.by_system.items():
        cells.append((f"{name}, {measured.seconds:.2f} s", part(measured.picture)))
    return SheetRow(f"{outcome.edit.name}: {outcome.edit.prompt}", cells)
