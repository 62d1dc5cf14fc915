"""`/v1/templates` of a router: images and kept results that edits name instead of sending."""

from __future__ import annotations

from typing import Any

from maskserve_client import wire
from maskserve_client.router_http import RouterHttp
from maskserve_client.wire import ImageInput
from maskserve_common.errors import InvalidRequest

_PATH = "/v1/templates"


class Templates(RouterHttp):
    """The templates of an API key.

        templates = Templates("http://localhost:8080", key="…")
        name = templates.register("room.png")["id"]

    A template is a dictionary with `id`, `registered`, `tier_bytes` (bytes of its cached
    activations), `workers` (those that have the image), and `expires_s` (for a kept result).
    """

    def register(
        self, image: ImageInput, *, prime: bool = True, shared: bool = False
    ) -> dict[str, Any]:
        """Register an image.

        Args:
            image: the picture.
            prime: True to compute its activations now, in the background.
            shared: True to share it with every key.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
            OSError: a path cannot be read.
        """
        fields = {"prime": prime, "shared": shared}
        return self.send_form(_PATH, fields, [("image", wire.image_bytes(image))])

    def list(self) -> list[dict[str, Any]]:
        """Return all templates that this key sees, including shared ones."""
        listed: list[dict[str, Any]] = self.call("GET", _PATH)["data"]
        return listed

    def get(self, template_id: str) -> dict[str, Any]:
        """Return one template."""
        return self.call("GET", f"{_PATH}/{_checked(template_id)}")

    def prime(self, template_id: str) -> dict[str, Any]:
        """Compute its activations in the background."""
        return self.call("POST", f"{_PATH}/{_checked(template_id)}/prime")

    def pin(self, template_id: str) -> dict[str, Any]:
        """Protect its activations from eviction, and a result from expiry."""
        return self.call("POST", f"{_PATH}/{_checked(template_id)}/pin")

    def unpin(self, template_id: str) -> dict[str, Any]:
        """Let its activations be evicted again."""
        return self.call("POST", f"{_PATH}/{_checked(template_id)}/unpin")

    def delete(self, template_id: str) -> dict[str, Any]:
        """Delete the image and its activations."""
        return self.call("DELETE", f"{_PATH}/{_checked(template_id)}")


def _checked(template_id: str) -> str:
    """Return a checked id, as a part of a path.

    Raises:
        InvalidRequest: it is malformed.
    """
    if not template_id.isalnum():
        raise InvalidRequest("template_id", "has another form", "as a registration answers it")
    return template_id
