"""A server under attack, while three honest clients send edits.

A supervisor runs a worker and a router. One key runs all of `attacks.ATTACKS` for some minutes; the
honest clients are alone before and after these minutes, so that other load on the machine counts
on both sides. Each honest edit is reproducible, and must equal the first edit of its kind bit for
bit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from msgspec import toml

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.soak import attacks
from maskserve_benchmarks.soak.pictures import Album, Pixels
from maskserve_benchmarks.soak.run import SoakOptions, write_config
from maskserve_benchmarks.soak.visitor import Unexpected, check
from maskserve_benchmarks.triton_calls import Grpc
from maskserve_engine.families.specs import load_spec
from maskserve_serving import launch
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import STRIDE, free_base_port
from maskserve_serving.stop_signals import StopSignals
from maskserve_serving.supervisor import Supervisor
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import dump_plan

_HONEST = ("anna", "ben", "clara")
_ATTACKERS = ("mallory", "mallory-2", "mallory-3", "mallory-4")
_PAGE, _WITHDRAWN = "page", "gone"
_CALM_SHARE = 0.125
"""Length of each phase without attacks, before and after them, as a share of the attacked time."""
_EVERY_S = 6.0
"""Mean time between two edits of one client."""
_ANSWER_S = 120.0
_PAGE_ENDS_S = 10.0
_STEPS = 4
_KINDS = 4
"""Number of edits that each client repeats; the picture of the first is named as a template."""
_CONTROLLED, _NET = _KINDS, "outline"
"""An edit with a ControlNet: it shows how much of the service the attacks leave."""
P95_BAR, MIB_BAR = 2.0, 1024
"""Bars: P95 of honest edits may grow by this factor, and the router and the page may use so many
MiB."""
BUSY = 0.15
"""Share of the machine's processor time that other processes may take while times are judged."""
_NONE = ("TimeoutError", "DEADLINE_EXCEEDED", "refused", "closed", "none")
"""Ends of an attack's requests that count as unanswered."""


