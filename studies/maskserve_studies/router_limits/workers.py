"""Measure the share of a core that a router uses, by number of workers: for polls of emulated
workers over gRPC, for decisions, for decisions with a deadline, and with all workers full.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.server import SERVICE, answer_of
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.status_record import NodeStatus, RowStatus, Served, WorkerStatus
from maskserve_common.listings import TemplateListings
from maskserve_common.routing import Edit, make_policy
from maskserve_router.config import RouterConfig, router_config_of
from maskserve_router.listeners.descriptors import raise_limit
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.edit_forecast import EditForecast
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import Worker, read_status

_MODEL: Final = "m"
_ROWS, _PLACES = 8, 8
_TOKENS, _STEPS = 4608, 28
_TEMPLATE_CHANGE_S: Final = 10.0
"""How often an emulated worker gains one template and loses another."""


def main() -> int:
    raise_limit()
    parser = argparse.ArgumentParser(prog="scripts/bench router_scale", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--templates", type=int, default=10_000, help="of each (10000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of polling (10)")
    parser.add_argument("--edits", type=int, default=200, help="decided for (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = [asyncio.run(_measure(count, options)) for count in options.workers]
    report = {**about(machine()), "templates": options.templates, "workers": results}
    write_json(report, options.json)
    names = [key for key in results[0] if key != "workers"]
    columns = ["", *(f"{result['workers']} workers" for result in results)]
    print(table(columns, ([name, *(result[name] for result in results)] for name in names)))
    return 0


async def _measure(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `count` workers."""
    polling = await _measure_polls(count, options)
    decisions = await _measure_decisions(count, options)
    return {"workers": count, **polling, **decisions}


# Polls over sockets


async def _measure_polls(count: int, options: argparse.Namespace) -> dict[str, Any]:
    parent_pipe, child_pipe = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    arguments = (child_pipe, count, options.templates, options.seed)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    pool: Pool | None = None
    try:
        addresses = await asyncio.to_thread(parent_pipe.recv)
        tables = {"workers": {"addresses": addresses, "poll_timeout_s": 30.0}}
        pool = Pool(router_config_of(tables), lambda: None)
        begin = time.process_time()
        await pool.all_polled()
        first_s = time.process_time() - begin
        misses = _Misses(pool)
        await asyncio.sleep(1.0)
        cpu_before_s, heard = time.process_time(), misses.heard()
        begin = time.perf_counter()
        for _ in range(max(1, round(options.seconds / 0.5))):
            await asyncio.sleep(0.5)
            misses.look()
        seconds = time.perf_counter() - begin
        return {
            "first records, s of a core": round(first_s, 2),
            "polls, cores": round((time.process_time() - cpu_before_s) / seconds, 3),
            "polls/s": round((misses.heard() - heard) / seconds),
            "workers not heard": misses.worst,
        }
    finally:
        if pool is not None:
            await pool.close()
        process.terminate()
        process.join()


