"""Record what a worker answers to 60 fixed edits, and compare it with an earlier record.

Two versions of the code that should answer alike are compared byte by byte. Dense and cached edits,
streams with previews, templates by name, refusals and operations are sent one after the other; the
record holds digests of each IMAGE and of its pixels, the error's text, and META without times.

    scripts/bench record_edits --out before.json         # a worker of its own, the demo model
    scripts/bench record_edits --compare before.json     # exit code 1 if anything differs

`--url` names a worker that has just started, of any version: only Triton's own client speaks to it.
A record holds on one machine only: another CPU rounds floats otherwise, and another version of
torch or Pillow may.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tritonclient.utils import InferenceServerException

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.perf.errors import PerfError
from maskserve_harness.perf.server import own_server, running_server
from maskserve_harness.recording.comparison import differences
from maskserve_harness.recording.record import Record, Recorder
from maskserve_serving.errors import ServeError


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        before = json.loads(options.compare.read_text()) if options.compare else None
        record = take(options)
    except (ServeError, PerfError, TimeoutError, InferenceServerException, OSError) as error:
        print(f"record_edits: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if before is None:
        return 0
    found = differences(before, record)
    print("\n".join(found) or f"all {len(record)} answers are the same")
    return 1 if found else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, help="write the record to this JSON file")
    add("--compare", type=Path, metavar="RECORD", help="an earlier record")
    add("--url", help="host:port (gRPC) of a worker that runs; HTTP is at the port before")
    add("--config", type=Path, help="configuration (TOML) of a worker of its own")
    add("--model", default=str(DEMO_MODEL), help="model folder")
    return parser.parse_args(argv)


def take(options: argparse.Namespace) -> Record:
    with ExitStack() as stack:
        if options.url:
            server = running_server(options.url, None)
        else:
            logs = Path(stack.enter_context(TemporaryDirectory()))
            server = stack.enter_context(own_server(options.model, logs, options.config))
        return stack.enter_context(closing(Recorder(server, print))).take()
