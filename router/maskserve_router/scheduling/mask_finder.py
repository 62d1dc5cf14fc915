"""Makes masks on a node server, from the name of a thing or from clicks and a box."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import structs

from maskserve_common.contracts.settings import MaskFrom, dump_settings, parse_settings
from maskserve_common.errors import InvalidRequest, split_code
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.failures import Failure
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.workers.node_pool import NodePool, hosts
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task

FIELD = "SETTINGS.mask_from"


@dataclass(frozen=True, slots=True)
class FoundMask:
    """A mask from a segmenter."""

    mask: bytes
    """A PNG, white where the thing is."""
    score: float | None
    """The model's score of the mask; None: the model gives none."""


class MaskFinder:
    """Finds masks. Use it from the event loop only.

    Args:
        nodes: the node servers.
        fair_share: threads that read and write requests off the loop.
    """

    def __init__(self, nodes: NodePool, fair_share: FairShare) -> None:
        self._nodes, self._fair_share = nodes, fair_share

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
        kind = NODE_TYPES["find" if prompt.text else "segment"]
        if not hosts(kind.model, await self._nodes.records(client)):
            selector = "a thing's name" if prompt.text else "clicks and boxes"
            raise InvalidRequest(field, f"no segmenter that takes {selector} is served", "a mask")
        try:
            answer = await self._nodes.call(_task(kind, image, prompt), client)
        except Failure as failure:
            if failure.code != InvalidRequest.code:
                raise
            raise InvalidRequest(field, split_code(failure.details)[1]) from None
        verdict = answer.outputs.get("verdict")
        return FoundMask(answer.outputs["mask"], None if verdict is None else verdict.score)

    async def filled_in(self, message: ModelRequest, client: KeyHolder) -> None:
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
        image = await self._fair_share.run(client, message.size, message.read, "IMAGE")
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


def _task(kind: NodeType, image: bytes, prompt: MaskFrom) -> Task:
    settings = {} if prompt.text else {"points": prompt.points, "box": prompt.box}
    node_settings = {name: value for name, value in msgspec.to_builtins(settings).items() if value}
    inputs = {"picture": image, **({"name": prompt.text} if prompt.text else {})}
    return Task(kind.name, NodeCall(id=kind.name, node=kind.name, settings=node_settings), inputs)
