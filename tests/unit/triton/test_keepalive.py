"""Responses of decoupled calls outlive their reading by some time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from maskserve_triton.pipeline import KeepAlive, responses_of
from tests.support.eventually import eventually


class Responses:
    """The answer of a decoupled call, as the stub makes it: an object that is its own iterator."""

    def __init__(self) -> None:
        self._left = iter("abc")

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._left)


class Call:
    def __init__(self) -> None:
        self.responses: weakref.ref[Responses] | None = None

    def exec(self, *, decoupled: bool) -> Responses:
        assert decoupled
        responses = Responses()
        self.responses = weakref.ref(responses)
        return responses


def read_all(responses: Iterator[Any]) -> None:
    assert list(responses) == ["a", "b", "c"]


def read_one_and_fail(responses: Iterator[Any]) -> None:
    def read() -> None:
        for _ in responses:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


@pytest.mark.parametrize("read", [read_all, read_one_and_fail])
def test_they_are_kept_for_a_while_and_not_longer(read: Any) -> None:
    call = Call()
    read(responses_of(call, KeepAlive(2.0)))
    assert call.responses is not None
    assert call.responses() is not None
    responses_ref = call.responses
    eventually("they are let go of", lambda: responses_ref() is None)
