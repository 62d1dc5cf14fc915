"""The ControlNet services of a denoiser: which of them hold a ControlNet, and where each net of a
row runs (docs/adr/0035; Katz §5).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs

from maskserve_common.addresses import DNS, resolved
from maskserve_common.contracts.settings import AdapterMode
from maskserve_common.contracts.status_record import NodeStatus
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.reuse import Reuse
from maskserve_engine.control_link.served import Link, LinkRow, ServedRow, ServiceCalls, lost
from maskserve_engine.control_link.transport import Attached, Lost, Messages, SocketMessages

_log = logging.getLogger(__name__)
_RETRY_S = 5.0
"""Seconds in which a service that failed to load a ControlNet is asked last, and for no replica."""
_REPLICA_LIMIT_S = 300.0
_RESOLVE_EVERY_S = 5.0


# Decisions, as plain data: services are known by their number


class Replica(NamedTuple):
    net: str
    service: int


def assigned(
    nets: Sequence[str], nets_of: Sequence[Collection[str]], open_nets: Sequence[int]
) -> list[int]:
    """Return the service that runs each net of a row: of those that hold it the one with the fewest
    open nets, by order if equal. A net that a row names twice runs at one service, which packs
    both.

    Args:
        nets: the row's nets, in the order of the edit's controls; some service holds each.
        nets_of: nets that each service holds.
        open_nets: nets of the rows that are open at each service.
    """
    counts = list(open_nets)
    services: dict[str, int] = {}
    for net in nets:
        holders = [number for number, names in enumerate(nets_of) if net in names]
        number = services.setdefault(net, min(holders, key=counts.__getitem__))
        counts[number] += 1
    return [services[net] for net in nets]


def summed_runs(services: Sequence[int]) -> list[range]:
    """Return which nets of a row a service may sum, in the order in which the sums are added. These
    are the first nets, as long as one service runs them; each further net is alone, because a sum
    of other sums rounds differently.

    Args:
        services: service of each net (`assigned`).
    """
    count = len(services)
    first = next((n for n in range(count) if services[n] != services[0]), count)
    return [range(first), *(range(n, n + 1) for n in range(first, count))]


def missing_replicas(
    nets: Sequence[str],
    services: Sequence[int],
    nets_of: Sequence[Collection[str]],
    open_nets: Sequence[int],
) -> list[Replica]:
    """Return the replicas that later rows need: nets that wait for removed at their service, while
    another service has no row. Each idle service loads one of them.

    Args:
        nets: nets of a row that opens.
        services: service of each (`assigned`).
        nets_of: nets that each service holds.
        open_nets: nets of the rows that are open at each service, including this row.
    """
    idle = [number for number, count in enumerate(open_nets) if not count]
    replicas = []
    for net, service in dict(zip(nets, services, strict=True)).items():
        free = next((number for number in idle if net not in nets_of[number]), None)
        if open_nets[service] > 1 and free is not None:
            idle.remove(free)
            replicas.append(Replica(net, free))
    return replicas


class ControlService:
    """One service. The denoiser attaches to it when it is first needed, and again after a loss.

    Args:
        dtype: data type of the base; the service's must be the same.
        patience_s: `[controls] service_timeout_s`.
        connect: connects to an attached session.
        address: HOST:PORT, for messages.
    """

    def __init__(
        self,
        calls: ServiceCalls,
        device: torch.device,
        dtype: str,
        patience_s: float,
        connect: Callable[[Attached], Messages] = SocketMessages,
        address: str = "",
    ) -> None:
        self._calls, self._device, self._dtype = calls, device, dtype
        self._patience_s, self._connect, self.address = patience_s, connect, address
        self._rests_until = 0.0
        self._lock = threading.Lock()
        """Held by the thread that loads."""
        self._link: Link | None = None
        self._nets_held: dict[str, tuple[Link, str]] = {}
        """ControlNets that the service holds, by version: the session, and the content by which the
        service names the net.
        """

    # Called from a thread that loads.

    def load(self, name: str, version: str, content: str, limit_s: float) -> dict[str, Any]:
        """Have the service load a ControlNet; return its answer (`digest`).

        Args:
            name: name of its folder, on both sides.
            version: its version at this denoiser.
            content: digest of the folder here (`spec.control_nets.content_of`).
            limit_s: seconds after which the call is given up.

        Raises:
            MaskserveError: it cannot be loaded, or the service does not answer.
        """
        with self._lock:
            link = self._attached()
            op = {"op": "load", "session": link.session, "name": name, "version": content}
            response = self._calls.call(op, b"", limit_s)
            self._nets_held[version] = link, content
            return response

    def _attached(self) -> Link:
        link = self._link
        if link is not None and not link.over:
            self._calls.call({"op": "health"}, b"", self._patience_s)
            return link
        response = self._calls.call({"op": "attach", "dtype": self._dtype}, b"", self._patience_s)
        attached = msgspec.convert(response, Attached)
        try:
            messages = self._connect(attached)
        except Lost as error:
            raise Overloaded(f"the ControlNet service: {error}; try again later") from error
        self._link = Link(
            messages, attached.session, self._calls, self._device, self._patience_s, self.address
        )
        return self._link

    # Called from any thread.

    def rest(self) -> None:
        """Load no replica for a while."""
        self._rests_until = time.monotonic() + _RETRY_S

    @property
    def is_resting(self) -> bool:
        return self._rests_until > time.monotonic()

    @property
    def is_away(self) -> bool:
        """Whether the service has failed to load a ControlNet, or was lost and not attached to
        since.
        """
        return self.is_resting or (self._link is not None and self._link.over)

    @property
    def status(self) -> NodeStatus:
        """The service as a status record lists it: ready while the denoiser is attached to it."""
        is_ready = self._link is not None and not self.is_away
        return NodeStatus(self.address, "controlnet", "ready" if is_ready else "loading")

    @property
    def nets(self) -> set[str]:
        """Versions of the ControlNets that the service holds for this denoiser."""
        return {version for version, (link, _) in list(self._nets_held.items()) if not link.over}

    # Called from the engine's thread.

    @property
    def open_nets(self) -> int:
        """Number of ControlNets of this denoiser's open rows."""
        return 0 if self._link is None else self._link.nets

    def drop(self, version: str) -> None:
        """Release a ControlNet that is not needed any more."""
        link, content = self._nets_held.pop(version, (None, ""))
        other_contents = [
            loaded_content for _, loaded_content in list(self._nets_held.values())
        ]  # copies under another name
        if link is not None and not link.lost and content not in other_contents:
            link.send({"op": "drop", "session": link.session, "version": content})

    def open(self, opening: Opening, reuse: Reuse) -> LinkRow:
        """Return a row at the service (`Link.open`).

        Raises:
            ControlLost: the service cannot be reached.
        """
        if self._link is None:
            raise lost(self.address, "it was never there")
        controls = [
            structs.replace(control, net=self._nets_held.get(control.net, (None, control.net))[1])
            for control in opening.spec.controls
        ]
        spec = structs.replace(opening.spec, controls=tuple(controls))
        return self._link.open(replace(opening, spec=spec), reuse)

    def take_waits(self) -> list[float]:
        """Return and clear the seconds that steps have waited for residuals."""
        if self._link is None:
            return []
        waits, self._link.waits = self._link.waits, []
        return waits

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._calls.close()