@dataclass(slots=True)
class Book:
    """Results of the honest clients; safe for threads."""

    seconds: list[float] = field(default_factory=list)
    stages_ms: list[dict[str, float]] = field(default_factory=list)
    """META's `timings_ms` by edit, and the rest of the client's time."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float = -1.0, *, lost: str = "", wrong: str = "") -> None:
        with self.lock:
            self.seconds += [seconds] if seconds >= 0 else []
            self.lost += [lost] if lost else []
            self.wrong += [wrong] if wrong else []

    def add_times(self, seconds: float, stages_ms: dict[str, float]) -> None:
        """Add the time of one edit, by stage."""
        stages = {name: ms for name, ms in stages_ms.items() if name != "load_stall"}
        with self.lock:
            self.stages_ms.append({**stages, "elsewhere": 1e3 * seconds - sum(stages.values())})

    def means(self, slowest: float = 1.0) -> dict[str, int]:
        """Return the mean milliseconds in each stage, of all edits or the slowest share of them."""
        edits = sorted(self.stages_ms, key=lambda stages: -sum(stages.values()))
        edits = edits[: math.ceil(slowest * len(edits))]
        sums = sum(map(Counter, edits), Counter[str]())
        return {name: round(ms / len(edits)) for name, ms in sums.items()}

    def p95(self) -> float:
        """Return P95 in seconds; 0 without edits."""
        if len(self.seconds) < 2:
            return max(self.seconds, default=0.0)
        return statistics.quantiles(self.seconds, n=20, method="inclusive")[-1]


class HonestClient:
    """One honest client: edits arrive at random times (Poisson), whatever came before."""

    def __init__(self, name: str, url: str, album: Album, firsts: dict[int, Pixels]) -> None:
        self._rng = random.Random(name)
        self._headers, self._album, self._firsts = {"x-api-key": secret(name)}, album, firsts
        self._grpc = Grpc(url)
        self._pool = ThreadPoolExecutor(32)
        image = base64.b64encode(album.hot[0].image).decode()
        registration = self._grpc.control("register", headers=self._headers, image=image)
        self.template_id = str(registration["template_id"])

    def edit_until(self, end: float, stop: StopSignals | threading.Event, book: Book) -> None:
        """Send edits until the time `end` of the monotonic clock; return when all are answered."""
        pending_edits = []
        while time.monotonic() + (gap := self._rng.expovariate(1 / _EVERY_S)) < end:
            if stop.wait(gap):
                break
            pending_edits.append(self._pool.submit(self.edit, self._rng.randrange(_KINDS), book))
        for call in pending_edits:
            call.result()

    def close(self) -> None:
        self._pool.shutdown()
        self._grpc.close()

    def edit(self, kind: int, book: Book) -> None:
        """Send one edit of a kind, and add its result to the book."""
        picture = self._album.hot[kind]
        settings: dict[str, Any] = {
            "request_id": uuid.uuid4().hex,
            "num_inference_steps": _STEPS,
            "seed": kind,
            "reproducible": True,
            "output_format": "png",
        }
        inputs = {
            "IMAGE": picture.image,
            "MASK": picture.mask,
            "PROMPT": b"a red star",
        }
        if kind == 0:
            inputs["IMAGE"], settings["template_id"] = b"", self.template_id
        if kind == _CONTROLLED:
            inputs["CONTROL"], settings["controls"] = picture.image, [{"name": _NET}]
        inputs["SETTINGS"] = json.dumps(settings).encode()
        began = time.monotonic()
        try:
            pending = self._grpc.begin(inputs, _ANSWER_S, self._headers)
            answer = pending.wait(_ANSWER_S + 10.0)
        except Exception as error:
            book.add(lost=str(error)[:300] or repr(error))
            return
        elapsed_s = time.monotonic() - began
        try:
            pixels = check(picture, settings, answer)
            if not np.array_equal(pixels, self._firsts.setdefault(kind, pixels)):
                raise Unexpected(f"edit {kind} has other pixels than at first")
        except Unexpected as problem:
            book.add(wrong=str(problem)[:300])
        else:
            book.add(elapsed_s)
            book.add_times(elapsed_s, answer[1]["timings_ms"])


def secret(name: str) -> str:
    """Return the key of a client of a soak."""
    return f"key of {name}"


def hostile_soak(
    options: SoakOptions, stop: StopSignals | threading.Event, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the soak; return the summary.

    Args:
        options: options of the soak.
        stop: ends the soak early.
        names: names of the attacks; empty: all.

    Raises:
        ServeError: the server does not start, or `stop` was set: half a run has no verdict.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    config = options.out / "router.toml"
    _write_keys(config, (*_HONEST, *_ATTACKERS, _PAGE, _WITHDRAWN))
    loras = (options.out / "loras").absolute()
    loras.mkdir(parents=True, exist_ok=True)
    attacks.damage_lora(loras, 0)
    warm, calm, attacked = Book(), Book(), Book()
    seconds = 60 * options.minutes
    with ExitStack() as stack:
        supervisor = Supervisor(_serve_options(options, config, loras))
        supervisor.start(until=stop.is_set)
        stack.callback(supervisor.stop)
        _check(stop)
        worker, router, (service,) = supervisor.workers[0], supervisor.router, supervisor.services
        assert router is not None
        page_port = free_base_port(1)
        page = stack.enter_context(_page(router.grpc_url, page_port, options.out / "page.log"))
        native = load_spec(options.model, worker.config.model.native_resolution).native_resolution
        album = Album(options.seed, native, warm=1)
        firsts: dict[int, Pixels] = {}
        clients = [HonestClient(name, router.grpc_url, album, firsts) for name in _HONEST]
        for kind in (*range(_KINDS), _CONTROLLED):
            clients[0].edit(kind, warm)  # primes its template
        peak, page_peak = Peak(lambda: router.pid), Peak(lambda: page.pid)
        target = _target(supervisor, page_port, loras, album, clients[0].template_id)
        attacker = Attacker(target, seconds, options.out / "attacks.json", names)
        stack.callback(attacker.kill)
        _check(stop)
        pids = {"router": router.pid, "worker": worker.pid, "attackers": attacker.pid}
        cpu = CpuTime(pids)

        options.say("honest clients alone")
        _edit_for(_CALM_SHARE * seconds, clients, stop, calm)
        _check(stop)
        cpu.book("alone")
        _write_keys(config, (*_HONEST, *_ATTACKERS, _PAGE))
        _get(router.ports.metrics, "/reload", post=True)
        options.say("the attacks begin")
        attacker.begin()
        _edit_for(seconds, clients, stop, attacked)
        _check(stop)
        cpu.book("attacked")
        attacker.end()
        options.say("honest clients alone again")
        _edit_for(_CALM_SHARE * seconds, clients, stop, calm)
        _check(stop)

        clients[0].edit(_CONTROLLED, warm)
        for path in _readable_by_others(worker.spec.files.runtime):
            warm.add(wrong=f"others may read {path}")
        metrics = _get(router.ports.metrics, "/metrics")
        for client in clients:
            client.close()
        restarts = sum(process.restarts for process in (worker, router, service))
        drained = supervisor.stop()
    attack_counts = attacker.counts()
    summary = {
        **_edit_summary(warm, calm, attacked),
        "router_mib": peak.stop(),
        "page_mib": page_peak.stop(),
        "restarts": restarts,
        "internal_errors": internal_errors(options.out / "logs" / "router.log"),
        "least_often": least_often(attack_counts),
        "attackers_cpu_share": cpu.share("attacked", "attackers"),
        "others_cpu_share": max(cpu.others_share.values()),
        "ejections": _ejections(metrics),
    }
    problems = [text for book in (warm, calm, attacked) for text in (*book.lost, *book.wrong)]
    return {
        "model": options.model.name,
        "minutes": options.minutes,
        "summary": summary,
        "passed": passed(summary),
        "verdict": verdict(summary),
        "drained": drained,
        **_times(calm, attacked),
        "cpu_s": cpu.seconds,
        "problems": problems[:20],
        "attacks": attack_counts,
    }


class Attacker:
    """The process of the attacks; it is ready once this is made.

    Args:
        target: what it attacks.
        seconds: length of the attacks.
        report: JSON file of its counts.
        names: names of the attacks; empty: all.
    """

    def __init__(
        self, target: attacks.Target, seconds: float, report: Path, names: Sequence[str]
    ) -> None:
        processes = multiprocessing.get_context("spawn")
        self._report, self._go, ready = report, processes.Event(), processes.Event()
        arguments = (target, seconds, report, names, ready, self._go)
        self._process = processes.Process(target=attacks.main, args=arguments, daemon=True)
        self._process.start()
        ready.wait(_ANSWER_S)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def begin(self) -> None:
        """Let the attacks begin."""
        self._go.set()

    def end(self) -> None:
        """Wait for the counts of the attacks; kill what does not end."""
        self._process.join(90.0)
        self.kill()

    def kill(self) -> None:
        self._process.kill()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the requests of each attack by their end; empty: the process wrote none."""
        if not self._report.exists():
            return {}
        counts: dict[str, dict[str, int]] = json.loads(self._report.read_text())
        return counts


