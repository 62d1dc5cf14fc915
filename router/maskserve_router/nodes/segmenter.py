"""Masks from the segmenters of the node servers."""

from __future__ import annotations

import msgspec

from maskserve_common.contracts.settings import MaskFrom
from maskserve_router.key_holder import KeyHolder
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.scheduling.mask_finder import FoundMask
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task


async def segment(
    nodes: NodePool, image: bytes, prompt: MaskFrom, client: KeyHolder
) -> FoundMask | None:
    """Return the mask of a thing in a picture (`mask_finder.Segment`).

    Args:
        nodes: the node servers.
        image: the picture's file.
        prompt: name, points or box of the thing.
        client: holder of the key that asks, for fair share.

    Raises:
        Failure: the segmenter's own error.
        EngineFailed: its server was lost or is silent.
    """
    kind = NODE_TYPES["find" if prompt.text else "segment"]
    if not await nodes.serves(kind.model):
        return None
    answer = await nodes.call(_task(kind, image, prompt), client)
    verdict = answer.outputs.get("verdict")
    return FoundMask(answer.outputs["mask"], None if verdict is None else verdict.score)


def _task(kind: NodeType, image: bytes, prompt: MaskFrom) -> Task:
    settings = {} if prompt.text else {"points": prompt.points, "box": prompt.box}
    node_settings = {name: value for name, value in msgspec.to_builtins(settings).items() if value}
    inputs = {"picture": image, **({"name": prompt.text} if prompt.text else {})}
    return Task(kind.name, NodeCall(id=kind.name, node=kind.name, settings=node_settings), inputs)
