"""Routes of `/v1/workflows`: the served workflows and the servers that run their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_router.api.openai.answers import error_boundary, json_answer
from maskserve_router.key_holder import KeyHolder
from maskserve_router.scheduling.served_workflows import ServedWorkflows


def workflow_routes(
    identify: Callable[[Mapping[str, str]], KeyHolder], workflows: ServedWorkflows
) -> list[Route]:
    """Return the routes of workflows."""

    async def listed(request: Request, request_id: str) -> Response:
        return json_answer(await workflows.listed(identify(request.headers)), request_id)

    return [Route("/v1/workflows", error_boundary(listed), methods=["GET"])]
