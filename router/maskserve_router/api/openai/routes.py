"""The paths of OpenAI's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_router.api.front import Front
from maskserve_router.api.openai.answers import error_boundary, json_answer
from maskserve_router.api.openai.edits import ImageEdits
from maskserve_router.api.openai.picture_urls import PictureUrls
from maskserve_router.api.openai.served_models import ServedModels
from maskserve_router.api.openai.templates import TemplateRoutes

_ONE = "/v1/templates/{template_id}"


def openai_routes(
    edits: ImageEdits, templates: TemplateRoutes, picture_urls: PictureUrls
) -> list[Route]:
    """Return the routes of edits, generations, variations, kept pictures and templates."""
    return [
        Route("/v1/images/edits", error_boundary(edits.edit), methods=["POST"]),
        Route("/v1/images/generations", error_boundary(edits.generate), methods=["POST"]),
        Route("/v1/images/variations", error_boundary(edits.vary), methods=["POST"]),
        picture_urls.route(),
        Route("/v1/templates", error_boundary(templates.all), methods=["GET"]),
        Route("/v1/templates", error_boundary(templates.register), methods=["POST"]),
        Route(_ONE, error_boundary(templates.one), methods=["GET"]),
        Route(_ONE, error_boundary(templates.delete), methods=["DELETE"]),
        *(
            Route(f"{_ONE}/{name}", error_boundary(templates.operation(name)), methods=["POST"])
            for name in ("prime", "pin", "unpin")
        ),
    ]


def model_routes(front: Front, models: ServedModels) -> list[Route]:
    """Return the routes of the models that clients may name."""

    def described(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "maskserve"}

    async def every(request: Request, request_id: str) -> Response:
        front.client(request.headers)
        data = [described(name) for name in models.names()]
        return json_answer({"object": "list", "data": data}, request_id)

    async def one(request: Request, request_id: str) -> Response:
        front.client(request.headers)
        models.resolved(request.path_params["model"])
        return json_answer(described(request.path_params["model"]), request_id)

    return [
        Route("/v1/models", error_boundary(every), methods=["GET"]),
        Route("/v1/models/{model:path}", error_boundary(one), methods=["GET"]),
    ]
