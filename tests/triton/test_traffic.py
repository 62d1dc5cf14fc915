"""When edits count as stuck in the pipeline, and when they are only slow."""

from __future__ import annotations

import pytest

from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.settings import EditSettings
from maskserve_triton.answer import Answer
from maskserve_triton.call import Call
from maskserve_triton.traffic import Traffic
from tests.fakes.pb_utils import FakeTriton, Sender

LIMIT_S = 120.0
LOOK_S = 0.1


class Front:
    """Calls of a front that looks every tenth of a second.

    `naive_s` is the longest that one has been under way, which tells stuck edits from slow ones
    by nothing.
    """

    def __init__(self, api: FakeTriton) -> None:
        self._api = api
        self.now, self.naive_s = 1000.0, 0.0
        self.traffic = Traffic(lambda: self.now)
        self.calls: list[Call] = []
        self.in_engine: set[str] = set()

    def call(self, name: str, *, sent: bool = True) -> Call:
        settings = EditSettings(request_id=name)
        answer = Answer(self._api, Sender(self._api.violations))
        call = Call(AcceptedEdit("", settings, 0), {}, answer, accepted=self.now, sent=sent)
        self.calls.append(call)
        return call

    def hold(self, call: Call) -> None:
        """The engine has it."""
        self.in_engine.add(call.request_id)
        call.last_event = self.now
        self.traffic.record_arrival()

    def end(self, call: Call) -> None:
        self.in_engine.discard(call.request_id)
        self.calls.remove(call)
        self.traffic.record_end()

    def passes(self, seconds: float, look_s: float = LOOK_S) -> str | None:
        """Look for so long; what is said in the end."""
        message = None
        for _ in range(round(seconds / look_s)):
            self.now += look_s
            problem = self.traffic.stuck(self.calls, self.in_engine, LIMIT_S)
            message = None if problem is None else problem.message
            oldest = min((call.accepted for call in self.calls), default=self.now)
            self.naive_s = max(self.naive_s, self.now - oldest)
        return message


@pytest.fixture
def front(api: FakeTriton) -> Front:
    return Front(api)


def test_what_does_not_reach_the_engine_is_stuck(front: Front) -> None:
    front.call("a")
    assert front.passes(119) is None
    assert front.passes(2) == "edits are stuck before the engine, for 120.9 s"


def test_what_does_not_come_back_is_stuck(front: Front) -> None:
    """Others still reach the engine; one that is held does not hide those that should be back."""
    lost = front.call("lost")
    front.hold(lost)
    front.passes(10)
    front.in_engine.discard("lost")
    for n in range(11):
        front.hold(front.call(str(n)))
        assert front.passes(10) is None
    assert front.passes(11) == "edits are stuck behind the engine, for 121.0 s"


def test_an_answered_edit_that_the_pipeline_keeps_is_stuck_all_the_same(front: Front) -> None:
    call = front.call("a")
    call.answer.end()
    message = front.passes(121)
    assert message is not None


def test_one_that_is_lost_on_its_way_back_and_answered_is_not_stuck(front: Front) -> None:
    """Others, which the engine computes for long, would end with it."""
    lost = front.call("lost")
    front.hold(lost)
    front.in_engine.discard("lost")
    front.hold(front.call("long"))
    assert front.passes(30) is None
    lost.answer.end()
    assert front.passes(600) is None
    assert front.naive_s > LIMIT_S


def test_a_long_edit_is_not_stuck(front: Front) -> None:
    front.hold(front.call("a"))
    assert front.passes(600) is None
    assert front.naive_s > LIMIT_S


def test_edits_that_come_through_one_by_one_are_not_stuck(front: Front) -> None:
    """Each is encoded for a minute and a half, then runs, then is decoded for as long."""
    queue = [front.call(str(n)) for n in range(8)]
    for call in queue:
        assert front.passes(90) is None
        front.hold(call)
    front.in_engine.clear()
    for call in queue:
        assert front.passes(90) is None
        front.end(call)
    assert front.naive_s > 5 * LIMIT_S


def test_what_waits_for_a_thread_is_not_stuck(front: Front) -> None:
    """All threads of the front wait for edits that the engine holds."""
    front.hold(front.call("a"))
    front.call("b", sent=False)
    assert front.passes(600) is None
    assert front.naive_s > LIMIT_S


def test_a_machine_that_stands_still_is_not_stuck(front: Front) -> None:
    front.call("a")
    front.passes(1)
    assert front.passes(900, look_s=300.0) is None
    assert front.naive_s > LIMIT_S


def test_an_idle_front_is_not_stuck_by_its_first_edit(front: Front) -> None:
    front.passes(600)
    front.call("a")
    assert front.passes(10) is None


def test_what_comes_through_again_is_no_longer_stuck(front: Front) -> None:
    call = front.call("a")
    assert front.passes(121) is not None
    front.hold(call)
    assert front.passes(LOOK_S) is None
