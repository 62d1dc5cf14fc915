"""Measure the time that serving adds to an edit: Triton and the step loop against direct calls of
the parts.

Three measurements with the demo model, dense rows (`cache: off`), and one without. With `--kind
edit` or `generate` it is the first one alone, of such edits of the demo edit model.

1. path: one edit through Triton (tritonclient, gRPC, `edit`), and codec, encoder, engine, decoder
   and codec called one after the other in this process. Both take turns; the result has their
   medians and the difference. It also has the part of Triton's time that no model reports in META,
   which varies less between runs. The host of a virtual machine takes time away, most from a path
   through several processes. The result has that share, and the figures of the quietest rounds.
2. step: the time of a step of 8 rows in the engine's loop outside the model.
3. throughput: 8 edits at once and one at a time through Triton, with the FLOP limit: a matrix
   product's FLOP/s over the counted FLOPs of an edit.
4. admission: the time of the engine's thread that an edit of FLUX.1 Fill at 1024x1024 takes before
   its first step, while the steps of other edits wait; `--admission` measures nothing else.

    python scripts/bench overhead --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
import tritonclient.grpc as triton_grpc

from maskserve_benchmarks.checkout import DEMO_EDIT, DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.edits.admission import measure_admission
from maskserve_benchmarks.edits.direct import Direct, Edit
from maskserve_benchmarks.edits.path import measure_path, timed
from maskserve_benchmarks.reports import about, write_json
from maskserve_benchmarks.timing import hardware
from maskserve_benchmarks.triton_calls import Answer, Grpc, answer_of, tensors
from maskserve_common.config import Config, cores
from maskserve_common.config_file import config_of
from maskserve_common.contracts.request import EDIT_KINDS, EditKind
from maskserve_common.contracts.status_record import State
from maskserve_common.imaging.images import encode_image
from maskserve_engine.batch import forward as forward_module
from maskserve_engine.families.flux import adapter as adapter_module
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.mmdit import batch as flow_module
from maskserve_engine.families.mmdit.blocks import FluxStep
from maskserve_engine.families.specs import load_spec
from maskserve_serving.command import TUNING
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor


def make_edits(count: int, side: int, kind: EditKind = "inpaint") -> list[Edit]:
    """Return encoded held-out edits of `side` x `side` pixels, with the pictures of their kind."""
    return [
        (
            b"" if kind == "generate" else encode_image(edit.source, "png"),
            encode_image(edit.mask * np.uint8(255), "png") if kind == "inpaint" else b"",
            edit.prompt,
        )
        for edit in held_out_edits(count, (side, side))
    ]


def _call(client: Grpc, edit: Edit, settings: dict[str, Any]) -> Answer:
    image, mask, prompt = edit
    texts = {"PROMPT": prompt.encode(), "SETTINGS": json.dumps(settings).encode()}
    inputs = tensors(triton_grpc, {"IMAGE": image, "MASK": mask, **texts})
    return answer_of(client.infer("edit", inputs))


class Clock:
    """Adds up the time spent in functions; each is an attribute of an object or a module."""

    def __init__(self, *functions: tuple[Any, str]) -> None:
        self.seconds = 0.0
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in functions]
        for owner, name, function in self._originals:
            setattr(owner, name, self._clocked(function))

    def close(self) -> None:
        for owner, name, function in self._originals:
            setattr(owner, name, function)

    def _clocked(self, function: Any) -> Any:
        def call(*args: Any, **functions: Any) -> Any:
            begin = time.perf_counter()
            out = function(*args, **functions)
            self.seconds += time.perf_counter() - begin
            return out

        return call


def model_clock() -> Clock:
    """Return a clock of the parts that FluxTransformer2DModel.forward also has: embedding of
    timestep and prompt, first layer (`State.__init__`), blocks and their attention, joining text
    and image for the single blocks and splitting them, last layer.
    """
    state = forward_module.State
    return Clock(
        *((adapter_module, name) for name in ("embed", "vectors")),
        *((FluxStep, name) for name in ("pre", "post", "last")),
        *((state, name) for name in ("__init__", "attend", "join_streams", "computed_image")),
    )


def measure_step(direct: Direct, edits: list[Edit], steps: int) -> dict[str, Any]:
    """Return medians over the engine loop's turns with 8 rows: the whole turn, and the time outside
    the model. The last figure also leaves out the loop around the blocks, because the model's own
    forward has one too.
    """
    jobs = direct.jobs(edits[:8], {"num_inference_steps": steps, "cache": "off"})
    inner = model_clock()
    outer = Clock((flow_module, "forward"))
    marks: list[tuple[float, float, float]] = []
    publisher = direct.engine.publisher
    publish = publisher.publish

    def publish_and_mark(state: State) -> None:  # once in every turn
        publish(state)
        marks.append((time.perf_counter(), inner.seconds, outer.seconds))

    publisher.publish = publish_and_mark  # type: ignore[method-assign]
    try:
        # All eight edits are in the inbox before the loop looks, so every step has eight rows.
        direct.engine.ask(partial(time.sleep, 0.3))
        with ThreadPoolExecutor(8) as pool:
            finals = list(pool.map(direct.denoise, jobs))
    finally:
        publisher.publish = publish  # type: ignore[method-assign]
        outer.close()
        inner.close()
    turns = [
        tuple(1e3 * (after - before) for before, after in zip(*pair, strict=True))
        for pair in pairwise(marks)
        if pair[1][1] > pair[0][1]
    ][2:-1]  # the first turns make the rows, the last sends the responses

    def median(figure: Callable[[float, float, float], float]) -> float:
        return round(statistics.median(figure(*turn) for turn in turns), 3)

    return {
        "rows": statistics.mean(f.meta["batch_mean"] for f in finals),
        "steps": len(turns),
        "step_ms": median(lambda whole, _inner, _outer: whole),
        "model_ms": median(lambda _whole, inner, _outer: inner),
        "rest_ms": median(lambda whole, inner, _outer: whole - inner),
        "outside_forward_ms": median(lambda whole, _inner, outer: whole - outer),
    }


def measure_throughput(
    client: Grpc, edits: list[Edit], settings: dict[str, Any], count: int
) -> dict[str, Any]:
    """Return edits per second, one at a time and eight at once, measured in turn."""
    rates: dict[int, list[float]] = {1: [], 8: []}
    batch_means = []
    for _ in range(3):
        for concurrent in rates:
            with ThreadPoolExecutor(concurrent) as pool:
                begin = time.perf_counter()
                answers = list(
                    pool.map(lambda i: _call(client, edits[i % len(edits)], settings), range(count))
                )
                rates[concurrent].append(count / (time.perf_counter() - begin))
            if concurrent == 8:
                batch_means += [meta["batch_mean"] for _, meta in answers]
    single_rate, eight = (statistics.median(rates[n]) for n in (1, 8))
    return {
        "edits_per_s_1": round(single_rate, 3),
        "edits_per_s_8": round(eight, 3),
        "ratio": round(eight / single_rate, 3),
        "mean_batch_at_8": round(statistics.mean(batch_means), 2),
    }


def flop_limit(config: Config, side: int, steps: int) -> dict[str, float]:
    """Return edits per second if the denoiser ran at the rate of a large float32 matrix product."""
    spec = load_spec(config.model.path)
    h = min(side, spec.native_resolution) // spec.vae_scale_factor
    work = flux_work(spec.denoiser, h, h)
    row = work.row_at(1.0, config.model.max_sequence_length)
    flops = steps * work.step_flops([row], "dense")
    n = 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    torch.set_num_threads(config.model.torch_threads)
    best = min(timed(torch.matmul, a, b)[0] for _ in range(8))
    rate = 2.0 * n**3 / (best / 1e3)
    return {
        "gflop_per_edit": round(flops / 1e9, 2),
        "gemm_gflops": round(rate / 1e9, 1),
        "edits_per_s_limit": round(rate / flops, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kind", choices=EDIT_KINDS, default="inpaint", help="edits by pictures")
    parser.add_argument("--model", type=Path, help="by default the demo model of the kind")
    parser.add_argument("--side", type=int, default=256, help="pixels of the square source")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps of the path")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--edits", type=int, default=24, help="edits per throughput round")
    parser.add_argument(
        "--threads", type=int, default=cores(), help="of the denoiser, on both sides"
    )
    parser.add_argument("--admission", action="store_true", help="time nothing but admission")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = args.model or (DEMO_MODEL if args.kind == "inpaint" else DEMO_EDIT)
    if any(name not in os.environ for name in TUNING):
        # Both sides get the environment of a worker; processes read it only when they start.
        os.execve(sys.executable, sys.orig_argv, {**TUNING, **os.environ})
    tables = {"model": {"path": str(args.model), "torch_threads": args.threads}}
    report = about(hardware(torch.device("cpu")))
    if not args.admission:
        report |= measure_serving(tables, args)
    if args.kind == "inpaint":
        report["admission"] = measure_admission(20)
        print(json.dumps(report["admission"]), flush=True)
    write_json(report, args.json)
    return 0


def measure_serving(tables: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Measure path, throughput and step of the worker that `tables` configure; of edits without a
    mask the path alone.
    """
    config, edits = config_of(tables), make_edits(8, args.side, args.kind)
    settings = {"num_inference_steps": args.steps, "cache": "off", "seed": 1}
    report: dict[str, Any] = {"kind": args.kind, "side": args.side, "steps": args.steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
        options = ServeOptions(
            model=str(args.model),
            base_port=free_base_port(),
            config=folder / "config.toml",
            log_dir=folder / "logs",
        )
        with Supervisor(options) as supervisor:
            client = Grpc(supervisor.workers[0].grpc_url)
            direct = Direct(config)
            report["path"] = measure_path(
                lambda edit: _call(client, edit, settings)[1],
                lambda edit: direct.edit(edit, settings),
                edits,
                args.rounds,
            )
            print(json.dumps(report["path"]), flush=True)
            direct.engine.close(5.0)
            if args.kind != "inpaint":
                client.close()
                return report
            report["throughput"] = measure_throughput(client, edits, settings, args.edits)
            print(json.dumps(report["throughput"]), flush=True)
            client.close()
    direct = Direct(config)
    direct.edit(edits[0], settings)
    report["step"] = measure_step(direct, edits, 60)
    print(json.dumps(report["step"]), flush=True)
    direct.engine.close(5.0)
    report["limit"] = flop_limit(config, args.side, args.steps)
    print(json.dumps(report["limit"]), flush=True)
    return report
