"""The load: visitors in threads, each making one visit after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from maskserve_harness.soaking import visits, withdrawals
from maskserve_harness.soaking.bad_input import bad_input, bad_operation
from maskserve_harness.soaking.ledger import Ledger
from maskserve_harness.soaking.pictures import Album
from maskserve_harness.soaking.visitor import Keepsakes, Unexpected, Visitor
from maskserve_serving.worker import Worker

Visit = Callable[[Visitor], str]

# How often each is made, against the others.
MIX: dict[Visit, int] = {
    visits.hot: 24,
    visits.churn: 14,
    visits.fresh: 6,
    visits.require: 5,
    visits.reproducible: 5,
    visits.dense: 4,
    visits.odd: 6,
    visits.stream: 8,
    visits.largest: 1,
    visits.template: 4,
    visits.look: 4,
    withdrawals.grpc_cancel: 4,
    withdrawals.grpc_timeout: 3,
    withdrawals.http_timeout: 3,
    withdrawals.deadline: 4,
    withdrawals.control_cancel: 4,
    withdrawals.stream_closed: 4,
    bad_input: 6,
    bad_operation: 2,
}


class Load:
    """Visitors of one worker: twice as many at first, who take it to its largest need.

    A heap keeps what it took at its busiest moment. Were the load the same all the time, such
    moments would come now and then for hours, and look like a leak.

    Args:
        worker: whom they visit.
        album: what they edit.
        ledger: where they report.
        visitors: how many there are at once, after the crowd.
        crowd_s: how long there are as many again.
        long_steps: steps of edits that are withdrawn.
        seed: of their dice; the order in which they come is the machine's.
    """

    def __init__(
        self,
        worker: Worker,
        album: Album,
        ledger: Ledger,
        visitors: int,
        crowd_s: float,
        long_steps: int,
        seed: int,
    ) -> None:
        self.ledger = ledger
        keepsakes = Keepsakes()
        self._stop = threading.Event()
        self._threads = []
        for number in range(2 * visitors):
            dice = random.Random(seed * 1000 + number)
            visitor = Visitor(dice, album, keepsakes, worker.grpc_url, worker.http_url, long_steps)
            name = f"visitor-{number}"
            # Daemons: one that hangs is told of, and does not keep the program from ending.
            stays_s = float("inf") if number < visitors else crowd_s
            arguments = (visitor, stays_s)
            thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
            self._threads.append(thread)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let visits end; those that do not within the time are complained of."""
        self._stop.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.ledger.complain(thread.name, f"did not end its visit within {timeout_s:g} s")

    def _run(self, visitor: Visitor, stays_s: float) -> None:
        try:
            self._visits(visitor, time.monotonic() + stays_s)
        except Exception as error:
            self.ledger.complain(threading.current_thread().name, f"the visitor broke: {error!r}")

    def _visits(self, visitor: Visitor, until: float) -> None:
        visitor.open()
        # What grows to the largest need does so at once, in the warm-up.
        self._visit(visitor, visits.largest)
        kinds, weights = list(MIX), list(MIX.values())
        while not self._stop.is_set() and time.monotonic() < until:
            self._visit(visitor, visitor.rng.choices(kinds, weights)[0])
        visitor.close()

    def _visit(self, visitor: Visitor, visit: Visit) -> None:
        began = time.perf_counter()
        try:
            end = visit(visitor)
            self.ledger.book(visit.__name__, end, time.perf_counter() - began)
        except Unexpected as problem:
            self.ledger.complain(visit.__name__, str(problem))
        except Exception as error:
            # A fault of the soak itself must not pass for a quiet visitor.
            self.ledger.complain(visit.__name__, f"the visit broke: {error!r}")