def _target(
    supervisor: Supervisor, page_port: int, loras: Path, album: Album, template_id: str
) -> attacks.Target:
    worker, router, (service,) = supervisor.workers[0], supervisor.router, supervisor.services
    assert router is not None
    return attacks.Target(
        router.ports.http,
        router.ports.grpc,
        worker.spec.ports.http,
        worker.spec.ports.grpc,
        secret(_ATTACKERS[0]),
        secret(_WITHDRAWN),
        page_port,
        loras,
        _socket_in(Path(service.config.runtime_dir)),
        album.hot[0].image,
        template_id,
        tuple(map(secret, _ATTACKERS[1:])),
    )


def _times(calm: Book, attacked: Book) -> dict[str, Any]:
    """Return numbers and times of honest edits, alone and under attack."""
    return {
        "edits": {"alone": len(calm.seconds), "attacked": len(attacked.seconds)},
        "p95_s": {"alone": round(calm.p95(), 3), "attacked": round(attacked.p95(), 3)},
        "stages_ms": {
            "alone": calm.means(),
            "attacked": attacked.means(),
            "slowest tenth": attacked.means(0.1),
        },
    }


def _check(stop: StopSignals | threading.Event) -> None:
    if stop.is_set():
        raise ServeError("stopped before its end: there is no verdict")


