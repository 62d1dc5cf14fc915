"""`/v1/models`: the models that clients may name."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_router.api.front import Front
from maskserve_router.api.openai.answers import error_boundary, json_answer
from maskserve_router.api.openai.served_models import ServedModels


def model_routes(front: Front, models: ServedModels) -> list[Route]:
    """Return the routes of models."""

    async def all_models(request: Request, request_id: str) -> Response:
        front.client(request.headers)
        listed = [_model(name) for name in models.names()]
        return json_answer({"object": "list", "data": listed}, request_id)

    async def one(request: Request, request_id: str) -> Response:
        front.client(request.headers)
        name = request.path_params["model"]
        models.resolved(name)
        return json_answer(_model(name), request_id)

    return [
        Route("/v1/models", error_boundary(all_models), methods=["GET"]),
        Route("/v1/models/{model:path}", error_boundary(one), methods=["GET"]),
    ]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "maskserve"}
