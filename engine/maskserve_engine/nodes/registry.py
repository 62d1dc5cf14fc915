"""Who runs the nodes of a model. Libraries are imported with the first model that needs them: a
node server that only composes pictures has no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from maskserve_core.config import Config
from maskserve_core.workflows.asked import Nodes


def open_nodes(name: str, config: Config) -> Nodes:
    """The nodes of a model of `[nodes]`, loaded.

    Raises:
        KeyError: there is no such model.
        OSError: its folder is none of its class.
    """
    match name:
        case "find" if config.nodes.segment and _is_grounded(config.nodes.find):
            from maskserve_engine.nodes.grounded import GroundedNodes

            return GroundedNodes(config)
        case "find":
            from maskserve_engine.nodes.find import FindNodes

            return FindNodes(config)
        case "enlarge":
            from maskserve_engine.nodes.enlarge import EnlargeNodes

            return EnlargeNodes(config)
        case "likeness":
            from maskserve_engine.nodes.likeness import LikenessNodes

            return LikenessNodes(config)
        case "segment":
            from maskserve_engine.nodes.segment import SegmentNodes

            return SegmentNodes(config)
        case "verify":
            from maskserve_engine.nodes.verify import VerifyNodes

            return VerifyNodes(config)
    raise KeyError(name)


def thread_of(config: Config) -> None:
    """What a thread does before it runs such nodes."""
    from maskserve_engine.stages.cpu_threads import limit_threads

    limit_threads(config)


def _is_grounded(folder: str) -> bool:
    """Whether a folder that finds things has a GroundingDINO."""
    told = json.loads((Path(folder) / "config.json").read_bytes())
    return bool(told.get("model_type") == "grounding-dino")
