"""Operations of `control` on the cluster: on all workers, or on the worker that has the edit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.keys import NO_SCOPE, edit_of, name_of, scope_of
from maskserve_common.contracts.operations import ADAPTER_WRITES, PATIENT, SCOPED
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.routing import Edit, NoWorkerAvailable
from maskserve_common.servers.failure import Failure
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.client_call import request_id_of
from maskserve_router.messages.control_message import (
    check_image,
    control_request,
    image_size,
    read_operation,
)
from maskserve_router.messages.failures import NotSupported, Unauthorized
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.operations.replication_queue import ReplicationQueue, is_refusal
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.dispatch import Dispatcher
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workers.autoscaling import workers_needed
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.predictions import Predictions
from maskserve_router.workers.worker import Worker

log = logging.getLogger("maskserve.router")
_TIMEOUT_S = 12.0
_LONG_TIMEOUT_S = 75.0
"""Timeout of long operations (`PATIENT`)."""


class ClusterControl:
    """Runs operations on the cluster."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        dispatcher: Dispatcher,
        admission: Admission,
        fair_share: FairShare,
        predictions: Predictions,
        workflows: ServedWorkflows,
    ) -> None:
        self._workflows = workflows
        self._name, self._pool, self._dispatcher = name, pool, dispatcher
        self._admission, self._fair_share, self._predictions = admission, fair_share, predictions
        self.replication_queue = ReplicationQueue(pool, pool.config.workers.missed_bytes, _ask)

    async def infer(self, message: ModelRequest, client: KeyHolder) -> bytes:
        """Answer a request of the model `control`.

        Raises:
            MaskserveError: the operation is unknown, or no worker can run it.
            Failure: a worker's error.
        """
        try:
            text = message.view("OP")
        except LookupError:
            raise InvalidRequest("OP", "is not one BYTES element", "a JSON object") from None
        operation = await self._fair_share.run(client, len(text), read_operation, text)
        result = msgspec.json.encode(await self.do(operation, client))
        answer = pb.ModelInferResponse(model_name="control", model_version="1", id=message.head.id)
        bytes_tensor.add_output(answer, "RESULT", [result])
        encoded: bytes = answer.SerializeToString()
        return encoded

    async def do(self, operation: dict[str, Any], client: KeyHolder) -> dict[str, Any]:
        """Run one operation and return its result; raises as `infer` does."""
        # One copy of the image is in the message, and gRPC makes one for each worker.
        copies = 1 + len(self._pool.workers)
        with self._admission.operation(client, copies * image_size(operation)):
            result = await self._run(operation, client)
        if client.admin:
            return result
        # Only operators see workers' addresses; other clients see numbers.
        numbers = {w: f"worker {n}" for n, w in enumerate(sorted(self._pool.workers), 1)}
        renamed: dict[str, Any] = _renamed(result, numbers)
        return renamed

    async def _run(self, operation: dict[str, Any], client: KeyHolder) -> dict[str, Any]:
        name = operation["op"]
        if "scope" in operation:
            raise InvalidRequest("OP.scope", "is set by the router", "an operation without it")
        if name in SCOPED and not client.admin:
            operation = {**operation, "scope": client.scope}
        if name == "register":
            check_image(operation)
            # Also for an admin, which owns its registrations and sees all others.
            operation["scope"] = client.scope
            operation["shared"] = operation.get("shared", False) or client.shares
        match name:
            case "drain":
                raise NotSupported(
                    "OP.op", "drain is for operators", "POST /workers/ADDRESS/drain (admin port)"
                )
            case "status":
                status = cluster_status(self._name, self._pool.workers.values(), self._predictions)
                status["nodes"] = await self._workflows.node_servers(client)
                status["wanted"] = {
                    "workers": workers_needed(self._pool.workers.values()),
                    "nodes": self._workflows.node_servers_needed(),
                }
                return status if client.admin else _visible_to(client, status)
            case "cancel":
                return await self._cancel(operation["request_id"], client)
            case "templates":
                templates = merged_templates(await self._everywhere(operation, client))
                for template in templates:
                    template["pending"] = self.replication_queue.pending(template["template_id"])
                    if not client.admin:  # only admins see a template's owners
                        template["owners"] = []
                return {"templates": templates}
            case "heartbeat":
                return {"workers": await self._everywhere(operation, client)}
            case "register" | "evict":
                return await self._on_all(operation, client)
            case "adapters":
                merged = merged_adapters(await self._everywhere(operation, client))
                visible_adapters = [
                    adapter for adapter in merged["adapters"] if client.sees(adapter["name"])
                ]
                return {**merged, "adapters": visible_adapters}
            case "adapter_check":
                client.check_adapters([operation["name"]], "OP.name")
        if name in ADAPTER_WRITES and not client.admin:
            raise Unauthorized("OP.op", f"{name} is for operators", "a key with admin = true")
        answers = await self._everywhere(operation, client)
        first = next(iter(answers.values()))
        return {**first, "workers": sorted(answers)}

    async def _cancel(self, name: str, client: KeyHolder) -> dict[str, Any]:
        """Cancel an edit of this router, which also frees its row; otherwise call all workers.

        An admin may cancel another client's edit, under the id that `status` shows.
        """
        is_foreign_edit = client.admin and scope_of(name) != NO_SCOPE
        request_id = edit_of(name) if is_foreign_edit else request_id_of(name, client.scope)
        if self._workflows.cancel(request_id) or self._dispatcher.cancel(request_id):
            return {"cancelled": True}
        answers = await self._everywhere({"op": "cancel", "request_id": request_id}, client)
        return {"cancelled": any(answer.get("cancelled") for answer in answers.values())}

    async def _on_all(self, operation: dict[str, Any], client: KeyHolder) -> dict[str, Any]:
        """Run an operation on the workers that answer, and queue it for the others."""
        results, failed = await self._outcomes(operation, client)
        first = next(iter(results.values()))
        refusals = [worker for worker, failure in failed.items() if is_refusal(failure)]
        missed_by = self._pool.workers.keys() - {*results, *refusals}
        name = first.get("template_id", "")
        self._dispatcher.homes.forget(name)
        pending = self.replication_queue.keep(operation, name, missed_by)
        return {**first, "workers": sorted(results), "pending": pending}

    async def _everywhere(
        self, operation: dict[str, Any], client: KeyHolder
    ) -> dict[str, dict[str, Any]]:
        """Return worker -> answer of those that succeeded; raises as `_outcomes` does."""
        results, _ = await self._outcomes(operation, client)
        return results

    async def _outcomes(
        self, operation: dict[str, Any], client: KeyHolder
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Failure]]:
        """Return worker -> answer of those that succeeded, and worker -> failure of the others.

        Raises:
            Failure: all workers failed; a refusal takes precedence over a fault of a worker.
        """
        workers = self._pool.up()
        if not workers:
            raise NoWorkerAvailable(Edit(1, 1, 1), [])
        size = image_size(operation)
        request = await self._fair_share.run(client, size, control_request, operation)
        answers = await asyncio.gather(
            *(_ask(worker, operation, request) for worker in workers), return_exceptions=True
        )
        results: dict[str, dict[str, Any]] = {}
        failed: dict[str, Failure] = {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, Failure):
                failed[worker.address] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                results[worker.address] = answer
        if not results:
            raise min(failed.values(), key=lambda failure: not is_refusal(failure))
        return results, failed


