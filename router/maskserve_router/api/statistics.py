"""Statistics of several workers as those of one server, and the statistics of one client."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from maskserve_router.key_holder import EditCounts, KeyHolder

_LATEST = ("last_inference",)


def sum_statistics(
    answers: Iterable[pb.ModelStatisticsResponse], names: Iterable[str]
) -> pb.ModelStatisticsResponse:
    """Return the sums of counts and times by model; the last inference is the latest of all.

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


def client_statistics(client: KeyHolder, names: Iterable[str]) -> pb.ModelStatisticsResponse:
    """Return the statistics of one client's edits at this router, by model."""
    response = pb.ModelStatisticsResponse()
    for name in names:
        counts = client.served.get(name, EditCounts())
        model_stats = response.model_stats.add(name=name, version="1")
        model_stats.inference_count = model_stats.execution_count = counts.succeeded
        model_stats.inference_stats.success.count = counts.succeeded
        model_stats.inference_stats.success.ns = counts.succeeded_ns
        model_stats.inference_stats.fail.count = counts.failed
        model_stats.inference_stats.fail.ns = counts.failed_ns
    return response


def _add(total: Message, addend: Message) -> None:
    """Add every number of `addend` to `total`, except in lists, which are per batch or device."""
    for field, value in addend.ListFields():
        name = field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in value:
                _add(getattr(total, name)[key], value[key])
        elif field.is_repeated or isinstance(value, str):
            continue
        elif field.message_type is not None:
            _add(getattr(total, name), value)
        else:
            previous = getattr(total, name)
            setattr(total, name, max(previous, value) if name in _LATEST else previous + value)
