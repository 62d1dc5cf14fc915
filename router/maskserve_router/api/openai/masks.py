"""`/v1/masks`: the mask of a thing in a picture, to check before an edit."""

from __future__ import annotations

import io
from contextlib import ExitStack
from functools import partial

from PIL import Image, ImageChops
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_common.contracts.settings import MaskFrom
from maskserve_router.api.front import Front
from maskserve_router.api.http_answers import while_connected
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.openai.answers import error_boundary, json_answer, text_of_picture
from maskserve_router.api.openai.form import read_picture_form
from maskserve_router.fair_share import FairShare
from maskserve_router.scheduling.mask_finder import MaskFinder


def mask_routes(
    bodies: Bodies, front: Front, masks: MaskFinder, fair_share: FairShare
) -> list[Route]:
    """Return the routes of masks."""

    async def find(request: Request, request_id: str) -> Response:
        """Answer a multipart form: `image`, and `text`, or `points` and `box` as JSON."""
        client = front.client(request.headers)
        with ExitStack() as exit_stack:
            body = await bodies.read(request, client, exit_stack)
            parse = partial(fair_share.run, client, len(body))
            image, source = await parse(read_picture_form, request.headers, body, MaskFrom)
            del body
            work = masks.find(image, source, client, "")
            found_mask = await while_connected(request, work)
            mask = await parse(_text_of_mask, found_mask.mask)
        data = [{"b64_json": mask, "score": found_mask.score}]
        return json_answer({"object": "list", "data": data}, request_id)

    return [Route("/v1/masks", error_boundary(find), methods=["POST"])]


def _text_of_mask(mask: bytes) -> str:
    """Return a mask as base64: white, and also transparent where it is white.

    It can so be read as a mask of this API and of KServe's API, and by people.
    """
    white = Image.open(io.BytesIO(mask)).convert("L")
    picture = Image.merge("LA", (white, ImageChops.invert(white)))
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return text_of_picture(out.getvalue())
