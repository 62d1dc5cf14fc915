"""`response_format: url`: pictures that the router keeps for a while, and their path."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_common.errors import InvalidRequest
from maskserve_common.lru_cache import LruCache
from maskserve_router.api.openai.answers import NotFound, error_boundary
from maskserve_router.config import OpenAIConfig

PATH: Final = "/v1/images/files"
_TYPES: Final = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


class PictureUrls:
    """Keeps pictures in memory, shared fairly by keys. Use it from the event loop only, but for
    `named`.

    A URL contains a digest that only this router can compute. So nobody can guess it, and a key's
    equal pictures are kept once. Whoever has the URL may fetch the picture without a key, as
    clients of OpenAI's API do.

    Args:
        config: `[openai]`.
    """

    def __init__(self, config: OpenAIConfig) -> None:
        self._public_url, self._most_bytes = config.public_url.rstrip("/"), config.url_bytes
        self._secret = secrets.token_bytes(32)
        self._pictures: LruCache[str, bytes] = LruCache(
            config.url_bytes, len, _owner_of, config.url_s
        )

    def name_and_copy(
        self, scope: str, picture: bytes | memoryview, output_format: str
    ) -> tuple[str, bytes]:
        """Return a picture's name and a copy of its file; takes a time that grows with the file.

        Args:
            scope: scope of the key that had it made.
            picture: its file.
            output_format: `png`, `jpeg` or `webp`.

        Raises:
            InvalidRequest: the picture is larger than all pictures may be.
        """
        if len(picture) > self._most_bytes:
            raise InvalidRequest(
                "response_format",
                f"is url, and the picture has {len(picture)} bytes; [openai] url_bytes is "
                f"{self._most_bytes}",
                "b64_json",
            )
        owner = hashlib.blake2b(scope.encode(), digest_size=6, key=self._secret)
        digest = hashlib.blake2b(picture, digest_size=24, key=self._secret)
        return f"{owner.hexdigest()}-{digest.hexdigest()}.{output_format}", bytes(picture)

    def keep(self, name: str, content: bytes, origin: str) -> str:
        """Keep a picture and return its URL.

        Args:
            name: its name (`name_and_copy`).
            content: its file.
            origin: scheme and host by which the client reached the router; `[openai] public_url`
                goes before it.
        """
        self._pictures.put(name, content)
        return f"{self._public_url or origin.rstrip('/')}{PATH}/{name}"

    def route(self) -> Route:
        """Return the route at which pictures are fetched."""
        return Route(f"{PATH}/{{name}}", error_boundary(self._fetch), methods=["GET"])

    async def _fetch(self, request: Request, request_id: str) -> Response:
        name = request.path_params["name"]
        picture = self._pictures.get(name)
        if picture is None:
            raise NotFound("url", "names no picture, or one that is no longer kept")
        headers = {"x-request-id": request_id, "cache-control": "private, max-age=3600"}
        return Response(picture, 200, headers, _TYPES[name.rpartition(".")[2]])


def _owner_of(name: str) -> str:
    return name.partition("-")[0]
