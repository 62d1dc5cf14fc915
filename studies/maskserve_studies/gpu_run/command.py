"""Time whole edits on a GPU beside what people would run there instead: three parts of 330 s, each
step with a limit, and results that are kept as they come.

    python scripts/bench gpu_run --bundle gpu     # any machine: writes what travels, and lists it
    ./gpu_run.sh --part a                         # the GPU machine, in the unpacked archive
    ./gpu_run.sh --machine served loads           # steps and what lies round them (`machine`)
    python scripts/bench gpu_run --page           # the page, from the results

`parts` says what each part measures. No part needs a network: weights of true width are drawn on
the machine. A step that fails or takes too long says why, and the next begins. Without a CUDA
device only `--tiny` runs: all parts on a CPU with the demo models' widths, whose times say nothing
about a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.timing import hardware
from maskserve_studies.gpu_run.bundle import BundleError, write_bundle
from maskserve_studies.gpu_run.machine import add_options, measure_machine, versions
from maskserve_studies.gpu_run.machine_page import write_page as write_machine_page
from maskserve_studies.gpu_run.page import write_page
from maskserve_studies.gpu_run.parts import PARTS, Plan, Source
from maskserve_studies.gpu_run.run import Run

RESULTS = CHECKOUT / "docs" / "benchmarks" / "gpu-whole-edits.json"
MACHINE = RESULTS.with_name("gpu-machine.json")
_SHM = Path("/dev/shm")
MODELS_BYTES = 52 * 2**30
"""Bytes of the models of a full run, and of what Triton's processes share."""
_MODELS = DEMO_MODEL.parent
_EDIT = _MODELS / "demo-edit"
_LARGE = {"native_resolution": 1024, "max_sequence_length": 512}
_SMALL = {"native_resolution": 128}
FULL = Plan(
    Source(_MODELS / "flux1-fill-shapes", DEMO_MODEL, _LARGE | {"num_inference_steps": 28},
           (28, 8, 4)),
    Source(_MODELS / "flux2-klein-4b-shapes", _EDIT, _LARGE | {"num_inference_steps": 4}, (4,)),
    preset="flux-1024",
    unet="sdxl-1024",
)  # fmt: skip
TINY = Plan(
    Source(DEMO_MODEL, DEMO_MODEL,
           _SMALL | {"max_sequence_length": 16, "num_inference_steps": 8}, (8, 4)),
    Source(_EDIT, _EDIT, _SMALL | {"max_sequence_length": 32, "num_inference_steps": 4}, (4,)),
    preset="demo-narrow",
    unet=None,
    at_once=(1, 2),
    batches=(1, 2),
    loads=(1,),
    rounds=1,
    arrivals=6,
    limit_s=100.0,
    start_s=45.0,
)  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--bundle", type=Path, metavar="DIR", help="write what a GPU machine needs, and list it")
    add("--part", choices=PARTS, action="append", help="default: all")
    add("--machine", nargs="*", metavar="PART", help="measure the machine's steps instead of edits")
    add("--tiny", action="store_true", help="on a CPU, with small models")
    add("--page", action="store_true", help="write the page from --json")
    add("--json", type=Path, help=f"results; default: {RESULTS.relative_to(CHECKOUT)}")
    add("--models", type=Path, help="folder for models; default: in memory (/dev/shm) if they fit")
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None, *, tiny: Plan = TINY) -> int:
    """Run the command. Tests can give `--tiny` another plan."""
    parser = options()
    args = parser.parse_args(argv)
    if args.bundle is not None:
        try:
            print(f"unpack on the GPU machine: {write_bundle(args.bundle)}")
        except BundleError as error:
            print(f"gpu_run: {error}", file=sys.stderr)
            return 1
        return 0
    if args.tiny and args.json is None:
        parser.error("--tiny needs --json: its times do not belong to the results")
    file = args.json or (RESULTS if args.machine is None else MACHINE)
    if args.page:
        if args.machine is None:
            write_page(file)
        else:
            write_machine_page(json.loads(file.read_text()), file)
        print(file.with_suffix(".md"))
        return 0
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device that torch can use; --tiny runs on a CPU")
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if args.machine is not None:
        return measure_machine(args, file, device, _command(argv))
    plan = tiny if args.tiny else FULL
    with tempfile.TemporaryDirectory() as scratch:
        models = args.models or _folder_for(0 if args.tiny else MODELS_BYTES, Path(scratch))
        for name in args.part or PARTS:
            run = Run(name, file, _about(argv, device), plan.limit_s)
            try:
                PARTS[name](run, plan, device, models)
            finally:
                run.close()
    write_page(file)
    return 0


def _folder_for(nbytes: int, scratch: Path) -> Path:
    """Return a folder for models of so many bytes (0: small ones): in memory, where it has room,
    and then later runs find it.
    """
    folder = _SHM / "maskserve-gpu-run"
    has_room = _SHM.is_dir() and shutil.disk_usage(_SHM).free >= nbytes
    return folder if nbytes and (folder.exists() or has_room) else scratch


def _command(argv: Sequence[str] | None) -> str:
    return " ".join(["scripts/bench gpu_run", *(sys.argv[1:] if argv is None else argv)])


def _about(argv: Sequence[str] | None, device: torch.device) -> dict[str, Any]:
    return {
        "command": _command(argv),
        "hardware": hardware(device),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "versions": versions(device),
        "on_gpu": device.type == "cuda",
    }
