"""The models of a node server: their loads, and the calls that run or wait.

    line ── head has its model, or room for it ──► waits for its load ──► queue of its model

Weights are loaded at the start or with the first call that needs them, one model at a time, within
a budget of bytes. Models with the fewest uses per byte are evicted, once no call needs them. While
the head of the line waits for room, the calls behind it wait too, so that the models to evict
become free. Nodes without weights skip the line. Each model has a thread, which takes its waiting
calls together, so that they share equal work.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from maskserve_common.config import Config
from maskserve_common.contracts.status_record import LoadCost
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Kind, Loaded, ResourceLoader
from maskserve_common.resources.resource_cache import ResourceCache
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_workflows.node_files import open_model
from maskserve_workflows.node_folders import (
    NodeFolder,
    light_models,
    node_folders,
    revision_of,
)
from maskserve_workflows.node_request import ModelSetup, NodeRequest, Nodes
from maskserve_workflows.node_types import NodeModel
from maskserve_workflows.nodes import NODE_FILES
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.wire import NO_ROOM

log = logging.getLogger("maskserve")
NODE_MODELS: Final = Kind(
    "node",
    "model",
    "nodes",
    "[nodes] device_bytes",
    "node",
    MappingProxyType({"storage": LoadCost(5.0, 1e-9)}),
)
_PRESENT: Final = ("ready", "loading")
_MOST_TOGETHER: Final = 8
"""Most calls that a model runs at once."""
_MOST_WAITING: Final = 10_000
"""Most calls that wait for a load; routers send no more than keep a server busy."""
_REMEMBERED: Final = 0.2
"""Weight of the latest call in the mean seconds of a model's calls."""


Done = Callable[[dict[str, Any] | Exception, float], None]
"""Callback with the outcome of a call and the seconds that it ran, in any thread."""


OpenNodes: TypeAlias = Callable[[NodeModel, ModelSetup], Nodes]
"""Loader of a model (`node_files.open_model`)."""


@dataclass(frozen=True, eq=False)
class NodeWork:
    """A call and its callback."""

    model: str
    request: NodeRequest | None
    """The call; None: only load its model."""
    done: Done
    id: str


class NodeLoader(ResourceLoader[NodeFolder]):
    """Loads models, one at a time."""

    def __init__(self, config: Config, open_nodes: OpenNodes) -> None:
        super().__init__(NODE_MODELS)
        self._config, self._open = config, open_nodes
        self.opened: dict[str, Nodes] = {}
        """Runners of the loaded models, by name."""

    def typical_bytes(self) -> float:
        return 0.0

    def _load_now(self, folder: NodeFolder, begin: float) -> Loaded:
        source = self._config.nodes.source(folder.model.source)
        setup = ModelSetup(source, self._config, self.opened)
        try:
            self.opened[folder.name] = self._open(folder.model, setup)
        except WorkflowError as error:
            log.error("%s", error, exc_info=error)
            file = Path(folder.model.file).name
            raise EngineFailed(f"nodes: model {folder.name}: {file} cannot be imported") from None
        except ValueError as error:  # no call's fault
            raise EngineFailed(f"nodes: model {folder.name} {error}") from None
        return Loaded(folder.version, folder.nbytes, time.monotonic() - begin, folder.nbytes)


class _ModelCache(ResourceCache[NodeFolder]):
    def _bytes(self, folder: NodeFolder) -> tuple[int, int]:
        return folder.nbytes, folder.nbytes


@dataclass(slots=True, eq=False)
class _Queue:
    """Queue of one model."""

    thread: ThreadPoolExecutor
    calls: list[NodeWork] = field(default_factory=list)
    """Calls of the model; the first ones may be running."""
    ended: int = 0
    seconds: float = 0.0
    """Recent mean seconds of a call."""


