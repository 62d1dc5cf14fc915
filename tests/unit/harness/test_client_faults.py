"""What a trial makes of a row that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from maskserve_core.worker.status import RowStatus
from maskserve_harness.faults.client_faults import ClientFault, ClientTrial, try_client_fault


@dataclass
class Scripted:
    """A site whose row has these steps left, one look after the other, and then is gone."""

    left: Sequence[int]
    steps: int = 9
    looks: int = field(default=0, init=False)

    def row(self, request_id: str) -> RowStatus | None:
        self.looks += 1
        if self.looks > len(self.left):
            return None
        return RowStatus(request_id, "dense", 16, 16, self.left[self.looks - 1])

    def status(self) -> Any:
        counters = {"steps_total": float(self.looks), "step_seconds_total": 0.1 * self.looks}
        return SimpleNamespace(counters=counters)


def tried(*left: int) -> ClientTrial:
    site: Any = Scripted(left)
    return try_client_fault(site, ClientFault("a way to leave", lambda *_: lambda: None))


def test_the_steps_after_the_client_has_left_are_counted() -> None:
    #              it runs, has stepped | left, followed
    assert tried(9, 9, 8, 7, 7, 6, 6).steps == 2
    assert tried(9, 8).steps == 0


def test_a_row_that_ends_by_itself_shows_nothing() -> None:
    with pytest.raises(LookupError, match="a way to leave: the row ran to its end"):
        tried(9, 8, 3, 2, 1)


def test_a_row_that_is_gone_before_its_client_leaves_is_no_trial() -> None:
    with pytest.raises(LookupError, match="is gone"):
        tried(9, 9)
