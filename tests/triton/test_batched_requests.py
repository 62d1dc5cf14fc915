"""Requests that are taken together are answered each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from maskserve_common.config import Config
from maskserve_common.errors import InvalidRequest
from maskserve_common.tracing import make_tracer
from maskserve_triton.batched_requests import BatchedRequests, batched, view_item
from maskserve_triton.tensor_io import Outputs, read_bytes
from tests.fakes.pb_utils import FakeTriton, Request


def read(api: FakeTriton, request: Any) -> tuple[int, Any]:
    number = int(read_bytes(api, request, "NUMBER"))
    return number, view_item(api, request, "VALUES", np.float32, ndim=1)


def requests_of(api: FakeTriton, *sizes: int) -> list[Request]:
    return [
        Request(api, **batched({"NUMBER": b"%d" % number, "VALUES": np.ones(size, np.float32)}))
        for number, size in enumerate(sizes)
    ]


def summed(items: Sequence[tuple[int, Any]]) -> Iterator[Outputs | Exception]:
    for number, values in items:
        if not len(values):
            yield InvalidRequest("VALUES", "are none")
        else:
            yield {"SUM": np.array([values.sum()]), "NUMBER": b"%d" % number}


@pytest.fixture
def api() -> FakeTriton:
    return FakeTriton()


def together(
    api: FakeTriton, config: Config, work: Any = summed, failed: Any = None
) -> BatchedRequests:
    tracer = make_tracer(config, "test")
    return BatchedRequests(api, tracer, "sum", lambda request: read(api, request), work, failed)


def test_each_gets_its_own_in_a_batch_of_one(api: FakeTriton, config: Config) -> None:
    requests = requests_of(api, 3, 5, 2)
    together(api, config).execute(requests)
    for number, (request, size) in enumerate(zip(requests, (3, 5, 2), strict=True)):
        answer = request.sender.wait()
        outputs = {t.name(): t.as_numpy() for t in answer.output_tensors()}
        np.testing.assert_array_equal(outputs["SUM"], [[float(size)]])
        assert outputs["NUMBER"].shape == (1, 1)
        assert outputs["NUMBER"][0, 0] == b"%d" % number
    assert api.violations == []


def test_one_that_fails_or_cannot_be_read_harms_no_other(api: FakeTriton, config: Config) -> None:
    requests = requests_of(api, 3, 0, 2, 4)
    del requests[3].tensors["VALUES"]
    together(api, config).execute(requests)
    errors = [request.sender.wait().error() for request in requests]
    assert [error is None for error in errors] == [True, False, True, False]
    assert "VALUES" in errors[1].message()
    assert "are none" in errors[1].message()
    assert "is missing" in errors[3].message()


def test_what_is_done_is_answered_before_the_rest_is_begun(api: FakeTriton, config: Config) -> None:
    requests = requests_of(api, 3, 2)

    def work(items: Sequence[Any]) -> Iterator[Outputs | Exception]:
        for number, _ in items:
            answered = [request.sender.finished.is_set() for request in requests]
            assert answered == [index < number for index in range(2)]
            yield {"NUMBER": b"done"}

    together(api, config, work).execute(requests)
    assert [request.sender.wait().has_error() for request in requests] == [False, False]


@pytest.mark.parametrize("after", [0, 1])
def test_nobody_waits_for_ever_where_the_work_breaks_off(
    api: FakeTriton, config: Config, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(items: Sequence[Any]) -> Iterator[Outputs | Exception]:
        for number, _ in items[:after]:
            yield {"NUMBER": b"%d" % number}
        raise MemoryError("gone")

    requests = requests_of(api, 3, 2, 1)
    together(api, config, work).execute(requests)
    failed = [request.sender.wait().has_error() for request in requests]
    assert failed == [number >= after for number in range(3)]
    assert "gone" in caplog.text


def test_an_event_may_say_that_it_failed(api: FakeTriton, config: Config) -> None:
    def failed(request: Any, error: Exception) -> Outputs:
        return {"META": str(error).encode()}

    requests = requests_of(api, 0, 1)
    together(api, config, failed=failed).execute(requests)
    first = requests[0].sender.wait()
    assert not first.has_error()
    [meta] = first.output_tensors()
    assert b"are none" in meta.as_numpy()[0, 0]
