"""The ControlNet services of a denoiser: which of them hold a ControlNet, and where each net of a
row runs (docs/adr/0084; Katz §5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs

from maskserve_common.contracts.settings import AdapterMode
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.reuse import Reuse
from maskserve_engine.control_link.served import Link, LinkRow, ServedRow, ServiceCalls, lost
from maskserve_engine.control_link.transport import Attached, Lost, Messages, SocketMessages

_log = logging.getLogger(__name__)
_RETRY_S = 5.0
"""Seconds in which a service that failed to load a ControlNet loads no replica."""
_REPLICA_LIMIT_S = 300.0


# Decisions, as plain data: services are known by their number


class Replica(NamedTuple):
    net: str
    service: int


def assigned(
    nets: Sequence[str], held: Sequence[Collection[str]], open_nets: Sequence[int]
) -> list[int]:
    """Return the service that runs each net of a row: of those that hold it the one with the fewest
    open nets, by order if equal. A net that a row names twice runs at one service, which packs
    both.

    Args:
        nets: the row's nets, in the order of the edit's controls; some service holds each.
        held: nets that each service holds.
        open_nets: nets of the rows that are open at each service.
    """
    counts = list(open_nets)
    services: dict[str, int] = {}
    for net in nets:
        holders = [number for number, names in enumerate(held) if net in names]
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
    held: Sequence[Collection[str]],
    open_nets: Sequence[int],
) -> list[Replica]:
    """Return the replicas that later rows need: nets that wait for others at their service, while
    another service has no row. Each idle service loads one of them.

    Args:
        nets: nets of a row that opens.
        services: service of each (`assigned`).
        held: nets that each service holds.
        open_nets: nets of the rows that are open at each service, including this row.
    """
    idle = [number for number, count in enumerate(open_nets) if not count]
    replicas = []
    for net, service in dict(zip(nets, services, strict=True)).items():
        free = next((number for number in idle if net not in held[number]), None)
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

    # Called from the engine's thread.

    @property
    def held(self) -> set[str]:
        """Versions of the ControlNets that the service holds for this denoiser."""
        return {version for version, (link, _) in list(self._nets_held.items()) if not link.over}

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
    net that others delay there is then also loaded by a service without rows. So replicas follow
    the load, and a service that was lost and is back gets nets again.

    Used by the engine's thread, but for `load`.

    Args:
        services: in the order of `[controls] service`.
    """

    def __init__(self, services: Sequence[ControlService]) -> None:
        self.services = tuple(services)
        self._sources: dict[str, _Source] = {}
        """ControlNets that edits may name, by version."""
        self._rests_until = [0.0] * len(services)
        """Times until which services that failed to load are asked last, and for no replica."""
        self._loads = ThreadPoolExecutor(1, "controlnet replicas")
        self._loading: set[Replica] = set()

    def load(self, name: str, version: str, content: str, limit_s: float) -> dict[str, Any]:
        """Have one of the services load a ControlNet; arguments and result as those of
        `ControlService.load`.

        Raises:
            MaskserveError: none can load it.
        """
        now_s, errors = time.monotonic(), list[MaskserveError]()

        def cost(number: int) -> tuple[bool, int]:
            return self._rests_until[number] > now_s, len(self.services[number].held)

        for number in sorted(range(len(self.services)), key=cost):
            try:
                response = self._load(number, _Source(name, content), version, limit_s)
            except MaskserveError as error:
                errors.append(error)
                continue
            self._sources[version] = _Source(name, content)
            return response
        raise errors[0]

    def _load(self, number: int, source: _Source, version: str, limit_s: float) -> dict[str, Any]:
        """Have a service load a ControlNet; an error names the service."""
        service = self.services[number]
        try:
            return service.load(source.name, version, source.content, limit_s)
        except MaskserveError as error:
            self._rests_until[number] = time.monotonic() + _RETRY_S
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

    def holds(self, version: str) -> bool:
        """Whether a service holds a ControlNet for this denoiser."""
        return any(version in service.held for service in self.services)

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
        spec = opening.spec
        nets, held = [control.net for control in spec.controls], [s.held for s in self.services]
        for net in nets:
            if not any(net in names for names in held):
                source = self._sources.get(net)
                name = "one of its ControlNets" if source is None else source.name
                raise lost("", f"no service holds {name}")
        services = assigned(nets, held, [service.open_nets for service in self.services])
        steps = range(len(spec.timesteps))
        scales = [
            tuple(control.input.scale_at(step, len(steps)) for control in spec.controls)
            for step in steps
        ]
        link_rows: list[LinkRow] = []
        try:
            for run in summed_runs(services):
                service = self.services[services[run.start]]
                reuse = Reuse(scales, fast=adapters == "fast")
                link_rows.append(service.open(opening.of_nets(run), reuse))
        except EngineFailed:
            ServedRow(link_rows, spec.schedule).close()
            raise
        open_nets = [service.open_nets for service in self.services]
        for replica in missing_replicas(nets, services, held, open_nets):
            self._replicate(replica)
        return ServedRow(link_rows, spec.schedule)

    def _replicate(self, replica: Replica) -> None:
        """Load a replica in a thread of its own, unless the service has just failed to load one."""
        is_resting = self._rests_until[replica.service] > time.monotonic()
        if is_resting or replica in self._loading or replica.net not in self._sources:
            return
        self._loading.add(replica)
        self._loads.submit(self._load_replica, replica, self._sources[replica.net])

    def _load_replica(self, replica: Replica, source: _Source) -> None:
        try:
            self._load(replica.service, source, replica.net, _REPLICA_LIMIT_S)
        except MaskserveError:  # logged
            return
        finally:
            self._loading.discard(replica)
        if replica.net not in self._sources:  # dropped meanwhile
            self.services[replica.service].drop(replica.net)

    def take_waits(self) -> list[float]:
        """Return and clear the seconds that steps have waited for residuals."""
        return [wait for service in self.services for wait in service.take_waits()]

    def close(self) -> None:
        self._loads.shutdown(wait=False, cancel_futures=True)
        for service in self.services:
            service.close()
