"""The `control` model: operations on the worker, JSON in, JSON out.

`status` and `drain` only read and write files, so they are answered at once. The others call
another process: `cancel` the fronts, the operations on adapters the storage, all others the
denoiser. They wait in threads that the keys share, cancels in threads of their own. If the other
process does not answer in time, the operation ends with an error.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.keys import NO_SCOPE, SHARED, TEMPLATE_ID, entries_id
from maskserve_common.contracts.operations import PATIENT, parse_operation
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.status_record import WorkerStatus
from maskserve_common.errors import (
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    TemplateNotFound,
    guarded,
)
from maskserve_common.files.stages import StageOutages
from maskserve_common.files.values import Values
from maskserve_common.imaging.images import Decoded, decode_image, read_size
from maskserve_common.listings import TemplateListings
from maskserve_common.liveness import silence_limit_s, unwell
from maskserve_common.niceness import Niceness
from maskserve_common.shares import Full
from maskserve_common.status import StatusReader
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_lora.operations import AdapterOperations
from maskserve_triton.admission import OPEN, AdmissionState
from maskserve_triton.answer import Answer, answer_all
from maskserve_triton.cancels import cancel_edit
from maskserve_triton.fair_threads import FairThreads
from maskserve_triton.picture_threads import LARGE_PIXELS
from maskserve_triton.pipeline import ask_denoiser, prime_template
from maskserve_triton.templates import templates_of
from maskserve_triton.tensor_io import read_bytes

log = logging.getLogger("maskserve")

ORIGIN = "origin"
"""Header by which a browser names the page that sends the request."""
_FILE_OPERATIONS = ("status", "drain")
"""Operations that call no other process."""
_PATIENT_S = 60.0
_THREADS, _CANCELS = 8, 4
_LARGE = 2
"""Large pictures that are decoded at a time; one of 50 megapixels takes half a gigabyte."""
_LOCKS = 64
_MOST_WAITING = 256
"""Most operations that wait for a thread."""


class _Unlisted(WorkerStatus):
    """A status record whose templates stay JSON."""

    templates: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment]


class WorkerControl:
    """The operations of one worker."""

    def __init__(self, api: Any, config: Config) -> None:
        self._api = api
        self._config = config
        self._status = StatusReader(f"{config.runtime_dir}/status")
        self._admission = AdmissionState(config.runtime_dir)
        self._stages = StageOutages(config)
        self._values = Values(config.values)
        self._templates = templates_of(config, self._values)
        self._template_locks = [threading.Lock() for _ in range(_LOCKS)]
        """Locks for `put` and `evict` of a template, chosen by its id."""
        self._large = threading.Semaphore(_LARGE)
        self._listings = TemplateListings()
        self._adapters = AdapterOperations(config)
        self._threads = FairThreads(_THREADS, _MOST_WAITING, "control", Niceness.OPERATIONS)
        # Cancels come when a worker is slow, so they wait behind no other operation.
        self._cancels = FairThreads(_CANCELS, _MOST_WAITING, "control-cancels")

    def execute(self, requests: list[Any]) -> None:
        """Accept operations; each is answered exactly once."""
        answer_all(self._api, requests, self._take)

    def _take(self, request: Any, answer: Answer) -> None:
        if _is_from_browser(request):
            accepted = "a program, or the operators' port of a router"
            raise InvalidRequest("Origin", "is set, so a web page sends the request", accepted)
        operation = parse_operation(read_bytes(self._api, request, "OP"))
        if operation["op"] in _FILE_OPERATIONS:
            _reply(answer, self._run_on_files(operation))
        else:
            self._queue(operation, answer)

    def close(self) -> None:
        self._adapters.close()
        self._threads.close()
        self._cancels.close()

    def _run_on_files(self, operation: dict[str, Any]) -> dict[str, Any]:
        match operation["op"]:
            case "status":
                return self._read_status(operation.get("templates"))
            case "drain":
                self._admission.drain()
                return {"draining": True, "in_flight": self._admission.in_flight()}
        raise AssertionError(operation)

    def _run(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Run an operation that calls another process; blocks."""
        match operation["op"]:
            case "cancel":
                is_cancelled = cancel_edit(self._config.runtime_dir, operation["request_id"])
                return {"cancelled": is_cancelled}
            case "templates":
                return {"templates": self._list(operation.get("scope", NO_SCOPE))}
            case "register":
                return self._register(operation)
            case "prime":
                return self._prime(self._named(operation))
            case "pin" | "unpin":
                name, scope = self._named(operation), operation.get("scope", NO_SCOPE)
                return self._pin(operation["op"], name, scope)
            case "evict":
                return self._evict(self._named(operation), operation.get("scope", NO_SCOPE))
            case "adapters":
                return {**self._adapters.overview(), "controlnets": self._controlnets()}
            case "adapter_check":
                return self._adapters.check(operation["name"])
            case "adapter_load":
                return self._adapters.load(operation["name"])
            case "adapter_pin" | "adapter_unpin":
                return self._adapters.pin(
                    operation["name"], pinned=operation["op"] == "adapter_pin"
                )
            case "adapter_evict":
                return self._adapters.evict(operation["name"])
            case _:
                return ask_denoiser(self._api, operation)

    def _controlnets(self) -> list[dict[str, Any]]:
        if not self._config.controls.folder:
            return []
        model = self._config.model
        spec = load_spec(model.path, model.native_resolution)
        status = self._status.read()
        tiers = (
            {}
            if status is None
            else {controlnet.name: controlnet.tier for controlnet in status.controlnets}
        )
        return [
            {
                "name": net.name,
                "bytes": net.nbytes,
                "modes": net.modes,
                "problem": net.problem,
                "tiers": [tiers[net.name]] if net.name in tiers else [],
            }
            for net in ControlNets(self._config, spec).all()
        ]

    def _read_status(self, known: str | None) -> dict[str, Any]:
        """Return the engine's record with its age, the admission state, and the stages that
        services run.

        Args:
            known: version of the template list that the client has; the record then has only the
                changes since. None: the record has the whole list.
        """
        raw, changes = self._status.read_json(), {}
        try:
            status = (WorkerStatus if known is None else _Unlisted).from_json(raw or b"")
        except ValueError:
            raise EngineFailed("the engine has not started") from None
        if known is not None:
            self._listings.take(memoryview(status.templates))  # type: ignore[arg-type]
            status.templates = {}
            changes = {"template_changes": to_builtins(self._listings.changes(known))}
        full_status = replace(
            status,
            nodes=(*status.nodes, *self._stages.nodes(status.model)),
            services=(*status.services, *self._stages.services()),
            values=self._values.stored(),
        )
        values: dict[str, Any] = json.loads(full_status.to_json())
        age = status.age_s()
        if self._admission.state() != OPEN:
            for record in (values, *values["nodes"]):
                record["state"] = "draining" if record["state"] == "ready" else record["state"]
        alive = age <= silence_limit_s(status, self._config.engine.heartbeat_timeout_s)
        return {
            **values,
            **changes,
            "age_s": round(age, 4),
            "alive": alive and unwell(self._config.runtime_dir) is None,
            "in_flight": self._admission.in_flight(),
        }

    def _named(self, operation: dict[str, Any]) -> str:
        """Return the template id in an operation, if its client may see the template.

        Raises:
            InvalidRequest: it is not a template id.
            TemplateNotFound: the template belongs to another client.
        """
        name = operation["template_id"]
        if TEMPLATE_ID.fullmatch(name) is None:
            raise InvalidRequest(
                "OP.template_id", "has another form", "16 to 64 lower-case hexadecimal digits"
            )
        if not self._templates.shows(name, operation.get("scope", NO_SCOPE)):
            raise TemplateNotFound(f"OP.template_id: {name} is not known here")
        return str(name)

    def _list(self, scope: str) -> list[dict[str, Any]]:
        """Return all templates by id, each with its registration, owners and cached entries."""
        self._templates.expire()
        registered = dict.fromkeys(self._templates.ids())
        entries: dict[str, list[dict[str, Any]]] = {name: [] for name in registered}
        shared = {shared_id: list(names) for shared_id, names in groupby(registered, entries_id)}
        for entry in ask_denoiser(self._api, {"op": "templates"})["templates"]:
            fields = {key: value for key, value in entry.items() if key != "template_id"}
            first = entry["template_id"]
            for name in shared.get(entries_id(first), [first]):
                entries.setdefault(name, []).append(fields)
        return [
            {
                "template_id": name,
                "registered": name in registered,
                "owners": self._templates.owners(name),
                "expires_s": self._templates.expires_s(name, scope),
                "entries": template_entries,
            }
            for name, template_entries in sorted(entries.items())
            if self._templates.shows(name, scope)
        ]

    def _register(self, operation: dict[str, Any]) -> dict[str, Any]:
        with self._decoded(operation["image"].encode("utf-8", "replace")) as image:
            name = image.template_id
            scope, shared = operation.get("scope", NO_SCOPE), operation.get("shared", False)
            owners = [*([scope] if scope else ()), *([SHARED] if shared else ())]
            with self._template_locks[int(name[:2], 16) % _LOCKS]:
                self._templates.put(name, bytes(image.encoded), owners)
            height, width = image.size
            size = {"width": width, "height": height}
            if not operation.get("prime", True):
                return {**size, "template_id": name, "state": "absent"}
            # A registered image is usually edited more than once, so it is primed now. It stays
            # registered if that fails.
            try:
                primed = self._prime(name, image)
            except (MaskserveError, ConfigError) as error:
                log.warning("template %s is registered but not primed: %s", name, error)
                primed = {"template_id": name, "state": "absent"}
            return {**size, **primed}

    def _prime(self, name: str, image: Decoded | None = None) -> dict[str, Any]:
        """Prime a template; `image` is its picture, if it has just been decoded."""
        encoded = self._templates.get(name)
        if encoded is None:
            raise TemplateNotFound(f"OP.template_id: {name} is not registered here")
        if not self._config.cache.enabled:
            return {"template_id": name, "state": "absent"}
        if image is None:
            with self._decoded(encoded) as decoded:
                return self._prime(name, decoded)
        model = self._config.model
        spec = load_spec(model.path, model.native_resolution)
        state = prime_template(self._api, image, name, spec, self._config)
        return {"template_id": name, **state}

    @contextmanager
    def _decoded(self, encoded: bytes) -> Iterator[Decoded]:
        """Decode a picture for the block; a large one waits until few others are in memory."""
        limits = self._config.limits
        is_large = math.prod(read_size(encoded, "OP.image", limits)) > LARGE_PIXELS
        with self._large if is_large else nullcontext():
            yield decode_image(encoded, "OP.image", limits)

    def _pin(self, op: str, name: str, scope: str) -> dict[str, Any]:
        """Protect a template's present and later entries from eviction (`pin`), or end that
        (`unpin`). A pinned result does not expire.
        """
        if op == "pin":
            self._templates.keep(name)
        operation = {"op": op, "template_id": name, **({"scope": scope} if op == "pin" else {})}
        is_known = ask_denoiser(self._api, operation)["found"]
        if not is_known and not self._templates.has(name):
            if op == "pin":
                # The engine would also pin later entries, so a refused pin is undone.
                ask_denoiser(self._api, {"op": "unpin", "template_id": name})
            raise TemplateNotFound(f"OP.template_id: {name} is not known here")
        return {"template_id": name, "pinned": op == "pin"}

    def _evict(self, name: str, scope: str) -> dict[str, Any]:
        """Remove a template: the registered image and its entries. Both stay while another client
        has registered the image.
        """
        # The lock delays a new registration of the same picture until the entries are evicted, too.
        # Otherwise this would evict the entries of the new registration.
        with self._template_locks[int(name[:2], 16) % _LOCKS]:
            if scope:
                was_last_owner = self._templates.disown(name, scope)
                if was_last_owner is None:
                    raise TemplateNotFound(
                        f"OP.template_id: {name} was not registered with this key"
                    )
                if not was_last_owner:
                    return {"template_id": name, "registered": False, "freed_bytes": 0}
            registered = bool(scope) or self._templates.remove(name)
            # Entries stay while another template shares them.
            op = "unpin" if self._templates.sharing(name) else "evict"
            response = ask_denoiser(self._api, {"op": op, "template_id": name})
            freed = response.get("freed_bytes", 0)
        if not registered and not freed:
            raise TemplateNotFound(f"OP.template_id: {name} is not known here")
        return {"template_id": name, "registered": False, "freed_bytes": freed}

    def _queue(self, operation: dict[str, Any], answer: Answer) -> None:
        """Queue an operation for a thread; answer with an error if it takes too long.

        Raises:
            Overloaded: too many operations wait.
        """

        def run() -> None:
            try:
                if not answer.done:  # otherwise the client has had an error, and nothing is run
                    _reply(answer, self._run(operation))
            except Exception as error:
                answer.fail(guarded("", error))
            finally:
                timer.cancel()

        limit = self._config.engine.heartbeat_timeout_s
        callee = "the adapters' storage" if operation["op"].startswith("adapter") else "the engine"
        if operation["op"] in PATIENT:
            limit = max(limit, _PATIENT_S)
        timer = threading.Timer(
            limit,
            lambda: answer.fail(EngineFailed(f"{callee} did not answer within {limit:g} s")),
        )
        timer.daemon = True
        timer.start()
        # Long operations of a client have a key of their own, so that they leave it threads for
        # short ones.
        scope = operation.get("scope", NO_SCOPE)
        key = (scope, "patient") if operation["op"] in PATIENT else scope
        threads = self._cancels if operation["op"] == "cancel" else self._threads
        try:
            threads.submit(key, run)
        except Full:
            timer.cancel()
            raise Overloaded("too many operations wait already; try again later") from None


def _reply(answer: Answer, result: dict[str, Any]) -> None:
    answer.finish({"RESULT": json.dumps(result).encode()})


def _is_from_browser(request: Any) -> bool:
    """Whether a web page sends the request: browsers then set the header `origin`, which Triton
    passes on as a parameter (`maskserve_serving.tracing`). Triton itself answers any page.
    """
    return any(name.lower() == ORIGIN for name in parameters(request))
