"""The load: clients in threads that make one visit after the other and judge every response."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from maskserve_benchmarks.soak.visitor import Unexpected


class Client(Protocol):
    """A client: connections and a random generator."""

    rng: random.Random

    def open(self) -> None: ...

    def close(self) -> None: ...


class Book(Protocol):
    """Receives the reports of visits, from any thread."""

    def book(self, kind: str, end: str, seconds: float) -> None: ...

    def complain(self, kind: str, problem: str) -> None: ...


AnyClient = TypeVar("AnyClient", bound=Client)


class Load(Generic[AnyClient]):
    """Clients that all start at once and stay until the load ends, or for a given time.

    Args:
        clients: the clients; each gets its own thread.
        mix: kinds of visit, with relative frequencies. A visit returns how it ended, and raises
            Unexpected if that end is wrong.
        book: receives the reports.
        first: a visit that every client begins with.
        stays_s: returns how long a client stays, by its number.
    """

    def __init__(
        self,
        clients: Sequence[AnyClient],
        mix: Mapping[Callable[[AnyClient], str], float],
        book: Book,
        first: Callable[[AnyClient], str] | None = None,
        stays_s: Callable[[int], float] = lambda _: math.inf,
    ) -> None:
        self._mix, self._book, self._first = mix, book, first
        self._stop = threading.Event()
        self._threads = [
            # Daemon threads: a hanging client is reported, and does not keep the program from
            # ending.
            threading.Thread(
                target=self._run,
                args=(client, stays_s(number)),
                name=f"visitor-{number}",
                daemon=True,
            )
            for number, client in enumerate(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let visits end; complain about visits that do not end within the time."""
        self._stop.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._book.complain(thread.name, f"did not end its visit within {timeout_s:g} s")

    def _run(self, client: AnyClient, stays_s: float) -> None:
        try:
            self._visits(client, time.monotonic() + stays_s)
        except Exception as error:
            self._book.complain(threading.current_thread().name, f"the visitor broke: {error!r}")

    def _visits(self, client: AnyClient, until: float) -> None:
        client.open()
        if self._first is not None:
            self._visit(client, self._first)
        kinds, weights = list(self._mix), list(self._mix.values())
        while not self._stop.is_set() and time.monotonic() < until:
            self._visit(client, client.rng.choices(kinds, weights)[0])
        client.close()

    def _visit(self, client: AnyClient, visit: Callable[[AnyClient], str]) -> None:
        began = time.perf_counter()
        try:
            end = visit(client)
            self._book.book(visit.__name__, end, time.perf_counter() - began)
        except Unexpected as problem:
            self._book.complain(visit.__name__, str(problem))
        except Exception as error:
            # A fault of the load itself must not look like a quiet visitor.
            self._book.complain(visit.__name__, f"the visit broke: {error!r}")
