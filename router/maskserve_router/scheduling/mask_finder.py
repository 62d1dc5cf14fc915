"""Makes masks on a node server, from the name of a thing or from clicks and a box."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from maskserve_common.contracts.settings import MaskFrom, dump_settings, parse_settings
from maskserve_common.errors import InvalidRequest, split_code
from maskserve_common.servers.failure import Failure
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.model_request import ModelRequest

FIELD = "SETTINGS.mask_from"


@dataclass(frozen=True, slots=True)
class FoundMask:
    """A mask from a segmenter."""

    mask: bytes
    """A PNG, white where the thing is."""
    score: float | None
    """The model's score of the mask; None: the model gives none."""


Segment: TypeAlias = Callable[[bytes, MaskFrom, KeyHolder], Awaitable[FoundMask | None]]
"""Returns the mask of a thing in a picture; None: no segmenter of that kind is served."""


async def no_segmenter(image: bytes, prompt: MaskFrom, client: KeyHolder) -> None:
    """Find nothing: the router has no node servers."""


class MaskFinder:
    """Finds masks. Use it from the event loop only.

    Args:
        segment: calls a segmenter.
        fair_share: threads that read and write requests off the loop.
    """

    def __init__(self, segment: Segment, fair_share: FairShare) -> None:
        self._segment, self._fair_share = segment, fair_share

    async def find(
        self, image: bytes, prompt: MaskFrom, client: KeyHolder, field: str = FIELD
    ) -> FoundMask:
        """Return the mask of a thing in a picture.

        Args:
            image: the picture's file.
            prompt: name, points or box of the thing.
            client: holder of the key that asks, for fair share.
            field: field of the request for errors; empty: `text`, `points` or `box`.

        Raises:
            InvalidRequest: nothing is found, or no segmenter of that kind is served.
            EngineFailed: its server was lost.
        """
        prompt.check(field)
        field = field or ("text" if prompt.text else "points" if prompt.points else "box")
        try:
            found_mask = await self._segment(image, prompt, client)
        except Failure as failure:
            if failure.code != InvalidRequest.code:
                raise
            raise InvalidRequest(field, split_code(failure.details)[1]) from None
        if found_mask is None:
            selector = "a thing's name" if prompt.text else "clicks and boxes"
            raise InvalidRequest(field, f"no segmenter that takes {selector} is served", "a mask")
        return found_mask

    async def fill_in_mask(self, message: ModelRequest, client: KeyHolder) -> None:
        """Write the mask into an edit whose settings have `mask_from`.

        Args:
            message: the checked request; it is modified.
            client: holder of the key that sent it.

        Raises:
            InvalidRequest: the edit has a MASK too, or `find` raises it.
        """
        try:
            raw = message.read("SETTINGS")
        except LookupError:
            return
        if b"mask_from" not in raw:
            return
        settings = parse_settings(raw)
        if settings.mask_from is None:
            return
        image = await self._fair_share.run(client, message.size, _source, message)
        if message.view("MASK"):
            raise InvalidRequest(
                FIELD, "cannot be combined with MASK", "one of them; MASK may be empty"
            )
        if not image:
            raise InvalidRequest(FIELD, "is given without IMAGE", "the picture itself")
        if settings.mask_mode not in ("auto", "white"):
            problem = f"is {settings.mask_mode}, which cannot be combined with mask_from"
            raise InvalidRequest("SETTINGS.mask_mode", problem, "white")
        found_mask = await self.find(image, settings.mask_from, client)
        message.write("MASK", found_mask.mask)
        mask_settings = structs.replace(settings, mask_from=None, mask_mode="white")
        message.write("SETTINGS", dump_settings(mask_settings))


def _source(message: ModelRequest) -> bytes:
    return bytes(message.first("IMAGE"))