async def _ask(
    worker: Worker, operation: dict[str, Any], request: bytes | None = None
) -> dict[str, Any]:
    """Return a worker's answer to an operation. `request` is the encoded operation, if there is one
    already.
    """
    timeout = _LONG_TIMEOUT_S if operation["op"] in PATIENT else _TIMEOUT_S
    try:
        raw = await worker.upstream.control(request or control_request(operation), timeout)
        answer: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        return answer
    except Failure as failure:
        if not failure.coded:
            log.warning("worker %s: %s: %s", worker.address, operation["op"], failure.details[:300])
        raise
    except (msgspec.MsgspecError, IndexError):
        log.warning("worker %s sent an unexpected answer to %s", worker.address, operation["op"])
        raise EngineFailed("a worker sent an unexpected answer") from None


def cluster_status(
    name: str, workers: Iterable[Worker], predictions: Predictions
) -> dict[str, Any]:
    """Return the status of all workers together, in the form of one worker's status, and under
    `workers` the status of each.
    """
    statuses = {worker.address: _status(worker) for worker in workers}
    up = [status for status in statuses.values() if status["up"]]
    tiers = sorted({tier for status in up for tier in status.get("templates", {})})

    def total(key: str) -> int:
        return sum(status.get(key, 0) for status in up)

    def rows(key: str) -> list[dict[str, Any]]:
        return [
            {**row, "worker": address}
            for address, status in statuses.items()
            if status["up"]
            for row in status.get(key, ())
        ]

    return {
        "worker": name,
        "model": ", ".join(sorted({status["model"] for status in up})),
        "state": "ready" if any(status["state"] == "ready" for status in up) else "loading",
        "alive": bool(up),
        "max_rows": total("max_rows"),
        "max_waiting": total("max_waiting"),
        "running": rows("running"),
        "waiting": rows("waiting"),
        "in_flight": total("in_flight"),
        "templates": {
            tier: sorted({i for status in up for i in status["templates"].get(tier, ())})
            for tier in tiers
        },
        "tier_bytes": _summed(status.get("tier_bytes", {}) for status in up),
        "counters": _summed(status.get("counters", {}) for status in up),
        "values": _values_by_host(status["values"] for status in up if "values" in status),
        "prediction": msgspec.to_builtins(predictions.error()),
        "workers": statuses,
    }