class _Source(NamedTuple):
    """Folder of a ControlNet, as services know it."""

    name: str
    content: str


class ControlServices:
    """The services of a denoiser. A ControlNet is loaded by the service that holds the fewest; a
    net that removed delay there is then also loaded by a service without rows. So replicas follow
    the load, and a service that was lost and is back gets nets again.

    Used by the engine's thread, but for `load`.

    Args:
        addresses: addresses in `[controls] service`.
        service: makes the service at an address, HOST:PORT.
    """

    def __init__(self, addresses: Sequence[str], service: Callable[[str], ControlService]) -> None:
        self._addresses, self._service = addresses, service
        self.services: tuple[ControlService, ...] = ()
        self._sources: dict[str, _Source] = {}
        """ControlNets that edits may name, by version."""
        self._background = ThreadPoolExecutor(1, "controlnet replicas")
        self._loading: set[tuple[str, ControlService]] = set()
        """Replicas that are being loaded."""
        self._lock = threading.Lock()
        """Held by the thread that resolves names."""
        self._retired: list[ControlService] = []
        """Services whose addresses are gone, to be closed."""
        self._resolve_at = math.inf
        self._resolve()

    @classmethod
    def of(cls, *services: ControlService) -> ControlServices:
        """Return these services, whose addresses differ."""
        by_address = {service.address: service for service in services}
        return cls(tuple(by_address), by_address.__getitem__)

    def load(self, name: str, version: str, content: str, limit_s: float) -> dict[str, Any]:
        """Have one of the services load a ControlNet; arguments and result as those of
        `ControlService.load`.

        Raises:
            MaskserveError: none can load it.
        """
        if self._has_names:
            self._resolve()
        source, errors = _Source(name, content), list[MaskserveError]()
        for service in sorted(self.services, key=lambda s: (s.is_away, len(s.nets))):
            try:
                response = _load(service, source, version, limit_s)
            except MaskserveError as error:
                errors.append(error)
                continue
            self._sources[version] = source
            return response
        if errors:
            raise errors[0]
        raise Overloaded(f"[controls] service: {self._names} has no address; try again later")

    def statuses(self) -> tuple[NodeStatus, ...]:
        """Return the services as a status record lists them."""
        return tuple(service.status for service in self.services)

    def holds(self, version: str) -> bool:
        """Whether a service holds a ControlNet for this denoiser."""
        return any(version in service.nets for service in self.services)

    def drop(self, version: str) -> None:
        """Release a ControlNet that is not needed any more."""
        self._sources.pop(version, None)
        for service in self.services:
            service.drop(version)

    def open(self, opening: Opening, adapters: AdapterMode = "exact") -> ServedRow:
        """Return a row whose ControlNets run in the services that hold them.

        Args:
            opening: opening of the row.
            adapters: adapter mode of the edit.

        Raises:
            ControlLost: no service holds one of them any more, or it cannot be reached.
        """
        self._follow()
        spec, services = opening.spec, self.services
        nets, nets_of = [control.net for control in spec.controls], [s.nets for s in services]
        for net in nets:
            if not any(net in names for names in nets_of):
                source = self._sources.get(net)
                name = "one of its ControlNets" if source is None else source.name
                raise lost("", f"no service holds {name}")
        numbers = assigned(nets, nets_of, [service.open_nets for service in services])
        steps = range(len(spec.timesteps))
        scales = [
            tuple(control.input.scale_at(step, len(steps)) for control in spec.controls)
            for step in steps
        ]
        link_rows: list[LinkRow] = []
        try:
            for run in summed_runs(numbers):
                reuse = Reuse(scales, fast=adapters == "fast")
                service = services[numbers[run.start]]
                link_rows.append(service.open(opening.of_nets(run), reuse))
        except EngineFailed:
            ServedRow(link_rows, spec.schedule).close()
            raise
        open_nets = [service.open_nets for service in services]
        for replica in missing_replicas(nets, numbers, nets_of, open_nets):
            self._replicate(replica.net, services[replica.service])
        return ServedRow(link_rows, spec.schedule)

    def take_waits(self) -> list[float]:
        """Return and clear the seconds that steps have waited for residuals."""
        return [wait for service in self.services for wait in service.take_waits()]

    def close(self) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)
        for service in (*self.services, *self._retired):
            service.close()

    def _replicate(self, version: str, service: ControlService) -> None:
        """Load a replica in a thread of its own, unless the service has just failed to load one."""
        replica, source = (version, service), self._sources.get(version)
        if source is not None and not service.is_resting and replica not in self._loading:
            self._loading.add(replica)
            self._background.submit(self._load_replica, version, service, source)

    def _load_replica(self, version: str, service: ControlService, source: _Source) -> None:
        try:
            _load(service, source, version, _REPLICA_LIMIT_S)
        except MaskserveError:  # logged
            return
        finally:
            self._loading.discard((version, service))
        if version not in self._sources:  # dropped meanwhile
            service.drop(version)

    @property
    def _has_names(self) -> bool:
        return any(address.startswith(DNS) for address in self._addresses)

    @property
    def _names(self) -> str:
        return ", ".join(self._addresses)

    def _follow(self) -> None:
        """Resolve names in a thread of its own from time to time, and close services that are
        gone.
        """
        while self._retired:
            self._retired.pop().close()
        if self._has_names and time.monotonic() >= self._resolve_at:
            self._resolve_at = math.inf
            self._background.submit(self._resolve)

    def _resolve(self) -> None:
        """Find the services at the configured addresses. One whose address is gone stays while it
        holds a net: rows may run there.
        """
        with self._lock:
            known = {service.address: service for service in self.services}
            addresses = resolved(self._addresses, known)
            services = [known.get(address) or self._service(address) for address in addresses]
            removed = [service for service in self.services if service not in services]
            self.services = (*services, *[service for service in removed if service.nets])
            self._retired += [service for service in removed if not service.nets]
            self._resolve_at = time.monotonic() + _RESOLVE_EVERY_S


def _load(service: ControlService, source: _Source, version: str, limit_s: float) -> dict[str, Any]:
    """Have a service load a ControlNet; an error names the service, which then rests."""
    try:
        return service.load(source.name, version, source.content, limit_s)
    except MaskserveError as error:
        service.rest()
        _log.warning(
            "ControlNet service %s does not load ControlNet %s: %s",
            service.address,
            source.name,
            error.message,
        )
        if service.address and isinstance(error, EngineFailed | Overloaded):
            message = f"{error.message} ([controls] service {service.address})"
            raise type(error)(message) from error
        raise