def _serve_options(options: SoakOptions, router_config: Path, loras: Path) -> ServeOptions:
    """Return the options of the attacked server: a worker, a router and a ControlNet service."""
    base = free_base_port(2)
    with Workflow(attacks.WORKFLOW, "An edit of an edit.") as flow:
        mask, prompt = flow.mask("mask"), flow.text("prompt")
        flow.gives(image=edit(edit(flow.picture("image"), mask, prompt), mask, prompt))
    workflows = options.out / "workflows"
    workflows.mkdir(exist_ok=True)
    (workflows / f"{attacks.WORKFLOW}.json").write_bytes(dump_plan(compiled(flow.plan)))
    return ServeOptions(
        model=str(options.model),
        base_port=base,
        router=True,
        router_port=base + STRIDE,
        router_config=router_config,
        config=write_config(options),
        adapters=str(loras),
        controlnets=str(CHECKOUT / "assets" / "controlnets"),
        services=("controlnet@cpu",),
        workflows=workflows,
        log_dir=options.out / "logs",
        report=options.say,
    )


def _edit_summary(warm: Book, calm: Book, attacked: Book) -> dict[str, float]:
    books = (warm, calm, attacked)
    return {
        "lost": sum(len(book.lost) for book in books),
        "wrong": sum(len(book.wrong) for book in books),
        "p95_ratio": round(attacked.p95() / max(calm.p95(), 1e-9), 2),
    }


def _ejections(metrics: str) -> int:
    """Return the router's ejections of workers, from its metrics page."""
    return int(sum(map(float, re.findall(r"maskserve_ejections_total{.*} (\S+)", metrics))))


def passed(summary: dict[str, Any]) -> bool:
    """Return whether each attack was answered and no honest client was hurt."""
    return verdict(summary) == PASSED


PASSED, MISSED, NOT_JUDGED = "passed", "MISSED", "not judged"


def verdict(summary: dict[str, Any]) -> str:
    """Return the verdict on a run. Wrong pixels, an internal error and too much memory count on any
    machine. Slow or late edits, a server taken for dead, and idle attackers count only if other
    processes did not use the processor.
    """
    small = all(0 < summary[name] <= MIB_BAR for name in ("router_mib", "page_mib"))
    if any(summary.get(name, 0) for name in ("wrong", "internal_errors")) or not small:
        return MISSED
    if summary.get("others_cpu_share", 0.0) > BUSY:
        return NOT_JUDGED
    in_time = 0 < summary["p95_ratio"] <= P95_BAR
    none = not any(summary[name] for name in ("lost", "restarts", "ejections"))
    return PASSED if none and in_time and summary["least_often"] > 0 else MISSED


def internal_errors(log: Path) -> int:
    """Count the lines of a router's log that hold the trace of an exception."""
    if not log.exists():
        return 0
    with log.open(encoding="utf-8", errors="replace") as lines:
        return sum('"exc":' in line or line.startswith("Traceback") for line in lines)


def least_often(counts_by_attack: dict[str, dict[str, int]]) -> int:
    """Return the number of answered requests of the attack that has the fewest. An attacker without
    processor time attacks nobody.
    """
    answered_counts = [
        {end: n for end, n in ends.items() if end not in _NONE}
        for ends in counts_by_attack.values()
    ]
    return min((sum(ends.values()) for ends in answered_counts), default=0)


