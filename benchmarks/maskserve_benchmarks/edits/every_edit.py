"""Send edits of every mask size and number of steps through a real Triton. Each edit must end with
a picture that is its source outside the mask, or with an error that names a field. The worker must
stay up and log no error.

Each picture is new to the worker: the first edit has no template. The same edit then runs with
`cache: require` and with `cache: off`. For every third mask size all three run again with each
LoRA, each ControlNet and each of `--settings`. Larger pictures are edited whole and in a window
round the mask. Several edits run at a time. The exit code is 1 if anything is the server's fault.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_client import Client, MaskserveError
from maskserve_common.errors import InvalidRequest
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

MODELS = ("demo", "demo-edit", "demo-unet")
RATIOS = (0.05, 0.11, 0.2, 0.35, 0.5, 0.56, 0.6, 0.69, 0.75, 0.81, 0.9, 1.0)
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 20, 28, 50)
CACHES = ("auto", "require", "off")
LARGE_STEPS = (1, 4, 10)
_LONG = 10
"""An edit with more steps than this runs only every third ratio; the ratios differ by number of
steps."""
CROPS = ("off", "on")
FURTHER = ({"reuse_floor": 30.0}, {"step_interval": 3})
_TIMEOUT_S = 600.0
_FIELD = re.compile(r"[A-Z]+[\w.\[\]]*: ")
"""How the message of a refusal begins."""


class EditCase(NamedTuple):
    """One edit to send."""

    size: tuple[int, int]
    """Width and height of the picture, in pixels."""
    shape: str
    """Shape of the mask: `square` or `band`, which reaches from side to side."""
    ratio: float
    steps: int
    cache: str
    crop: str = "auto"
    """The setting `crop_to_mask`."""
    further: str = "{}"
    """Further settings, as JSON."""


class CaseResult(NamedTuple):
    """The result of one edit."""

    case: EditCase
    outcome: str
    """META's `cache` and `dense_for`, or the error's code."""
    sentence: str = ""
    """Why there is no picture, or what is wrong with it."""
    fault: bool = False
    """Whether the server was at fault."""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="scripts/bench every_edit", description=__doc__)
    add = parser.add_argument
    folders = [CHECKOUT / "assets/models" / name for name in MODELS]
    add("--models", type=Path, nargs="+", default=folders, help="model folders (default: demo's)")
    add("--ratios", type=float, nargs="+", default=RATIOS, help="shares of the picture masked")
    add("--steps", type=int, nargs="+", default=STEPS, help="numbers of denoising steps")
    add("--caches", nargs="+", default=CACHES, help="values of the setting `cache`")
    add("--settings", type=json.loads, nargs="*", default=FURTHER, help="JSON of further settings")
    add("--adapters", type=Path, help="a folder with a folder of LoRAs for each model's name")
    add("--controlnets", type=Path, help="a folder with a folder of ControlNets for each name")
    add("--size", type=int, default=128, help="side of the pictures, in pixels")
    add("--large-steps", type=int, nargs="*", default=LARGE_STEPS, help="steps of larger pictures")
    add("--together", type=int, default=4, help="edits at a time")
    add("--seed", type=int, default=0, help="of the pictures")
    add("--json", type=Path, help="a file for the summary, written again after each model")
    args = parser.parse_args()
    models: dict[str, dict[str, Any]] = {}
    for folder in args.models:
        began, ends, errors = time.monotonic(), list[CaseResult](), list[str]()
        with tempfile.TemporaryDirectory() as logs:
            try:
                ends += edits(folder, args, Path(logs))
            except ServeError as error:
                errors.append(str(error))
            errors += logged_errors(Path(logs))
        models[folder.name] = summary(ends, errors, time.monotonic() - began)
        _print(folder.name, models[folder.name])
        if args.json:
            args.json.write_text(json.dumps(models, indent=1) + "\n", encoding="utf-8")
    return int(any(model["faults"] for model in models.values()))


def summary(ends: list[CaseResult], errors: list[str], seconds: float) -> dict[str, Any]:
    """Return a model's results as plain data. `errors` are the worker's own, of no one edit."""
    return {
        "edits": len(ends),
        "seconds": round(seconds, 1),
        "pictures": sum(not end.sentence for end in ends),
        "outcomes": dict(
            sorted(Counter(f"{end.case.cache}: {end.outcome}" for end in ends).items())
        ),
        "refused": dict(Counter(end.sentence for end in ends if end.sentence and not end.fault)),
        "faults": [
            *([error] for error in errors),
            *([*end.case, end.sentence] for end in ends if end.fault),
        ],
    }


def cases(args: argparse.Namespace, further: Sequence[str]) -> Iterator[tuple[EditCase, ...]]:
    """Yield the edits. Edits of one picture come together and run one after the other."""
    rng, side = np.random.default_rng(args.seed), args.size
    grid = [(side, side)], args.steps, ("auto",)
    large = [(2 * side, 3 * side // 2)], args.large_steps, CROPS
    for sizes, numbers, crops in (grid, large):
        for size, (nth, steps), crop in product(sizes, enumerate(numbers), crops):
            ratios = args.ratios[nth % 3 :: 3] if steps > _LONG else args.ratios
            for place, ratio in enumerate(ratios):
                shape = str(rng.choice(["square", "band"]))
                settings = "{}", *(further if (place + nth) % 3 == 0 else ())
                yield tuple(
                    EditCase(size, shape, ratio, steps, cache, crop, more)
                    for more, cache in product(settings, args.caches)
                )


def _named(folder: Path | None, key: str) -> list[str]:
    """Return settings, as JSON, that name one file or folder each of a folder."""
    names = [path.name.removesuffix(".safetensors") for path in folder.iterdir()] if folder else []
    return [json.dumps({key: [{"name": name}]}) for name in sorted(names)]


def _below(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder and (folder / name).is_dir() else None


def edits(folder: Path, args: argparse.Namespace, logs: Path) -> Iterator[CaseResult]:
    """Serve a model and edit drawn pictures of it.

    Raises:
        ServeError: the worker does not start, or not all edits found the same one.
    """
    rng = np.random.default_rng(args.seed)
    loras, nets = (_below(path, folder.name) for path in (args.adapters, args.controlnets))
    further = [*map(json.dumps, args.settings), *_named(loras, "loras"), *_named(nets, "controls")]
    options = ServeOptions(
        model=str(folder), base_port=free_base_port(), log_dir=logs, name=folder.name,
        adapters=str(loras or ""), controlnets=str(nets or ""),
    )  # fmt: skip
    with ThreadPoolExecutor(args.together) as threads, Supervisor(options) as site:
        [worker] = site.workers
        with Client(worker.grpc_url) as client:

            def ends(picture_cases: tuple[EditCase, ...], source: Image.Image) -> list[CaseResult]:
                return [_edit(client, source, case) for case in picture_cases]

            pictures = [
                (picture_cases, Image.fromarray(_picture(rng, picture_cases[0].size)))
                for picture_cases in cases(args, further)
            ]
            for picture_cases in threads.map(ends, *zip(*pictures, strict=True)):
                yield from picture_cases
        if worker.restarts or not worker.ready():
            raise ServeError(f"the worker has been started {worker.restarts + 1} times")


def _edit(client: Client, source: Image.Image, case: EditCase) -> CaseResult:
    mask, further = Image.fromarray(mask_of(case)), json.loads(case.further)
    try:
        result = client.edit(
            source,
            mask,
            "a red star",
            control=[source] * len(further.get("controls", ())),
            timeout=_TIMEOUT_S,
            seed=1,
            num_inference_steps=case.steps,
            cache=case.cache,
            crop_to_mask=case.crop,
            **further,
        )
    except MaskserveError as error:
        refused = isinstance(error, InvalidRequest) and _FIELD.match(error.message)
        return CaseResult(case, error.code, str(error), fault=not refused)
    meta, wrong = result.meta, difference_of(result.image, source, mask)
    outcome = " ".join((meta["cache"], meta.get("dense_for", ""))).strip()
    return CaseResult(case, outcome, wrong, fault=bool(wrong))


def difference_of(picture: Image.Image, source: Image.Image, mask: Image.Image) -> str:
    """Say how an edited picture differs from its source where it must not; empty: nowhere."""
    if picture.size != source.size:
        return f"the picture has {picture.size} pixels, its source {source.size}"
    differs = np.asarray(picture.convert("RGB")) != np.asarray(source)
    count = int((differs.any(axis=2) & (np.asarray(mask) == 0)).sum())
    return f"{count} pixels outside the mask are not the source's" if count else ""


def logged_errors(logs: Path) -> list[str]:
    """Return the lines of servers' logs that hold an error or begin an exception's trace."""
    lines = (line for log in sorted(logs.iterdir()) for line in log.read_text("utf-8").splitlines())
    marks = '"level": "ERROR"', '"level": "CRITICAL"', '"exc": '
    return [line for line in lines if line.startswith("Traceback") or any(map(line.count, marks))]


def mask_of(case: EditCase) -> NDArray[np.uint8]:
    """Return a mask [height, width] with 255 in the requested share: in the middle, or from side to
    side.
    """
    width, height = case.size
    mask = np.zeros((height, width), np.uint8)
    share = case.ratio if case.shape == "band" else case.ratio**0.5
    wide = width if case.shape == "band" else round(width * share)
    high = max(1, round(height * share))
    left, top = (width - wide) // 2, (height - high) // 2
    mask[top : top + high, left : left + wide] = 255
    return mask


def _picture(rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw smooth noise, [height, width, 3]."""
    rough = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
    return np.asarray(rough.resize(size, Image.Resampling.BICUBIC))


def _print(name: str, model: dict[str, Any]) -> None:
    faults = len(model["faults"])
    print(f"{name}: {model['edits']} edits, {model['seconds']} s, {faults} faults of the server")
    for outcome, count in model["outcomes"].items():
        print(f"  cache: {outcome}: {count}")
    for sentence, count in model["refused"].items():
        print(f"  {count} refused: {sentence}")
    for *case, sentence in model["faults"][:10]:
        print(f"  FAULT {case}: {sentence}", flush=True)
