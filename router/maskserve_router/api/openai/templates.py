"""`/v1/templates`: source images that stay with the workers, so that edits need not upload them.

A template belongs to the key that registered it (docs/operate.md#keys).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maskserve_common.contracts.keys import TEMPLATE_ID
from maskserve_common.errors import InvalidRequest, TemplateNotFound
from maskserve_common.reading import Table
from maskserve_router.api.front import Front
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.openai.answers import Handler, json_answer
from maskserve_router.api.openai.form import read_picture_form
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.control_message import registration
from maskserve_router.operations.control import ClusterControl


class TemplateRoutes:
    """Handlers to register, list, show, prime, pin, unpin and delete templates."""

    def __init__(
        self, bodies: Bodies, front: Front, control: ClusterControl, fair_share: FairShare
    ) -> None:
        self._bodies, self._front, self._control = bodies, front, control
        self._fair_share = fair_share

    async def register(self, request: Request, request_id: str) -> Response:
        """Answer a form with `image`, and `shared` (for every key) and `prime`, true or false."""
        client = self._client(request)
        with ExitStack() as exit_stack:
            body = await self._bodies.read(request, client, exit_stack)
            parse = partial(self._fair_share.run, client, len(body))
            image, fields = await parse(read_picture_form, request.headers, body, _Registration)
            del body
            operation = await parse(registration, image)
            if fields.shared:
                operation["shared"] = True
            if not fields.prime:
                operation["prime"] = False
            result = await self._control.do(operation, client)
        return json_answer(
            {"id": result["template_id"], "object": "template", **result}, request_id
        )

    async def all(self, request: Request, request_id: str) -> Response:
        listed = await self._listed(self._client(request))
        return json_answer({"object": "list", "data": listed}, request_id)

    async def one(self, request: Request, request_id: str) -> Response:
        name = _name(request)
        for template in await self._listed(self._client(request)):
            if template["id"] == name:
                return json_answer(template, request_id)
        raise TemplateNotFound(f"template_id: {name} is not known here")

    def operation(self, op: str) -> Handler:
        """Return the handler of `prime`, `pin` or `unpin`."""

        async def operate(request: Request, request_id: str) -> Response:
            operation = {"op": op, "template_id": _name(request)}
            result = await self._control.do(operation, self._client(request))
            body = {"id": result["template_id"], "object": "template", **result}
            return json_answer(body, request_id)

        return operate

    async def delete(self, request: Request, request_id: str) -> Response:
        operation = {"op": "evict", "template_id": _name(request)}
        result = await self._control.do(operation, self._client(request))
        body = {
            "id": result["template_id"],
            "object": "template.deleted",
            "deleted": True,
            **result,
        }
        return json_answer(body, request_id)

    def _client(self, request: Request) -> KeyHolder:
        return self._front.client(request.headers)

    async def _listed(self, client: KeyHolder) -> list[dict[str, Any]]:
        """Return the client's templates, each with the bytes of its entries by tier."""
        result = await self._control.do({"op": "templates"}, client)
        listed = []
        for template in result["templates"]:
            sizes: dict[str, int] = {}
            for entry in template["entries"]:
                sizes[entry["tier"]] = sizes.get(entry["tier"], 0) + entry["bytes"]
            name = template["template_id"]
            listed.append({"id": name, "object": "template", "tier_bytes": sizes, **template})
        return listed


class _Registration(Table, frozen=True):
    """Fields of a registration beside its image."""

    shared: bool = False
    prime: bool = True


def _name(request: Request) -> str:
    name: str = request.path_params["template_id"]
    if TEMPLATE_ID.fullmatch(name) is None:
        raise InvalidRequest(
            "template_id", "has another form", "16 to 64 lower-case hexadecimal digits"
        )
    return name
