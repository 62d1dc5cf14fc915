"""Edits with ControlNets and LoRAs at a real server, beside diffusers' pipeline with the same
models (Katz Fig. 14 in form).

The demo UNet edits pictures of SIDE pixels, one at a time. Every process computes with one thread,
so a process stands for a device; the machine has as many as it has cores. The pipeline has all nets
and LoRAs in memory. All sides compute all tokens (`cache: off`), but for `by default`, which caches
as the server does without a setting.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.checkout import DEMO_UNET
from maskserve_benchmarks.demo_model.scenes import draw_background, to_bytes
from maskserve_benchmarks.reports import table
from maskserve_benchmarks.rivals import adapters
from maskserve_client.client import Client
from maskserve_common.imaging.images import encode_png
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

Pixels = NDArray[np.uint8]
MODEL: Final = DEMO_UNET
SIDE: Final = 256
STEPS: Final = 20
GUIDANCE: Final = 2.5
PROMPT: Final = "a red star"
NETS: Final = adapters.NETS[:3]
LORAS: Final = adapters.LORAS[:2]


class Case(NamedTuple):
    """Adapters of an edit."""

    nets: int
    loras: int

    @property
    def name(self) -> str:
        return f"{self.nets}_nets_{self.loras}_loras"


CASES: Final = (Case(0, 0), Case(1, 0), Case(3, 0), Case(0, 2), Case(3, 2))
SERVERS: Final = {"beside": 0, "one_service": 1, "three_services": 3}
"""Side -> number of its ControlNet services; 0: nets run beside the base."""
DEFAULT: Final = "by_default"
SIDES: Final = ("diffusers", *SERVERS, DEFAULT)
Edit = Callable[[Case], Pixels]


class Inputs(NamedTuple):
    """Inputs of every edit."""

    picture: Pixels
    mask: Pixels
    controls: tuple[Pixels, ...]


def draw_inputs(seed: int, side: int) -> Inputs:
    rng = np.random.default_rng(seed)
    drawn, _ = draw_background(rng, "photo", (side, side))
    mask = np.zeros((side, side), np.uint8)
    mask[side // 4 : side // 2, side // 4 : 3 * side // 4] = 255
    controls = rng.integers(0, 2, (len(NETS), side, side, 1), np.uint8) * np.uint8(255)
    return Inputs(to_bytes(drawn), mask, tuple(np.repeat(one, 3, axis=2) for one in controls))


class Diffusers:
    """diffusers' pipeline in this process, with every net and LoRA in memory."""

    def __init__(
        self, nets: Sequence[Path], loras: Sequence[Path], inputs: Inputs, steps: int
    ) -> None:
        from diffusers import (
            ControlNetModel,
            StableDiffusionControlNetInpaintPipeline,
            StableDiffusionInpaintPipeline,
        )

        base: Any = StableDiffusionInpaintPipeline.from_pretrained(MODEL)
        for lora in loras:
            base.load_lora_weights(lora, adapter_name=lora.stem)
        loaded = [ControlNetModel.from_pretrained(net) for net in nets]
        self._pipes: dict[int, Any] = {0: base}
        for count in {case.nets for case in CASES} - {0}:
            chosen = loaded[:count] if count > 1 else loaded[0]
            self._pipes[count] = StableDiffusionControlNetInpaintPipeline.from_pipe(
                base, controlnet=chosen
            )
        for pipe in self._pipes.values():
            pipe.set_progress_bar_config(disable=True)
        self._inputs, self._steps = inputs, steps

    def edit(self, case: Case) -> Pixels:
        """Return the picture of an edit, pasted into its source."""
        picture, mask, controls = self._inputs
        pipe, (height, width) = self._pipes[case.nets], mask.shape
        if case.loras:
            pipe.enable_lora()
            pipe.set_adapters(list(LORAS[: case.loras]))
        else:
            pipe.disable_lora()
        images = [Image.fromarray(control) for control in controls[: case.nets]]
        control: dict[str, Any] = {}
        if images:
            control["control_image"] = images if case.nets > 1 else images[0]
            control["controlnet_conditioning_scale"] = 1.0
        edited = pipe(
            prompt=PROMPT,
            image=Image.fromarray(picture),
            mask_image=Image.fromarray(mask),
            height=height,
            width=width,
            num_inference_steps=self._steps,
            guidance_scale=GUIDANCE,
            strength=1.0,
            generator=torch.Generator("cpu").manual_seed(1),
            **control,
        ).images[0]
        return np.where(mask[..., None] > 127, np.asarray(edited), picture)


