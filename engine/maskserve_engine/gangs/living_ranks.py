"""The ranks of a worker that are alive: what every one of them has, the gangs in which they meet,
and the replacement of those that are lost.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from torch import distributed

from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.gangs.messages import RankLostError
from maskserve_engine.gangs.processes import RankProcess, RankProcesses
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.planning.degree_costs import ExchangeCosts

_log = logging.getLogger(__name__)
_STARTS = 3
"""Failed starts in a row that each rank may have while none is left."""
_SILENT_S = 5.0
"""Seconds after which a rank that does not answer between two steps counts as lost."""
_AGAIN_S = 2.0
"""Seconds after which a rank that failed to start is started again."""


def meeting_place() -> Any:
    """Open the store at which gangs meet, on this host's loopback alone: torch's default listens on
    every interface and accepts anything.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class LivingRanks:
    """Ranks by device. One that is lost is started again, and gets what the others have.

    Args:
        ranks: processes of the ranks.
        post: runs a command on the engine's thread.
        most: most ranks that take a step together; their gangs meet at once, and again when a rank
            has returned.
        forget: called on the engine's thread with each rank that is lost.
    """

    def __init__(
        self,
        ranks: RankProcesses,
        post: Callable[[Callable[[], None]], object],
        most: int,
        forget: Callable[[RankProcess], None],
    ) -> None:
        self._ranks, self._post, self._forget = ranks, post, forget
        self.processes = ranks.processes
        """All ranks by device, with those that have ended or are being started."""
        self._living: dict[int, RankProcess] = {
            rank_process.device: rank_process for rank_process in ranks.processes
        }
        self._adapters: dict[str, Mapping[str, Factors]] = {}
        """Adapters that every rank has."""
        self._nets: dict[str, NetFolder] = {}
        """ControlNets that every rank has."""
        self._starts: dict[int, int] = {}
        """Starts of each lost rank since its loss."""
        self._names = count()
        self._meeting = meeting_place()
        self.gangs: dict[tuple[RankProcess, ...], str] = {}

        def on_lost(process: RankProcess) -> None:
            self._post(partial(self.lose, process))

        ranks.on_lost = on_lost
        self._most = min(most, len(ranks.processes))
        self.exchange = ExchangeCosts()
        """Costs of exchanges between two ranks; measured once they have met."""
        for met in self._meet():
            self.exchange = met.result()

    def __getitem__(self, device: int) -> RankProcess:
        return self._living[device]

    def __contains__(self, process: RankProcess) -> bool:
        return self._living.get(process.device) is process

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(list(self._living.values()))

    @property
    def lost(self) -> frozenset[int]:
        """Devices without a rank now."""
        return frozenset(range(len(self.processes))).difference(self._living)

    def call(self, verb: str, *arguments: object) -> list[Future[Any]]:
        """Call a method of every rank."""
        return [process.call(verb, *arguments) for process in self]

    def close(self) -> None:
        self._ranks.close()

    # What every rank has.

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> None:
        """Give every rank an adapter, and wait for it; not from the engine's thread."""
        self._adapters[adapter] = factors  # first: a rank that returns now has it from there
        _wait(self.call("load_lora", adapter, factors))

    def drop_lora(self, adapter: str) -> None:
        self._adapters.pop(adapter, None)
        self.call("drop_lora", adapter)

    def load_net(self, net: str, folder: NetFolder) -> None:
        """Give every rank a ControlNet, and wait for it; not from the engine's thread."""
        self._nets[net] = folder  # first: a rank that returns now has it from there
        try:
            _wait(self.call("load_net", net, folder))
        except RuntimeError:
            self.drop_net(net)
            raise

    def drop_net(self, net: str) -> None:
        self._nets.pop(net, None)
        self.call("drop_net", net)

    # Gangs.

    def _meet(self) -> list[Future[ExchangeCosts]]:
        """Let the gangs of living ranks meet that have not met; return their answers, those of
        pairs last. All ranks get the calls in one order, so that no two wait for one another.
        """
        answers, size = [], self._most
        while size > 1:
            for first in range(0, len(self.processes), size):
                living = [self._living.get(first + number) for number in range(size)]
                gang = tuple([process for process in living if process is not None])
                if len(gang) == size and gang not in self.gangs:
                    answers += self._join(gang)
            size //= 2
        return answers

    def _join(self, gang: tuple[RankProcess, ...]) -> list[Future[ExchangeCosts]]:
        name = self.gangs[gang] = f"gang {next(self._names)}"
        return [
            process.call("join", name, number, len(gang), self._meeting.port)
            for number, process in enumerate(gang)
        ]

    def gang_name(self, gang: tuple[RankProcess, ...]) -> str:
        """Return the gang's name among its ranks; empty for one rank."""
        if len(gang) == 1:
            return ""
        if gang not in self.gangs:  # they have parted
            self._join(gang)
        return self.gangs[gang]

    def part(self, gang: tuple[RankProcess, ...]) -> None:
        """Let the ranks of a gang leave it; they meet again at their next step together."""
        name = self.gangs.pop(gang, None)
        for process in gang if name is not None else ():
            process.call("leave", name)

    # Losses and starts.

    def wait_for(self, process: RankProcess, answer: Future[Any]) -> Any:
        """Return an idle rank's answer; None: it failed or was lost. A rank silent for `_SILENT_S`
        seconds is killed, since the engine's thread must not wait.
        """
        try:
            return answer.result(_SILENT_S)
        except TimeoutError:
            _log.error("rank %d has been silent for %g s", process.device, _SILENT_S)
            process.kill()
        except (RankLostError, RuntimeError) as error:
            _log.error("rank %d: %s", process.device, error)
        return None

    def when_done(self, future: Future[Any], command: Callable[[Future[Any]], None]) -> None:
        """Run a command on the engine's thread once a call is done."""
        future.add_done_callback(lambda done: self._post(partial(command, done)))

    def lose(self, process: RankProcess) -> None:
        """Replace a rank whose process has ended."""
        if process not in self:
            return  # it is known, or has never come
        _log.error("rank %d has ended; it is started again", process.device)
        del self._living[process.device]
        self._forget(process)
        for gang in [gang for gang in self.gangs if process in gang]:
            self.part(gang)
        self._start(process.device)

    def _start(self, device: int) -> None:
        process = self.processes[device] = self._ranks.start(device)
        self.when_done(process.hello, partial(self._on_started, process))

    def _on_started(self, process: RankProcess, hello: Future[Any]) -> None:
        device, error = process.device, hello.exception()
        if error is None:
            _log.info("rank %d is back", device)
            self._starts.pop(device, None)
            self._living[device] = process
            for adapter, factors in list(self._adapters.items()):
                process.call("load_lora", adapter, factors)
            for net, folder in list(self._nets.items()):
                process.call("load_net", net, folder)
            self._meet()
            return
        self._starts[device] = self._starts.get(device, 0) + 1
        _log.error("rank %d could not be started: %s", device, error)
        if not self._living and min(self._starts.values()) >= _STARTS:
            raise RuntimeError("no rank is left, and none can be started")
        timer = threading.Timer(_AGAIN_S, self._post, (partial(self._start, device),))
        timer.daemon = True
        timer.start()


def _wait(answers: list[Future[Any]]) -> None:
    for answer in answers:
        with suppress(RankLostError):
            answer.result()