class Peak:
    """Samples the largest memory of a process and its successors, in a thread."""

    def __init__(self, pid: Any) -> None:
        self._pid, self._mib = pid, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop sampling; return the largest memory in MiB."""
        self._stopping.set()
        self._thread.join()
        return self._mib

    def _sample(self) -> None:
        while not self._stopping.wait(0.5):
            with suppress(OSError, AttributeError):
                status = Path(f"/proc/{self._pid()}/status").read_text(encoding="ascii")
                match = re.search(r"VmHWM:\s+(\d+) kB", status)
                self._mib = max(self._mib, int(match[1]) // 1024 if match else 0)


class CpuTime:
    """Processor seconds of processes and all their children, by phase."""

    def __init__(self, pids: dict[str, int | None]) -> None:
        self._pids = pids
        self._last, self._at = self._process_seconds(), self._machine()
        self.seconds: dict[str, dict[str, float]] = {}
        """Phase → name → seconds."""
        self.others_share: dict[str, float] = {}
        """Phase → share of the machine's time that processes outside this soak took."""
        self._machine_seconds: dict[str, float] = {}
        """Phase → the machine's processor seconds."""

    def book(self, phase: str) -> None:
        """Add the processor time since the last phase."""
        process_s, at = self._process_seconds(), self._machine()
        self.seconds[phase] = {
            name: round(process_s[name] - self._last[name], 1) for name in process_s
        }
        machine_s, busy, soak_s = (
            after - before for before, after in zip(self._at, at, strict=True)
        )
        self._machine_seconds[phase] = max(machine_s, 1e-9)
        self.others_share[phase] = round(max(busy - soak_s, 0.0) / self._machine_seconds[phase], 3)
        self._last, self._at = process_s, at

    def share(self, phase: str, name: str) -> float:
        """Return the share of the machine's time in a phase that processes of this name took."""
        return round(self.seconds[phase][name] / self._machine_seconds[phase], 3)

    def _machine(self) -> tuple[float, float, float]:
        """Return processor seconds: all that passed, those in use, and those of this soak."""
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        busy -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted twice
        process = psutil.Process()
        soak_s = sum(process.cpu_times()[:4])  # includes ended children
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                soak_s += sum(child.cpu_times()[:4])
        return time.monotonic() * (os.cpu_count() or 1), busy, soak_s

    def _process_seconds(self) -> dict[str, float]:
        seconds = dict.fromkeys(self._pids, 0.0)
        for name, pid in self._pids.items():
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(pid)
                for process in (first, *first.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        seconds[name] += sum(process.cpu_times()[:2])
        return seconds


def _edit_for(
    seconds: float, clients: Sequence[HonestClient], stop: StopSignals | threading.Event, book: Book
) -> None:
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client.edit_until, args=(end, stop, book)) for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _write_keys(path: Path, names: Sequence[str]) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(secret(name).encode()).hexdigest()}
        for name in names
    ]
    path.write_bytes(toml.encode({"keys": keys}))


@contextmanager
def _page(url: str, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `maskserve web` at this port. It ends with this process, whatever ends that."""
    program = Path(sys.executable).with_name("maskserve")
    command = [sys.executable, launch.__file__, str(os.getpid()), str(program), "web"]
    command += ["--url", url, "--port", str(port)]
    environment = {**os.environ, "MASKSERVE_KEY": secret(_PAGE)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as page,
    ):
        try:
            yield page
        finally:
            # Not SIGINT: what a shell starts in the background ignores it, as do its children.
            page.terminate()
            with suppress(subprocess.TimeoutExpired):
                page.wait(_PAGE_ENDS_S)
            page.kill()


def _socket_in(folder: Path) -> Path:
    return next(path for path in folder.rglob("*") if path.is_socket())


def _readable_by_others(folder: Path) -> list[Path]:
    """Return the files in the folder that another user may read."""
    paths = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mode & 0o077:
                paths.append(path)
    return paths


def _get(port: int, path: str, *, post: bool = False) -> str:
    """Return a page of the operators' port."""
    url, data = f"http://127.0.0.1:{port}{path}", b"" if post else None
    with urllib.request.urlopen(url, data, timeout=60) as page:
        text: str = page.read().decode()
    return text
