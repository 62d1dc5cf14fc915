"""All node types, as a definition imports them.

`edit`, `generate` and `encode` run on workers. The others come from node files: those of
`maskserve_engine/nodes`, and those that an operator adds (`--node-path`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from maskserve_common.contracts.settings import EditSettings
from maskserve_workflows.node_files import NodeFiles
from maskserve_workflows.node_types import EDIT, NodeType, node
from maskserve_workflows.ports import Encoding, Encodings, Mask, Picture, Pictures, Words

if TYPE_CHECKING:
    from maskserve_engine.nodes.enlarge import enlarge as enlarge
    from maskserve_engine.nodes.find import find as find
    from maskserve_engine.nodes.find import shows as shows
    from maskserve_engine.nodes.likeness import resembles as resembles
    from maskserve_engine.nodes.pictures import best as best
    from maskserve_engine.nodes.pictures import compose as compose
    from maskserve_engine.nodes.pictures import crop as crop
    from maskserve_engine.nodes.pictures import invert as invert
    from maskserve_engine.nodes.pictures import outline as outline
    from maskserve_engine.nodes.pictures import pad as pad
    from maskserve_engine.nodes.pictures import paste as paste
    from maskserve_engine.nodes.pictures import split as split
    from maskserve_engine.nodes.segment import segment as segment
    from maskserve_engine.nodes.verify import agrees as agrees

BUILT_IN: Final = Path(__file__).parents[1] / "maskserve_engine" / "nodes"


@node(model=EDIT, price_s=1.0, deterministic=False, settings=EditSettings)
def edit(
    image: Picture,
    mask: Mask | None,
    prompt: Words | str,
    control: Picture | None = None,
    references: Pictures | Sequence[Picture] | None = None,
    encodings: Encodings | Sequence[Encoding] | None = None,
    **settings: Any,
) -> Picture:
    """Repaint the picture where the mask is white, or without a mask edit all of it as the prompt
    says; models with references see further pictures. Settings are those of an edit; without a
    `seed` each call draws one.
    """
    raise NotImplementedError


@node(model=EDIT, price_s=1.0, deterministic=False, settings=EditSettings)
def generate(prompt: Words | str, control: Picture | None = None, **settings: Any) -> Picture:
    """Make a picture from the prompt alone. Settings are those of an edit, such as `size`; without
    a `seed` each call draws one.
    """
    raise NotImplementedError


@node(model=EDIT, price_s=0.1, settings=EditSettings)
def encode(
    image: Picture | None,
    mask: Mask | None,
    prompt: Words | str | None = None,
    references: Pictures | Sequence[Picture] | None = None,
    **settings: Any,
) -> Encoding:
    """Encode a picture, its prompt and references, as far as there are any, for several edits. The
    pass `encode` adds it.
    """
    raise NotImplementedError


NODE_FILES: Final = NodeFiles(edit, generate, encode)
"""The node files of this process."""
NODE_TYPES: Final[Mapping[str, NodeType]] = NODE_FILES.types
"""All node types, by name."""
if _problems := NODE_FILES.read([BUILT_IN]):
    raise ImportError("; ".join(_problems))


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of a node that a file declares."""
    if name not in NODE_FILES.functions:
        raise AttributeError(f"there is no node {name!r}")
    return NODE_FILES.functions[name]