class NodeModels:
    """The models of one server. Calls may come in any thread.

    Args:
        config: configuration of the node server.
        open_nodes: loads a model.
        thread: runs first in each model's thread.
    """

    def __init__(
        self,
        config: Config,
        open_nodes: OpenNodes = open_model,
        thread: Callable[[Config], None] = lambda config: None,
    ) -> None:
        self._config, self._thread = config, thread
        for problem in NODE_FILES.read(config.nodes.path):
            log.error("%s", problem)
        self._needed = node_folders(config.nodes)
        light = light_models(config.nodes)
        self._light = _opened(light, config, open_nodes)
        """Runners without weights."""
        self._revisions = {name: revision_of(model) for name, model in light.items()}
        """Digests of the models by name, with those of the models that they need."""
        for name, needed in self._needed.items():
            parts = [revision_of(x.model, config.nodes.source(x.model.source)) for x in needed]
            self._revisions[name] = " ".join(parts)
        self._ends = ThreadPoolExecutor(1, "ends")
        """Thread of callbacks that must not run with `_lock`."""
        self._lock = threading.Lock()
        self._budget = config.nodes.device_bytes
        self._resource_states = ResourceStates(
            _MOST_WAITING, {NODE_MODELS.name: self._budget}, self._evicted
        )
        self._loader = NodeLoader(config, open_nodes)
        self._models = _ModelCache(
            NODE_MODELS, self._resource_states, self._loader, self._on_loaded, Observations()
        )
        self._line: deque[NodeWork] = deque()
        """Calls whose models have no room yet, in order of arrival."""
        self._waiting: dict[str, NodeWork] = {}
        """Calls that wait for a load, by id."""
        self._calls: set[str] = set()
        """Ids of calls that hold, or wait for, a model."""
        self._queues: dict[str, _Queue] = {}
        self._ids = itertools.count()
        if config.nodes.load == "start":
            for name in self._needed:
                self._submit(name, None, _ignore)

    def close(self) -> None:
        self._loader.close()
        self._ends.shutdown(wait=False)
        with self._lock:
            for queue in self._queues.values():
                queue.thread.shutdown(wait=False, cancel_futures=True)

    def hosts(self, model: str) -> bool:
        """Return True if the model's nodes run here."""
        return model in self._light or model in self._needed

    def call(self, model: str, request: NodeRequest, done: Done) -> None:
        """Run a node whose model this server hosts."""
        self._submit(model, request, done)

    def place(self, models: Collection[str]) -> None:
        """Load these models where room is free; evict models that neither these nor calls need."""
        with self._lock:
            requested = {name: self._needed[name] for name in models if name in self._needed}
            kept_resources = {
                _resource(folder) for needed in requested.values() for folder in needed
            }
            for folder in itertools.chain(*self._needed.values()):
                resource = _resource(folder)
                if resource not in kept_resources and not self._resource_states.pinned(resource):
                    self._resource_states.evict(resource)
            free_bytes = self._budget - self._resource_states.nbytes(NODE_MODELS.name)
            queued_models = {work.model for work in self._line}
            for name, needed in requested.items():
                missing = [
                    x for x in needed if self._resource_states.state(_resource(x)) not in _PRESENT
                ]
                nbytes = sum(folder.nbytes for folder in missing)
                if missing and nbytes <= free_bytes and name not in queued_models:
                    free_bytes -= nbytes
                    self._line.append(NodeWork(name, None, _ignore, str(next(self._ids))))
            self._advance()

    def record(self) -> dict[str, Any]:
        """Return the record for routers and operators.

        It has each model's state, revision, bytes, the bytes with shared parts that its calls need,
        seconds of a load, calls that wait or run, calls that ended, and recent seconds per call.
        """
        with self._lock:
            waiting = [*self._line, *self._waiting.values()]
            records, load = [], self._models.costs.published["storage"]
            for name in (*self._light, *self._needed):
                queue, needed = self._queues.get(name), self._needed.get(name, ())
                folder, nbytes = next(iter(needed), None), sum(part.nbytes for part in needed)
                state = (
                    "ready" if folder is None else self._resource_states.state(_resource(folder))
                )
                records.append(
                    {
                        "name": name,
                        "state": state,
                        "revision": self._revisions[name],
                        "bytes": folder.nbytes if folder else 0,
                        "needs_bytes": nbytes,
                        "load_s": round(load.seconds(nbytes), 4) if folder else 0.0,
                        "queue": sum(work.model == name for work in waiting)
                        + (len(queue.calls) if queue else 0),
                        "ended": queue.ended if queue else 0,
                        "seconds": round(queue.seconds, 4) if queue else 0.0,
                    }
                )
            return {"device_bytes": self._budget, "models": records}

    def _submit(self, model: str, request: NodeRequest | None, done: Done) -> None:
        work = NodeWork(model, request, done, str(next(self._ids)))
        with self._lock:
            if model in self._light:
                self._enqueue(work)
                return
            self._line.append(work)
            self._advance()

    # With `_lock` held.

    def _advance(self) -> None:
        """Start waiting calls as far as there is room."""
        while self._line:
            work = self._line[0]
            needed = self._needed[work.model]
            try:
                _check_fits(needed, self._budget)
                missing = self._models.hold(work.id, needed)
            except MaskserveError as error:
                if isinstance(error, Overloaded) and self._calls:
                    return  # the models to evict are still needed
                self._line.popleft()
                self._end(work, error)
                continue
            self._line.popleft()
            self._calls.add(work.id)
            if self._resource_states.wait(work.id, missing):
                self._waiting[work.id] = work
            else:
                self._enqueue(work)

    def _enqueue(self, work: NodeWork) -> None:
        queue = self._queue(work.model)
        queue.calls.append(work)
        if len(queue.calls) == 1:
            queue.thread.submit(self._run, work.model)

    def _queue(self, model: str) -> _Queue:
        if model not in self._queues:
            thread = None if model in self._light else partial(self._thread, self._config)
            self._queues[model] = _Queue(ThreadPoolExecutor(1, model, thread))
        return self._queues[model]

    def _end(self, work: NodeWork, error: Exception) -> None:
        self._ends.submit(work.done, error, 0.0)

    def _evicted(self, resource: Resource) -> None:
        self._models.record_eviction(resource)
        for folder, *_ in self._needed.values():
            if folder.version == resource.name:
                self._loader.opened.pop(folder.name, None)

    def _release(self, work: NodeWork) -> None:
        if work.id in self._calls:
            self._calls.discard(work.id)
            self._models.release(work.id)

    # In other threads.

    def _on_loaded(self, folder: NodeFolder, outcome: Loaded | MaskserveError) -> None:
        """Handle the end of a load, in the loader's thread."""
        with self._lock:
            if isinstance(outcome, Loaded):
                for name in self._models.record_arrival(folder, outcome):
                    self._enqueue(self._waiting.pop(name))
            else:
                for name in self._models.record_failure(folder, outcome):
                    work = self._waiting.pop(name)
                    self._release(work)
                    self._end(work, outcome)
            self._advance()

    def _run(self, model: str) -> None:
        """Run the model's waiting calls, a few at a time, in the model's thread."""
        with self._lock:
            queue = self._queues[model]
            works = queue.calls[:_MOST_TOGETHER]
            nodes = self._light.get(model) or self._loader.opened[model]
        requests = [work.request for work in works if work.request is not None]
        begin = time.perf_counter()
        outcomes = iter(_run_all(nodes, requests))
        for work in works:
            if work.request is not None:
                outcome = next(outcomes)
                seconds = time.perf_counter() - begin
                begin = time.perf_counter()
                work.done(outcome, seconds)
                previous_s = queue.seconds if queue.ended else seconds
                queue.seconds = previous_s + _REMEMBERED * (seconds - previous_s)
                queue.ended += 1
        with self._lock:
            del queue.calls[: len(works)]
            for work in works:
                self._release(work)
            if queue.calls:
                queue.thread.submit(self._run, model)
            self._advance()