class _Misses:
    """Counts records that a pool receives, and notes the largest number of workers without a
    response.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool, self.worst, self._count = pool, 0, 0
        for worker in pool.workers.values():
            worker.changed = self._heard(worker.changed)

    def _heard(self, before: Callable[[Worker], object] | None) -> Callable[[Worker], object]:
        def heard(worker: Worker) -> None:
            self._count += 1
            if before is not None:
                before(worker)

        return heard

    def heard(self) -> int:
        self._pool.roster.table(time.monotonic())
        return self._count

    def look(self) -> None:
        self._pool.roster.table(time.monotonic())
        missed = sum(not worker.up or worker.misses > 0 for worker in self._pool.workers.values())
        self.worst = max(self.worst, missed)


def _serve(pipe: Connection, count: int, templates: int, seed: int) -> None:
    raise_limit()
    asyncio.run(_serve_records(pipe, count, templates, seed))


async def _serve_records(pipe: Connection, count: int, templates: int, seed: int) -> None:
    """Run workers that all send the same records, at different ports, until the process ends."""
    records = _EmulatedRecords(templates, random.Random(seed))

    async def infer(raw: bytes, context: Any) -> bytes:
        message = pb.ModelInferRequest.FromString(raw)
        operation = msgspec.json.decode(message.raw_input_contents[0][4:])
        return answer_of("control", {"RESULT": [records.status(operation.get("templates"))]})

    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(count)]
    await server.start()
    pipe.send([f"127.0.0.1:{port}" for port in ports])
    await server.wait_for_termination()


class _EmulatedRecords:
    """Status of an emulated worker: rows that step, and now and then a new template."""

    def __init__(self, templates: int, rng: random.Random) -> None:
        self._ids = _ids(templates + 1000)
        self._count, self._rng, self._first = templates, rng, 0
        self._listings, self._answers, self._at = TemplateListings(), dict[str | None, bytes](), 0.0

    def status(self, known: str | None) -> bytes:
        now_s = time.monotonic()
        if now_s - self._at > _TEMPLATE_CHANGE_S:
            self._at = now_s
            self._answers.clear()
            self._first = (self._first + 1) % 1000
            templates = {"host": self._ids[self._first : self._first + self._count]}
            self._listings.take(memoryview(msgspec.json.encode(templates)))
            self._record = record(0, self._rng, templates)
        if known not in self._answers:
            fields = msgspec.to_builtins(self._record) | {
                "age_s": 0.0,
                "alive": True,
                "in_flight": 9,
            }
            if known is not None:
                changes = msgspec.to_builtins(self._listings.changes(known))
                fields |= {"templates": {}, "template_changes": changes}
            self._answers[known] = msgspec.json.encode(fields)
        return self._answers[known]


def _ids(count: int) -> list[str]:
    return [f"{number * 0x9E3779B97F4A7C15 & (1 << 64) - 1:016x}" * 2 for number in range(count)]


def record(number: int, rng: random.Random, templates: dict[str, list[str]]) -> WorkerStatus:
    """Return a record of a busy worker: most of its rows are taken, and some edits wait."""

    def rows(count: int, prefix: str) -> tuple[RowStatus, ...]:
        return tuple(
            RowStatus(
                f"{prefix}{number}-{index}",
                "cached",
                rng.randrange(100, 1000),
                _TOKENS,
                rng.randrange(1, _STEPS),
            )
            for index in range(count)
        )

    noise = 0.95 + 0.1 * rng.random()
    return WorkerStatus(
        f"w{number}",
        _MODEL,
        "ready",
        _ROWS,
        99,
        running=rows(rng.randrange(4, _ROWS + 1), "r"),
        waiting=rows(rng.randrange(4), "q"),
        templates={tier: tuple(ids) for tier, ids in templates.items()},
        pricing=Pricing(0.005 * noise, 0.1 * noise, 0.01, 2e-5, 1e-7, {"disk": 0.5}, 4096.0),
        served=Served(1024, 16, _STEPS),
        nodes=(NodeStatus("denoiser", _MODEL, "ready"),),
    )


# Decisions in this process


async def _measure_decisions(count: int, options: argparse.Namespace) -> dict[str, Any]:
    rng, config = random.Random(options.seed), RouterConfig()
    ids = _ids(2 * options.templates)
    pool = Pool(config, lambda: None)
    for number in range(count):
        templates = {"host": rng.sample(ids, min(options.templates, 160))}
        if number == 0:
            templates["disk"] = ids[: options.templates]
        _take_record(
            pool.join(f"10.{number // 62500}.{number // 250 % 250}.{number % 250}:1"),
            templates,
            rng,
        )
    disk = ids[: options.templates]
    for worker in list(pool.workers.values())[1:]:  # hosts' disks hold much the same
        worker.index.add(worker.number, "disk", disk)
    names = itertools.count()
    decision_times: list[float] = []
    queue = PendingQueue(pool, make_policy("mask_aware"), 5.0, decision_times.append)
    times = EditForecast(pool, queue, config.admission.deadline_slack, Metrics())

    def edit() -> Edit:
        tokens = rng.randrange(100, 2000)
        return Edit(_STEPS, tokens, _TOKENS, rng.choice(ids), model=_MODEL, inner_tokens=tokens)

    async def place(edit_to_place: Edit) -> None:
        queue.leave(await queue.enter(f"e{next(names)}", edit_to_place, time.monotonic(), None))

    def deadline(edit_to_place: Edit) -> None:
        now_s = time.monotonic()
        call = _call(f"d{next(names)}", now_s)
        times.alone_s(call, edit_to_place)
        times.soonest_s(call, edit_to_place, now_s)

    async def judge_deadline(edit_to_place: Edit) -> None:
        deadline(edit_to_place)

    placement_times = await _timed(place, edit, options.edits)
    deadline_times = await _timed(judge_deadline, edit, options.edits)
    workers = list(pool.workers.values())
    for worker in workers:  # all workers are full
        assert worker.status is not None
        status = structs.replace(worker.status, waiting=worker.status.running[:1] * 99)
        worker.take_status(status, time.monotonic())
    waiting = [
        asyncio.create_task(queue.enter(f"x{next(names)}", edit(), time.monotonic(), None))
        for _ in range(500)
    ]
    await asyncio.sleep(0)

    async def poll(_: Edit) -> None:
        worker = rng.choice(workers)
        assert worker.status is not None
        worker.take_status(worker.status, time.monotonic())
        queue.dispatch()

    poll_times = await _timed(poll, edit, options.edits)
    full_times = await _timed(judge_deadline, edit, min(options.edits, 50))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for worker in workers:
        await worker.upstream.close()
    return {
        "a decision, ms": _ms(decision_times[: options.edits]),
        "an edit in and out, ms": _ms(placement_times),
        "a deadline judged, ms": _ms(deadline_times),
        "the same, all full and 500 waiting, ms": _ms(full_times),
        "a record taken in, all full and 500 waiting, ms": _ms(poll_times),
    }


def _take_record(worker: Worker, templates: dict[str, list[str]], rng: random.Random) -> None:
    fields = msgspec.to_builtins(record(worker.number, rng, templates))
    fields |= {"age_s": 0.0, "alive": True, "in_flight": 0}
    worker.take_status(read_status(msgspec.json.encode(fields)), time.monotonic())


def _call(name: str, now: float) -> Any:
    return SimpleNamespace(request_id=name, arrival=now, starts_by=None, primed=False)


async def _timed(
    work: Callable[[Edit], Awaitable[None]], edit: Callable[[], Edit], count: int
) -> list[float]:
    """Return the seconds of a core that each round took."""
    seconds = []
    for _ in range(count):
        new_edit = edit()
        begin = time.thread_time()
        await work(new_edit)
        seconds.append(time.thread_time() - begin)
    return seconds


def _ms(seconds: Sequence[float]) -> str:
    """Format the median and the 95th percentile."""
    ranked = sorted(seconds)
    p95 = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
    return f"{1e3 * statistics.median(ranked):.2f}, P95 {1e3 * p95:.2f}"
