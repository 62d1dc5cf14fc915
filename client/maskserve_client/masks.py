"""`/v1/masks` of a router: masks found by name or clicks."""

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
    """The model's score of the mask, from 0 to 1; None: the model gives none."""


class Masks(RouterHttp):
    """Masks of things, found by a router's node servers.

    found = Masks("http://localhost:8080").find("street.jpg", points=[[420, 310, 1]])
    open("mask.png", "wb").write(found.mask)
    """

    def find(self, image: ImageInput, **prompt: Any) -> ScoredMask:
        """Find the mask of a thing.

        Args:
            image: the picture.
            prompt: fields of the setting `mask_from`: `text`, or `points` and `box`.

        Raises:
            InvalidRequest: nothing is found, or no server has such a model.
            MaskserveError: the server's other errors, or ServerUnavailable.
            OSError: a path cannot be read.
        """
        files = [("image", wire.image_bytes(image))]
        [item] = self.send_form("/v1/masks", prompt, files)["data"]
        return ScoredMask(base64.b64decode(item["b64_json"]), item["score"])
