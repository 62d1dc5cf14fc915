"""Statistics of several workers as those of one server, and the statistics of one client."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from maskserve_router.keys import EditCounts, KeyHolder

_LATEST = ("last_inference",)


def summed(
    answers: Iterable[pb.ModelStatisticsResponse], names: Iterable[str]
) -> pb.ModelStatisticsResponse:
    """Sum counts and times of each model; the last inference is the latest.

    Args:
        answers: the workers' statistics.
        names: models to include.
    """
    sums: dict[tuple[str, str], pb.ModelStatistics] = {}
    model_names = frozenset(names)
    for answer in answers:
        for model_stats in answer.model_stats:
            if model_stats.name in model_names:
                key = (model_stats.name, model_stats.version)
                total = sums.setdefault(key, pb.ModelStatistics(name=key[0], version=key[1]))
                _add(total, model_stats)
    return pb.ModelStatisticsResponse(model_stats=[sums[key] for key in sorted(sums)])


def served_by(client: KeyHolder, names: Iterable[str]) -> pb.ModelStatisticsResponse:
    """Return what this router has answered one client, as a server's statistics of these models."""
    response = pb.ModelStatisticsResponse()
    for name in names:
        book = client.served.get(name, EditCounts())
        model_stats = response.model_stats.add(name=name, version="1")
        model_stats.inference_count = model_stats.execution_count = book.succeeded
        model_stats.inference_stats.success.count = book.succeeded
        model_stats.inference_stats.success.ns = book.succeeded_ns
        model_stats.inference_stats.fail.count = book.failed
        model_stats.inference_stats.fail.ns = book.failed_ns
    return response


def _add(into: Message, more: Message) -> None:
    """Add every number of `more`. Lists, which are per batch or device, are left out."""
    for field, value in more.ListFields():
        name = field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in value:
                _add(getattr(into, name)[key], value[key])
        elif field.is_repeated or isinstance(value, str):
            continue
        elif field.message_type is not None:
            _add(getattr(into, name), value)
        else:
            previous = getattr(into, name)
            setattr(into, name, max(previous, value) if name in _LATEST else previous + value)
