"""`/v1/templates` of a router: images and kept results that edits name instead of sending."""

from __future__ import annotations

import http.client
import json
import ssl
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from maskserve_client import wire
from maskserve_client.errors import ServerUnavailable, from_text
from maskserve_client.wire import ImageInput
from maskserve_core.errors import EngineFailed, InvalidRequest

_PATH = "/v1/templates"


class Templates:
    """The templates of an API key.

        templates = Templates("http://localhost:8080", key="…")
        name = templates.register("room.png")["id"]

    A template is a dictionary with `id`, `registered`, `tier_bytes` (of its cached activations),
    `workers` (those that have the image), and `expires_s` (of a kept result). Errors are those of
    maskserve_core.errors, and ServerUnavailable.

    Args:
        url: of the router's HTTP port.
        key: where the router asks for one.
        context: of TLS; by default the system's authorities are trusted.
        timeout: seconds to wait for each answer.

    Raises:
        InvalidRequest: `url` is no HTTP address.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        context: ssl.SSLContext | None = None,
        timeout: float = 80.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise InvalidRequest("url", f"{url} is no HTTP address", "http[s]://HOST:PORT")
        self._url, self._parts = url, parts
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._context, self._timeout = context, timeout

    def register(
        self, image: ImageInput, *, prime: bool = True, shared: bool = False
    ) -> dict[str, Any]:
        """Register an image.

        Args:
            image: the picture.
            prime: compute its activations now, in the background.
            shared: for every key.

        Raises:
            MaskserveError: what the server answered, or ServerUnavailable.
            OSError: a path that cannot be read.
        """
        edge = uuid.uuid4().hex
        fields = {"prime": prime, "shared": shared}
        parts = [
            f'Content-Disposition: form-data; name="{name}"\r\n\r\n{json.dumps(value)}'.encode()
            for name, value in fields.items()
        ]
        told = 'Content-Disposition: form-data; name="image"; filename="image"\r\n\r\n'
        parts.append(told.encode() + wire.image_bytes(image))
        body = b"".join(b"--%b\r\n%b\r\n" % (edge.encode(), part) for part in parts)
        kind = f"multipart/form-data; boundary={edge}"
        return self._call("POST", "", body + b"--%b--\r\n" % edge.encode(), {"Content-Type": kind})

    def list(self) -> list[dict[str, Any]]:
        """All of this key, shared ones included."""
        listed: list[dict[str, Any]] = self._call("GET", "")["data"]
        return listed

    def get(self, template_id: str) -> dict[str, Any]:
        """One of them."""
        return self._call("GET", f"/{_checked(template_id)}")

    def prime(self, template_id: str) -> dict[str, Any]:
        """Compute its activations in the background."""
        return self._call("POST", f"/{_checked(template_id)}/prime")

    def pin(self, template_id: str) -> dict[str, Any]:
        """Keep its activations from eviction, and a result from going."""
        return self._call("POST", f"/{_checked(template_id)}/pin")

    def unpin(self, template_id: str) -> dict[str, Any]:
        """Let its activations be evicted again."""
        return self._call("POST", f"/{_checked(template_id)}/unpin")

    def delete(self, template_id: str) -> dict[str, Any]:
        """Forget the image and its activations."""
        return self._call("DELETE", f"/{_checked(template_id)}")

    def _call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        parts = self._parts
        host, port = str(parts.hostname), parts.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=self._timeout)
            if parts.scheme == "http"
            else http.client.HTTPSConnection(
                host, port, timeout=self._timeout, context=self._context
            )
        )
        try:
            connection.request(method, _PATH + path, body, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{self._url}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        try:
            values: dict[str, Any] = json.loads(raw)
            if answer.status == 200:
                return values
            told = values["error"]
            code, message = str(told["code"]).upper(), str(told["message"])
        except (ValueError, KeyError, TypeError):
            raise EngineFailed(f"{self._url} answered {answer.status}, not as a router") from None
        if code == "INVALID_API_KEY":
            code = InvalidRequest.code
            message = f"key: {message}"
        raise from_text(f"[{code}] {message}")


def _checked(template_id: str) -> str:
    """An id as a part of a path.

    Raises:
        InvalidRequest: it is none.
    """
    if not template_id.isalnum():
        raise InvalidRequest("template_id", "has another form", "as a registration answers it")
    return template_id
