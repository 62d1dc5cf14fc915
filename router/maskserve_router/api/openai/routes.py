"""The paths of OpenAI's API."""

from __future__ import annotations

from starlette.routing import Route

from maskserve_router.api.openai.answers import answering
from maskserve_router.api.openai.edits import ImageEdits
from maskserve_router.api.openai.picture_urls import PictureUrls
from maskserve_router.api.openai.templates import TemplateRoutes

_ONE = "/v1/templates/{template_id}"


def openai_routes(
    edits: ImageEdits, templates: TemplateRoutes, picture_urls: PictureUrls
) -> list[Route]:
    """Return the routes of edits, generations, variations, kept pictures, models and templates."""
    return [
        Route("/v1/images/edits", answering(edits.edit), methods=["POST"]),
        Route("/v1/images/generations", answering(edits.generate), methods=["POST"]),
        Route("/v1/images/variations", answering(edits.vary), methods=["POST"]),
        picture_urls.route(),
        Route("/v1/models", answering(edits.models), methods=["GET"]),
        Route("/v1/models/{model:path}", answering(edits.model), methods=["GET"]),
        Route("/v1/templates", answering(templates.all), methods=["GET"]),
        Route("/v1/templates", answering(templates.register), methods=["POST"]),
        Route(_ONE, answering(templates.one), methods=["GET"]),
        Route(_ONE, answering(templates.delete), methods=["DELETE"]),
        *(
            Route(f"{_ONE}/{name}", answering(templates.operation(name)), methods=["POST"])
            for name in ("prime", "pin", "unpin")
        ),
    ]