def _opened(
    models: Mapping[str, NodeModel], config: Config, open_nodes: OpenNodes
) -> dict[str, Nodes]:
    """Open models without weights; those that cannot be opened are left out."""
    opened = {}
    for name, model in models.items():
        source = config.nodes.source(model.source) if model.source else ""
        try:
            opened[name] = open_nodes(model, ModelSetup(source, config))
        except Exception as error:
            log.error("model %s is not served: %s", name, error, exc_info=error)
    return opened


def _ignore(outputs: dict[str, Any] | Exception, seconds: float) -> None:
    """Ignore the outcome: nobody waits for it."""


def _resource(folder: NodeFolder) -> Resource:
    return Resource(NODE_MODELS.name, folder.version)


def _check_fits(needed: Sequence[NodeFolder], budget: int) -> None:
    """Raise EngineFailed if the models do not fit even into an empty budget."""
    nbytes = sum(folder.nbytes for folder in needed)
    if nbytes > budget:
        names = " and ".join(folder.name for folder in needed)
        problem = f"nodes: model {names} has {nbytes} bytes, {NO_ROOM} {budget}"
        raise EngineFailed(f"{problem} ({NODE_MODELS.budget})")


def _run_all(nodes: Nodes, requests: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
    """Yield the outcome of each call, and an exception for each that the nodes leave unanswered."""
    name, remaining = type(nodes).__name__, len(requests)
    end: Exception = EngineFailed(f"nodes: run() of {name} left a call unanswered")
    try:
        for outcome in nodes.run(requests):
            remaining -= 1
            yield outcome
    except Exception as error:
        end = error
    yield from itertools.repeat(end, remaining)
