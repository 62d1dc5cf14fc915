"""The calls of KServe v2 other than inference: metadata and state of the router and its workers."""

from __future__ import annotations

import asyncio

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.errors import InvalidRequest
from maskserve_common.routing import Edit, NoWorkerAvailable
from maskserve_common.servers.failure import Failure, Tries
from maskserve_router.api.statistics import client_statistics, sum_statistics
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.edit_call import PUBLIC, VERSIONS, UnknownModel
from maskserve_router.messages.failures import NotSupported
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workers.pool import Pool

_TIMEOUT_S = 5.0
# Extensions that are local to a host or for operators.
_UNSUPPORTED = ("shared_memory", "classification", "repository", "trace", "logging", "schedule")


class ServerCalls:
    """Answers as one Triton server would, in messages."""

    def __init__(self, pool: Pool, workflows: ServedWorkflows) -> None:
        self._pool, self._workflows = pool, workflows

    def ready(self) -> bool:
        """Return True if a worker takes edits."""
        return bool(self._pool.ready())

    def model_ready(self, name: str, version: str) -> bool:
        return name in self._workflows.models and version in VERSIONS and self.ready()

    async def server_metadata(self) -> pb.ServerMetadataResponse:
        """Return a worker's metadata without extensions that the router does not serve."""
        raw = await self._ask("ServerMetadata", pb.ServerMetadataRequest())
        metadata = pb.ServerMetadataResponse.FromString(raw)
        extensions = [e for e in metadata.extensions if not any(part in e for part in _UNSUPPORTED)]
        return pb.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=extensions
        )

    async def model_metadata(self, name: str, version: str) -> pb.ModelMetadataResponse:
        self._check_model(name, version)
        if name in self._workflows.names:
            return self._workflows.metadata(name)
        request = pb.ModelMetadataRequest(name=name, version=version)
        return pb.ModelMetadataResponse.FromString(await self._ask("ModelMetadata", request))

    async def model_config(self, name: str, version: str) -> pb.ModelConfigResponse:
        self._check_model(name, version)
        if name in self._workflows.names:
            return self._workflows.config(name)
        request = pb.ModelConfigRequest(name=name, version=version)
        return pb.ModelConfigResponse.FromString(await self._ask("ModelConfig", request))

    async def statistics(
        self, name: str, version: str, client: KeyHolder
    ) -> pb.ModelStatisticsResponse:
        """Return statistics of one model, or of all for an empty name, summed over the workers.

        A client that is no admin gets the counts of its own edits at this router.
        """
        if version not in VERSIONS:  # Triton answers 400 here and 404 elsewhere
            raise InvalidRequest("model_version", f"there is no version {version[:20]!r}", "1")
        if name:
            self._check_model(name, version)
        if not client.admin:
            return client_statistics(client, [name] if name else sorted(PUBLIC))
        request = pb.ModelStatisticsRequest(name=name, version=version).SerializeToString()
        answers = await asyncio.gather(
            *(w.upstream.call("ModelStatistics", request, _TIMEOUT_S) for w in self._pool.up()),
            return_exceptions=True,
        )
        replies = [answer for answer in answers if isinstance(answer, bytes)]
        if not replies:
            raise NoWorkerAvailable(Edit(1, 1, 1), [])
        return sum_statistics(map(pb.ModelStatisticsResponse.FromString, replies), PUBLIC)

    def repository_index(self, *, ready: bool) -> pb.RepositoryIndexResponse:
        """Return the public models; with `ready`, only ready ones."""
        index = pb.RepositoryIndexResponse()
        state = "READY" if self.ready() else "UNAVAILABLE"
        if self.ready() or not ready:
            for name in sorted(self._workflows.models):
                index.models.add(name=name, version="1", state=state)
        return index

    def _check_model(self, name: str, version: str) -> None:
        if name not in (models := self._workflows.models):
            raise UnknownModel(name, models=models)
        if version not in VERSIONS:
            raise UnknownModel(name, version)

    async def _ask(
        self,
        method: str,
        request: pb.ServerMetadataRequest | pb.ModelMetadataRequest | pb.ModelConfigRequest,
    ) -> bytes:
        """Return the first worker's answer, or the next one's if it fails."""
        failure: Failure | None = None
        tries = Tries()
        for worker in self._pool.up():
            try:
                return await worker.upstream.call(method, request.SerializeToString(), _TIMEOUT_S)
            except Failure as error:
                if not tries.goes_on(error):
                    raise
                failure = error
        if failure is not None:
            raise failure
        raise NoWorkerAvailable(Edit(1, 1, 1), [])


def shared_memory_refused() -> NotSupported:
    return NotSupported(
        "shared memory",
        "cannot be registered with a router: a region is local to its host",
        "tensors as bytes",
    )


def operators_only(call: str) -> NotSupported:
    return NotSupported(call, "is not served by a router", "the worker's own ports")
