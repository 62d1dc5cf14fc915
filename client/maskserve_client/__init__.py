"""Client of maskserve: a library over gRPC, blocking or asyncio, and the command `maskserve`."""

from maskserve_client.aio import AsyncClient
from maskserve_client.client import Client
from maskserve_client.errors import ServerUnavailable
from maskserve_client.events import EditResult, Event, Final, Preview, Progress
from maskserve_client.jobs import EditJobs
from maskserve_client.masks import Masks, ScoredMask
from maskserve_client.templates import Templates
from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Refused,
    TemplateNotFound,
)

__all__ = [
    "AdapterNotFound",
    "AsyncClient",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "EditJobs",
    "EditResult",
    "EngineFailed",
    "Event",
    "Final",
    "InvalidRequest",
    "Masks",
    "MaskserveError",
    "Overloaded",
    "Preview",
    "Progress",
    "Refused",
    "ScoredMask",
    "ServerUnavailable",
    "TemplateNotFound",
    "Templates",
]
