"""Record the answers of workers to some 90 fixed edits, and compare them with an earlier record.

The comparison is byte by byte, for two versions of the code that should answer alike. The command
sends dense and cached edits, streams with previews, templates by name, invalid edits and
operations, one after the other. The record has digests of each IMAGE and of its pixels, the text of
each error, and META without times. The workers are `demo` and `unet`, with LoRAs and ControlNets,
and `ranks`, which has two devices.

    scripts/bench record_edits --out before.json
    scripts/bench record_edits --compare before.json     # exit code 1 if anything differs
    scripts/bench record_edits --only unet --compare before.json

With `--url`, Triton's own client sends the edits of the worker that `--only` names to a running
worker. It may have any version, and must have just started.

A record is valid on one machine only: another CPU rounds floats differently, and so may another
version of torch or Pillow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.server import own_server, running_server
from maskserve_benchmarks.recording.comparison import differences
from maskserve_benchmarks.recording.edits import SITES
from maskserve_benchmarks.recording.record import Record, Recorder
from maskserve_serving.errors import ServeError


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        previous_record = json.loads(options.compare.read_text()) if options.compare else None
        record = take(options)
    except (ServeError, PerfError, TimeoutError, InferenceServerException, OSError) as error:
        print(f"record_edits: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if previous_record is None:
        return 0
    changes = differences({site: previous_record.get(site, {}) for site in record}, record)
    answers = sum(map(len, record.values()))
    print("\n".join(changes) or f"all {answers} answers are the same")
    return 1 if changes else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, help="write the record to this JSON file")
    add("--compare", type=Path, metavar="RECORD", help="an earlier record")
    add("--url", help="host:port (gRPC) of a worker that runs; HTTP is at the port before")
    add("--only", nargs="+", choices=SITES, default=list(SITES), help="these workers alone")
    options = parser.parse_args(argv)
    if options.url and len(options.only) > 1:
        parser.error("--url is one worker: name it by --only")
    return options


def take(options: argparse.Namespace) -> dict[str, Record]:
    """Return the records of all workers."""
    if options.url:
        [name] = options.only
        server = running_server(options.url, None)
        with closing(Recorder(server, SITES[name].cases, print)) as recorder:
            return {name: recorder.take()}
    records = {}
    for name in options.only:
        site = SITES[name]
        with TemporaryDirectory() as logs:
            config = Path(logs) / "config.toml"
            config.write_text(site.config, encoding="utf-8")
            with (
                own_server(str(site.model), Path(logs), config, devices=site.devices) as server,
                closing(Recorder(server, site.cases, print)) as recorder,
            ):
                records[name] = recorder.take()
    return records