def served_edit(url: str, inputs: Inputs, settings: Mapping[str, Any], case: Case) -> Pixels:
    """Return the picture of an edit at a worker."""
    with Client(url) as client:
        result = client.edit(
            encode_png(inputs.picture),
            encode_png(inputs.mask),
            PROMPT,
            control=[encode_png(control) for control in inputs.controls[: case.nets]],
            controls=[{"name": name} for name in NETS[: case.nets]],
            loras=[{"name": name} for name in LORAS[: case.loras]],
            seed=1,
            guidance_scale=GUIDANCE,
            timeout=600,
            **settings,
        )
    return np.asarray(Image.open(io.BytesIO(result.encoded)).convert("RGB"))


@contextmanager
def sides(seed: int, side: int, steps: int) -> Iterator[dict[str, Edit]]:
    """Start every side."""
    inputs, threads = draw_inputs(seed, side), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        folder = Path(directory)
        nets, loras = adapters.write_adapters(folder, NETS, LORAS)
        config = folder / "worker.toml"
        model = {"native_resolution": side, "torch_threads": 1}
        config.write_text(tomli_w.dumps({"model": model}), encoding="utf-8")
        torch.set_num_threads(1)
        running.callback(torch.set_num_threads, threads)
        settings = {"num_inference_steps": steps}
        edits: dict[str, Edit] = {"diffusers": Diffusers(nets, loras, inputs, steps).edit}
        for name, count in SERVERS.items():
            options = ServeOptions(
                model=str(MODEL),
                config=config,
                adapters=str(folder / "loras"),
                controlnets=str(folder / "nets"),
                services=("controlnet@cpu",) * count,
                base_port=free_base_port(3),
                log_dir=folder / f"logs-{name}",
                entries=None,
            )
            url = running.enter_context(Supervisor(options)).workers[0].grpc_url
            edits[name] = partial(served_edit, url, inputs, settings | {"cache": "off"})
            if not count:
                edits[DEFAULT] = partial(served_edit, url, inputs, settings)
        yield edits


def served_edits(repeat: int, seed: int = 0, *, tiny: bool = False) -> dict[str, Any]:
    """Seconds of an edit of each case on each side, in turn; medians.

    Args:
        repeat: edits of each.
        seed: of the picture and the control pictures.
        tiny: whether to measure as little as possible, which says nothing about speed.

    Returns:
        `served_ms`: by case and side; `served_apart`: the greatest difference of a pixel between
        the servers; `diffusers_apart`: the mean difference of a pixel to diffusers' picture, in the
        mask.
    """
    side, steps = (64, 2) if tiny else (SIDE, STEPS)
    report: dict[str, Any] = {
        "served_side": side,
        "served_steps": steps,
        "served_ms": {},
        "served_apart": 0,
        "diffusers_apart": 0.0,
    }
    inside = draw_inputs(seed, side).mask > 127
    with sides(seed, side, steps) as edits:
        for case in CASES:
            pictures = {name: edit(case).astype(int) for name, edit in edits.items()}  # warms
            for name in SERVERS:
                apart = int(np.abs(pictures[name] - pictures["beside"]).max())
                report["served_apart"] = max(report["served_apart"], apart)
            apart = np.abs(pictures["beside"] - pictures["diffusers"])[inside].mean()
            report["diffusers_apart"] = max(report["diffusers_apart"], round(float(apart), 3))
            seconds: dict[str, list[float]] = {name: [] for name in edits}
            for _ in range(repeat):
                for name, edit in edits.items():
                    begin = time.perf_counter()
                    edit(case)
                    seconds[name].append(time.perf_counter() - begin)
            report["served_ms"][case.name] = {
                name: round(1e3 * statistics.median(seconds[name]), 1) for name in SIDES
            }
    return report


def served_text(report: Mapping[str, Any]) -> str:
    """Return the results as a page tells them: milliseconds of an edit, and how many times as fast
    as diffusers' pipeline each side is.
    """
    rows = []
    for case in CASES:
        ms = report["served_ms"][case.name]
        cells = [f"{ms[name]:.0f} ({ms['diffusers'] / ms[name]:.2f})" for name in SIDES[1:]]
        rows.append((case.nets, case.loras, f"{ms['diffusers']:.0f}", *cells))
    heads = [name.replace("_", " ") for name in SIDES]
    figures = table(("ControlNets", "LoRAs", *heads), rows)
    side, steps = report["served_side"], report["served_steps"]
    return (
        f"Milliseconds of an edit of the demo UNet ({side}x{side}, {steps} steps with guidance), "
        "one at a time at a real Triton; in brackets how many times as fast as diffusers' "
        "pipeline, which has all models in memory. Every process has one thread. Nets run "
        "*beside* the base, or in services; *by default* the server also reuses activations, and "
        "all others compute "
        f"all tokens.\n\n{figures}\n\nPixels of the servers differ by {report['served_apart']} at "
        "most, and inside the mask from diffusers' picture by "
        f"{report['diffusers_apart']} on average."
    )
