"""Opens the nodes of a model. Libraries are imported with the first model that needs them: a node
server that only composes pictures has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maskserve_common.config import Config
from maskserve_workflows.node_request import Nodes


def open_nodes(kind: str, config: Config, loaded: Mapping[str, Any]) -> Nodes:
    """Load the nodes of a model of `[nodes]`; see `OpenNodes`.

    Raises:
        KeyError: there is no such class.
        OSError: its folder is not of that class.
    """
    match kind:
        case "grounding-dino":
            from maskserve_engine.nodes.grounded import GroundedNodes

            return GroundedNodes(config, loaded)
        case "clipseg":
            from maskserve_engine.nodes.find import FindNodes

            return FindNodes(config)
        case "swin2sr":
            from maskserve_engine.nodes.enlarge import EnlargeNodes

            return EnlargeNodes(config)
        case "clip":
            from maskserve_engine.nodes.likeness import LikenessNodes

            return LikenessNodes(config)
        case "sam" | "sam2" | "sam2_video":
            from maskserve_engine.nodes.segment import SegmentNodes

            return SegmentNodes(config)
        case "verify":
            from maskserve_engine.nodes.verify import VerifyNodes

            return VerifyNodes(config)
    raise KeyError(kind)


def thread_of(config: Config) -> None:
    """Prepare a thread that runs such nodes."""
    from maskserve_engine.stages.cpu_threads import limit_threads

    limit_threads(config)