def _values_by_host(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record of stored values per host; all workers of a host report the same."""
    hosts = {record["host"]: record for record in records if record["host"]}
    return [record for _, record in sorted(hosts.items())]


def _visible_to(client: KeyHolder, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status without other clients' edits and LoRAs and without template ids.

    Counts stay, because every client's waiting time depends on them.
    """

    def visible_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**row, "request_id": name_of(row["request_id"])}
            for row in rows
            if scope_of(row["request_id"]) == client.scope
        ]

    def visible_record(record: dict[str, Any]) -> dict[str, Any]:
        visible = {key: value for key, value in record.items() if key != "templates"}
        if "adapters" in visible:
            visible["adapters"] = [
                adapter for adapter in visible["adapters"] if client.sees(adapter["name"])
            ]
        return {
            **visible,
            **{key: visible_rows(record[key]) for key in ("running", "waiting") if key in record},
        }

    workers = {address: visible_record(record) for address, record in status["workers"].items()}
    return {**visible_record(status), "templates": {}, "workers": workers}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a JSON value with all of these names replaced."""
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _summed(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _status(worker: Worker) -> dict[str, Any]:
    router_fields = {
        "up": worker.up,
        "ejected": worker.breaker.ejected,
        "draining": worker.draining,
        "sent": len(worker.sent),
    }
    status = worker.status
    if status is None:
        return {"state": "unknown", **router_fields}
    if not worker.up:  # its last record is too old
        return {"worker": status.worker, "model": status.model, "state": "down", **router_fields}
    record = msgspec.to_builtins(structs.replace(status, template_changes=None))
    del record["template_changes"]
    return {**record, "templates": worker.index.of(worker.number), **router_fields}


def merged_templates(answers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the templates of all workers by id, each with the workers that have its image."""
    merged: dict[str, dict[str, Any]] = {}
    for address, answer in answers.items():
        for template in answer["templates"]:
            name = template["template_id"]
            total = merged.setdefault(
                name,
                {
                    "template_id": name,
                    "registered": False,
                    "expires_s": None,
                    "owners": [],
                    "entries": [],
                    "workers": [],
                },
            )
            total["registered"] |= template["registered"]
            expiries_s = [
                t["expires_s"] for t in (total, template) if t.get("expires_s") is not None
            ]
            total["expires_s"] = max(expiries_s, default=None)
            total["owners"] = sorted({*total["owners"], *template.get("owners", ())})
            total["entries"] += [{**entry, "worker": address} for entry in template["entries"]]
            if template["registered"]:
                total["workers"].append(address)
    return [merged[name] for name in sorted(merged)]


def merged_adapters(answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all workers' adapters and ControlNets by name, each with its tiers per worker."""
    merged: dict[str, dict[str, Any]] = {}
    nets: dict[str, dict[str, Any]] = {}
    for address, answer in answers.items():
        for net in answer.get("controlnets", ()):
            total = nets.setdefault(net["name"], {**net, "tiers": {}})
            total["tiers"][address] = net.get("tiers", [])
        for adapter in answer["adapters"]:
            total = merged.setdefault(adapter["name"], {**adapter, "tiers": {}, "pinned": False})
            total["tiers"][address] = adapter["tiers"]
            total["pinned"] |= adapter["pinned"]
    problems = [answer["problem"] for answer in answers.values() if answer["problem"]]
    return {
        "adapters": [merged[name] for name in sorted(merged)],
        "controlnets": [nets[name] for name in sorted(nets)],
        "problem": problems[0] if problems else "",
    }
