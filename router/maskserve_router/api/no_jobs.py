"""`/v1/jobs` at a router that takes no jobs. It needs nothing of the extra `jobs`."""

from __future__ import annotations

from typing import Final, NoReturn

from starlette.requests import Request
from starlette.routing import Route

from maskserve_router.api.front import Front
from maskserve_router.api.openai.answers import error_boundary
from maskserve_router.messages.failures import NotSupported


class NoJobs:
    """Refuses every call of a known key with the reason."""

    state: Final = "off"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def routes(self, front: Front) -> list[Route]:
        async def refuse(request: Request, request_id: str) -> NoReturn:
            front.client(request.headers)
            raise NotSupported("jobs", self._reason)

        return [
            Route("/v1/jobs", error_boundary(refuse), methods=["GET", "POST"]),
            Route("/v1/jobs/{id}", error_boundary(refuse), methods=["GET", "DELETE"]),
        ]

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self, grace_s: float) -> None:
        """Do nothing."""
