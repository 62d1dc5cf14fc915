"""Calls to a router's HTTP port for routes that OpenAI's clients lack."""

from __future__ import annotations

import http.client
import json
import ssl
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from maskserve_client.errors import ServerUnavailable, from_text
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError


class RouterHttp:
    """Calls a router. Errors are those of maskserve_common.errors, and ServerUnavailable.

    Args:
        url: URL of the router's HTTP port.
        key: API key, if the router needs one.
        context: TLS context; by default the system's authorities are trusted.
        timeout: seconds to wait for each answer.

    Raises:
        InvalidRequest: `url` is not an HTTP address.
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
            raise InvalidRequest("url", f"{url} is not an HTTP address", "http[s]://HOST:PORT")
        self._url, self._parts = url, parts
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._context, self._timeout = context, timeout

    def send_form(
        self,
        path: str,
        fields: Mapping[str, Any],
        files: Sequence[tuple[str, bytes]],
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a form of named values and files, and return the answer; raises as `call`."""
        edge = uuid.uuid4().hex
        parts = [
            f'Content-Disposition: form-data; name="{name}"\r\n\r\n{_text(value)}'.encode()
            for name, value in fields.items()
        ]
        for name, raw in files:
            part_header = (
                f'Content-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'
            )
            parts.append(part_header.encode() + raw)
        body = b"".join(b"--%b\r\n%b\r\n" % (edge.encode(), part) for part in parts)
        kind = f"multipart/form-data; boundary={edge}"
        end = b"--%b--\r\n" % edge.encode()
        return self.call("POST", path, body + end, {"Content-Type": kind, **(headers or {})})

    def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the answer's JSON.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
        """
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
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{self._url}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        try:
            values: dict[str, Any] = json.loads(raw)
            if answer.status in (200, 202):
                return values
            failed = error_of(values["error"])
        except (ValueError, KeyError, TypeError):
            raise EngineFailed(f"{self._url} answered {answer.status}, not as a router") from None
        raise failed


def error_of(body: Mapping[str, Any]) -> MaskserveError:
    """Return the exception for an error of the HTTP port."""
    code, message = str(body["code"]).upper(), str(body["message"])
    if code == "INVALID_API_KEY":
        return InvalidRequest("key", message)
    if code in ("JOB_NOT_FOUND", "MODEL_NOT_FOUND"):
        code = InvalidRequest.code
    return from_text(f"[{code}] {message}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
