"""Load a worker for a long time with every kind of request, and check that its memory, threads and
files stay as they were.

The command starts a worker with a small cache, and as many clients as keep its rows full (twice as
many in the first minute). They send edits of hot, new and evicted templates, streams, unusual
sizes, templates by name, edits that they withdraw, bad input and operations, and check every
answer. Samples have memory, shared memory, file handles, threads, rows, templates and pins. After
the warm-up none of these may grow (memory by 2 % at most), and at the end nothing may be in flight,
running or pinned.

    python scripts/bench soak --minutes 60 --out soak-output --json soak.json

With --hostile there is also a router. Three honest clients with keys edit at random times, and a
fourth key attacks in every known way. The JSON's `summary` has `lost`, `wrong`, `p95_ratio` (honest
edits under attack over honest edits alone), `router_mib`, `restarts`, `ejections`,
`internal_errors` of the router, and the processor's shares of the attackers and of other processes.
If other processes took over 15 %, only wrong pixels, internal errors and memory are judged, and the
exit code is 3.

    python scripts/bench soak --hostile --minutes 10 --json hostile.json

`stages_ms` and `cpu_s` of the same file show the time by stage and process; `--attacks` and
`--without` choose attacks.

The folder gets samples.jsonl, summary.json, soak.png, config.toml and the worker's log. The exit
code is 0 if every bar holds, 1 if one is missed, 2 if the worker does not start. Ctrl-C ends the
load early, and the samples so far are judged; before the worker is ready it stops the worker. A
hostile soak that is interrupted stops what it started and judges nothing (exit code 2).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.soak.attacks import ATTACKS
from maskserve_benchmarks.soak.hostile import NOT_JUDGED, PASSED, hostile_soak
from maskserve_benchmarks.soak.run import Report, SoakOptions, drift, soak, summary
from maskserve_serving.errors import ServeError
from maskserve_serving.stop_signals import StopSignals


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = SoakOptions(
        model=args.model,
        minutes=args.minutes,
        out=args.out,
        config=args.config,
        visitors=args.visitors,
        templates=args.templates,
        sample_s=args.sample_every,
        seed=args.seed,
        say=lambda line: print(line, flush=True),
    )
    try:
        if args.hostile:
            names = [attack.__name__ for attack in ATTACKS]
            names = [name for name in args.attacks or names if name not in args.without]
            return hostile(options, args.json, names)
        report = soak(options, StopSignals())
    except ServeError as error:
        print(f"soak.py: {error}", file=sys.stderr)
        return 2
    summary_text = json.dumps(summary(options, report), indent=2) + "\n"
    for path in {options.out / "summary.json", args.json or options.out / "summary.json"}:
        path.write_text(summary_text, encoding="utf-8")
    show(report)
    print(f"written: {options.out}", flush=True)
    return 0 if report.passed else 1


def hostile(options: SoakOptions, path: Path | None, names: Sequence[str]) -> int:
    """Run the soak under these attacks; return the exit code."""
    report = hostile_soak(options, StopSignals(), names)
    text = json.dumps(report, indent=2) + "\n"
    for file in {options.out / "hostile.json", path or options.out / "hostile.json"}:
        file.write_text(text, encoding="utf-8")
    print(json.dumps(report["summary"]), report["verdict"], flush=True)
    for problem in report["problems"]:
        print(f"problem: {problem}", flush=True)
    return {PASSED: 0, NOT_JUDGED: 3}.get(report["verdict"], 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="how long the load lasts (default: 60)")
    add("--hostile", action="store_true", help="attack a router and its worker meanwhile")
    names = [attack.__name__ for attack in ATTACKS]
    for flag, help_text in (
        ("attacks", "of a hostile soak, these alone"),
        ("without", "all but these"),
    ):
        add(f"--{flag}", nargs="+", choices=names, default=[], metavar="NAME", help=help_text)
    add("--model", type=Path, default=DEMO_MODEL)
    add("--config", type=Path, help="configuration (TOML); its cache budget is replaced")
    add(
        "--visitors",
        type=int,
        default=12,
        help="clients at once (default: 12; a worker has 8 rows)",
    )
    add("--templates", type=int, default=24, help="templates the cache has room for (default: 24)")
    add("--sample-every", type=float, default=5.0, metavar="S", help="seconds (default: 5)")
    add("--seed", type=int, default=0, help="of the pictures and of what visitors do")
    add("--out", type=Path, default=Path("soak-output"), help="folder (default: soak-output)")
    add("--json", type=Path, help="write the summary here too")
    return parser.parse_args(argv)


def show(report: Report) -> None:
    """Print the judgement."""
    for kind, ends in report.ends.items():
        print(f"  {kind}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    drift_text = ", ".join(f"{name} {value}" for name, value in drift(report).items())
    print(f"  drift: {drift_text}")
    for bar in report.bars:
        print(bar.line())
    for problem in report.problems:
        print(f"unexpected: {problem}")
    missed = [bar.name for bar in report.bars if not bar.ok]
    print(f"MISSED: {', '.join(missed)}" if missed else "every bar that could be judged holds")
