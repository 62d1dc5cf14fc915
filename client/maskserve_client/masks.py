"""`/v1/masks` of a router: masks that nobody paints."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from maskserve_client import wire
from maskserve_client.router_http import RouterHttp
from maskserve_client.wire import ImageInput


class ScoredMask(NamedTuple):
    """The mask of a thing in a picture."""

    mask: bytes
    """A PNG of the picture's size, white where the thing is."""
    score: float | None
    """How well it fits, as the model says, from 0 to 1; None: it says nothing."""


class Masks(RouterHttp):
    """Masks of things, found by a router's node servers.

    found = Masks("http://localhost:8080").find("street.jpg", points=[[420, 310, 1]])
    open("mask.png", "wb").write(found.mask)
    """

    def find(self, image: ImageInput, **asked: Any) -> ScoredMask:
        """Find one.

        Args:
            image: the picture.
            asked: as the setting `mask_from` has it: `text`, or `points` and `box`.

        Raises:
            InvalidRequest: nothing is found, or no server finds things so.
            MaskserveError: what else the server answered, or ServerUnavailable.
            OSError: a path that cannot be read.
        """
        files = [("image", wire.image_bytes(image))]
        [item] = self.send_form("/v1/masks", asked, files)["data"]
        return ScoredMask(base64.b64decode(item["b64_json"]), item["score"])
