#!/usr/bin/env python3
"""How much faster is a step of cached rows than one of dense rows, and how near the FLOP limit?

Random weights at the model's true width; on a CPU the first blocks of it (`--blocks 1+1`: double +
single). Dense and cached steps are timed in turn inside one run; medians are printed. `flop_limit`
is the counted FLOPs of the dense step over those of the cached one (maskserve_core.flops), and
`of_limit` the share of it that was reached. `rest_ms` is everything in the cached step that is not
the model: loading and decoding entries, packing, filling keys, the sampler.

    python scripts/bench_step.py --preset flux-1024 --blocks 1+1 --json step.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskserve_core.entry_key import Anchor
from maskserve_core.flops import flux_work
from maskserve_engine.codec import FORMATS, encode
from maskserve_engine.entries import AnchorEntry, BlockEntry
from maskserve_engine.flux import forward as forward_module
from maskserve_engine.flux.conditioning import TemplateInputs
from maskserve_engine.flux.forward import forward
from maskserve_engine.flux.rows import FluxRow, Inactive
from maskserve_engine.flux.schedule import Schedule

ROOT = Path(__file__).resolve().parent.parent
PRESETS: dict[str, dict[str, Any]] = {
    "flux-1024": {"grid": (64, 64), "text": 512},
    "demo": {"grid": (16, 16), "text": 16},
}


class Bench:
    """A transformer and synthetic rows of it.

    Args:
        preset: a key of PRESETS.
        blocks: (double, single) blocks to keep; None keeps all.
        dtype: of weights, activations and entries in model format.
        device: where it runs.
        format: storage format of entries.
        kind: `kv` or `project`.
    """

    def __init__(
        self,
        preset: str,
        blocks: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
    ) -> None:
        self.grid, self.text = PRESETS[preset]["grid"], PRESETS[preset]["text"]
        self.device, self.dtype, self.format = device, dtype, format
        self.model = _model(preset, blocks, dtype, device)
        self.config = dict(self.model.config)
        self.blocks = len(self.model.transformer_blocks) + len(self.model.single_transformer_blocks)
        self.work = flux_work(self.config, 2 * self.grid[0], 2 * self.grid[1])
        self.entry = AnchorEntry(Anchor(0.5, 500.0), ())

    def fill_entry(self, kind: str) -> None:
        """Random entries of one template for all blocks."""
        tokens, width = self.grid[0] * self.grid[1], self.model.inner_dim

        def coded() -> Any:
            return encode(self._random(tokens, width), self.format)

        blocks = []
        for _ in range(self.blocks):
            keys_values = kind == "kv"
            blocks.append(
                BlockEntry(
                    None if keys_values else coded(),
                    coded() if keys_values else None,
                    coded() if keys_values else None,
                )
            )
        self.entry = AnchorEntry(Anchor(0.5, 500.0), tuple(blocks))

    def row(self, mask_ratio: float | None, seed: int) -> FluxRow:
        """A dense row (None), or a cached one with random active tokens."""
        tokens, channels = self.grid[0] * self.grid[1], self.config["in_channels"]
        out = self.config.get("out_channels") or channels
        cis = self._cis()
        extra = channels - out
        condition = self._random(tokens, extra) if extra else None
        row = FluxRow(
            request_id=str(seed),
            schedule=Schedule(
                torch.tensor([0.5, 0.45], device=self.device),
                torch.tensor([500.0], device=self.device),
            ),
            grid=self.grid,
            text=self._random(self.text, self.model.inner_dim),
            pooled=self._random(self.config["pooled_projection_dim"]),
            guidance=3.5 if self.config["guidance_embeds"] else None,
            cis=cis,
            latents=self._random(tokens, out),
            condition=condition,
            blend=None,
        )
        if mask_ratio is None:
            return row
        order = np.random.default_rng(seed).permutation(tokens)
        count = max(1, round(mask_ratio * tokens))
        active = torch.from_numpy(np.sort(order[:count])).to(self.device)
        index = torch.from_numpy(np.sort(order[count:])).to(self.device)
        template = TemplateInputs(row.latents, self._random(tokens, out), condition)
        row.inactive = Inactive(
            active, index, template.take(index), cis[self.text :][index], (self.entry,)
        )
        row.cis = torch.cat((cis[: self.text], cis[self.text :][active]))
        row.latents = row.latents[active]
        row.condition = None if condition is None else condition[active]
        return row

    def step(self, rows: Sequence[FluxRow], kind: str) -> None:
        """What the engine does with a batch at one step."""
        with torch.inference_mode():
            for row in rows:
                row.step = 0
                row.load()
            outputs = forward(self.model, [r.model_input() for r in rows], (kind,) * self.blocks)
            for row, output in zip(rows, outputs, strict=True):
                row.advance(output)

    def limit(self, ratios: Sequence[float], kind: str) -> float:
        """Dense FLOPs over cached FLOPs of a batch with these mask ratios."""
        cached = [self.work.row_at(m, self.text) for m in ratios]
        dense = self.work.step_flops(cached, "dense")
        return dense / self.work.step_flops(cached, kind)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _cis(self) -> torch.Tensor:
        gh, gw = self.grid
        ids = torch.zeros(self.text + gh * gw, 3, device=self.device)
        ids[self.text :, 1] = torch.arange(gh, device=self.device).repeat_interleave(gw)
        ids[self.text :, 2] = torch.arange(gw, device=self.device).repeat(gh)
        cos, sin = self.model.pos_embed(ids)
        return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def _model(
    preset: str, blocks: tuple[int, int] | None, dtype: torch.dtype, device: torch.device
) -> Any:
    from diffusers import FluxTransformer2DModel

    if preset == "demo":
        folder = ROOT / "assets" / "models" / "demo" / "transformer"
        config = FluxTransformer2DModel.load_config(folder)
    else:  # FLUX.1-dev is the class's own default configuration
        config = {"guidance_embeds": True}
    if blocks is not None:
        config = {**config, "num_layers": blocks[0], "num_single_layers": blocks[1]}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = FluxTransformer2DModel.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


class Timer:
    """Wall time of calls, on CUDA until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ms(self, call: Callable[[], None]) -> float:
        self._settle()
        begin = time.perf_counter()
        call()
        self._settle()
        return 1e3 * (time.perf_counter() - begin)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def model_time(bench: Bench, timer: Timer, rows: Sequence[FluxRow], kind: str) -> float:
    """Milliseconds of a cached step spent in blocks, embedders and final layer, less the filling
    of keys: what is left of the step is the rest.
    """
    spent = {"blocks": 0.0, "fill": 0.0}
    originals = (forward_module.double_block, forward_module.single_block)
    original_fill = forward_module._State.fill

    def timed(function: Any) -> Any:
        def call(*args: Any) -> Any:
            out: list[Any] = []
            spent["blocks"] += timer.ms(lambda: out.append(function(*args)))
            return out[0]

        return call

    def fill(state: Any, index: int, block: Any, kinds: Any) -> Any:
        inner = original_fill(state, index, block, kinds)
        if inner is None or kinds[index] == "project":  # projecting is the model's own work
            return inner

        def call(keys: Any, values: Any, packing: Any) -> None:
            spent["fill"] += timer.ms(lambda: inner(keys, values, packing))

        return call

    forward_module.double_block = timed(originals[0])  # type: ignore[attr-defined]
    forward_module.single_block = timed(originals[1])  # type: ignore[attr-defined]
    forward_module._State.fill = fill  # type: ignore[method-assign]
    try:
        bench.step(rows, kind)
    finally:
        forward_module.double_block, forward_module.single_block = originals  # type: ignore[attr-defined]
        forward_module._State.fill = original_fill  # type: ignore[method-assign]
    return spent["blocks"] - spent["fill"]


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind and batch in turn."""
    results = []
    for kind in args.kind:
        bench.fill_entry(kind)
        for batch in args.batch:
            ratios = [args.mask_ratios[i % len(args.mask_ratios)] for i in range(batch)]
            mixes = [[m] for m in args.mask_ratios] if batch == 1 else [ratios]
            results += measure_mixes(bench, kind, mixes, args.repeat)
    return results


def measure_mixes(
    bench: Bench, kind: str, mixes: Sequence[Sequence[float]], repeat: int
) -> list[dict[str, Any]]:
    """A dense batch and cached batches of these mask ratios, in turn, `repeat` rounds."""
    timer = Timer(bench.device)
    dense = [bench.row(None, i) for i in range(len(mixes[0]))]
    cached = [[bench.row(m, i) for i, m in enumerate(mix)] for mix in mixes]
    rounds = [
        [timer.ms(partial(bench.step, rows, kind)) for rows in (dense, *cached)]
        for _ in range(repeat + 1)
    ][1:]  # the first round warms up
    dense_times, *times = map(list, zip(*rounds, strict=True))
    results = []
    for mix, rows, taken in zip(mixes, cached, times, strict=True):
        inside = [model_time(bench, timer, rows, kind) for _ in range(3)]
        results.append(_result(bench, kind, mix, dense_times, taken, inside))
        print(_line(results[-1]), flush=True)
    return results


def _result(
    bench: Bench,
    kind: str,
    mix: Sequence[float],
    dense: Sequence[float],
    cached: Sequence[float],
    inside: Sequence[float],
) -> dict[str, Any]:
    dense_ms, ms = statistics.median(dense), statistics.median(cached)
    limit = bench.limit(mix, kind)
    return {
        "mask_ratio": mix[0] if len(mix) == 1 else list(mix),
        "kind": kind,
        "format": bench.format,
        "batch": len(mix),
        "dense_ms": round(dense_ms, 3),
        "ms": round(ms, 3),
        "speedup": round(dense_ms / ms, 3),
        "flop_limit": round(limit, 3),
        "of_limit": round(dense_ms / ms / limit, 3),
        "rest_ms": round(max(ms - statistics.median(inside), 0.0), 3),
    }


def _line(r: dict[str, Any]) -> str:
    ratio = f"{r['mask_ratio']:.2f}" if isinstance(r["mask_ratio"], float) else "mixed"
    return (
        f"{r['kind']:8} batch {r['batch']} m {ratio:>5}  dense {r['dense_ms']:9.1f} ms  "
        f"cached {r['ms']:9.1f} ms  {r['speedup']:5.2f}x of {r['flop_limit']:5.2f}x "
        f"= {r['of_limit']:.2f}  rest {r['rest_ms']:.2f} ms"
    )


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {torch.get_num_threads()} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="flux-1024")
    parser.add_argument("--blocks", help="double+single blocks to keep, such as 1+1; all if absent")
    parser.add_argument("--mask-ratios", type=float, nargs="+", default=[0.05, 0.11, 0.2, 0.35])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kind", nargs="+", choices=("kv", "project"), default=["kv", "project"])
    parser.add_argument("--format", choices=FORMATS, default="model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    blocks = None
    if args.blocks:
        double, _, single = args.blocks.partition("+")
        if not (double.isdigit() and single.isdigit()):
            parser.error("--blocks: give double+single, such as 1+1")
        blocks = (int(double), int(single))
    device = torch.device(args.device)
    torch.manual_seed(0)
    bench = Bench(args.preset, blocks, getattr(torch, args.dtype), device, args.format)
    print(f"{args.preset}, {bench.blocks} blocks, {args.dtype}, {hardware(device)}", flush=True)
    results = measure(bench, args)
    if args.json:
        report = {
            "command": " ".join(sys.argv),
            "hardware": hardware(device),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": results,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
