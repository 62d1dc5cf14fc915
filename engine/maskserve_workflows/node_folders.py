"""The folders of a node server's models: their classes, and the folders that calls need."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from maskserve_common.config import ConfigError, NodesConfig
from maskserve_common.config_file import read_json

_GROUNDED: Final = "grounding-dino"
_ACCEPTED: Final = MappingProxyType(
    {
        "find": ("clipseg", _GROUNDED),
        "segment": ("sam", "sam2", "sam2_video"),
        "enlarge": ("swin2sr",),
        "likeness": ("clip",),
    }
)
"""Model -> accepted `model_type`s. Published SAM 2 folders are for videos; only the part for
pictures is read."""


class NodeFolder(NamedTuple):
    """A model's folder in the form of transformers."""

    name: str
    kind: str
    """`model_type` of its config.json."""
    nbytes: int
    """Bytes of its weight files."""

    @property
    def version(self) -> str:
        """Version for `ResourceCache`: a name has one version while its server runs."""
        return self.name

    @classmethod
    def of(cls, name: str, path: Path) -> NodeFolder:
        """Return the folder's facts. Raises ConfigError: the model does not accept its class."""
        kind = read_json(path / "config.json", f"nodes.{name}").get("model_type")
        accepted = _ACCEPTED[name]
        if kind not in accepted:
            raise ConfigError(f"nodes.{name}: {path} is a {kind}; accepted: {', '.join(accepted)}")
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return cls(name, kind, nbytes)


def node_folders(nodes: NodesConfig) -> dict[str, tuple[NodeFolder, ...]]:
    """Return model -> folders whose weights its calls need, the model's own first.

    `find` with GroundingDINO also needs `segment`, which cuts out the boxes that it finds.

    Raises:
        ConfigError: a folder has another class, or a needed one is missing.
    """
    folders = {name: NodeFolder.of(name, Path(path)) for name, path in nodes.folders().items()}
    needed: dict[str, tuple[NodeFolder, ...]] = {
        name: (folder,) for name, folder in folders.items()
    }
    if "find" in folders and folders["find"].kind == _GROUNDED:
        if "segment" not in folders:
            accepted = ", ".join(_ACCEPTED["segment"])
            raise ConfigError(
                f"nodes.find: a {_GROUNDED} needs nodes.segment; accepted: {accepted}"
            )
        needed["find"] += (folders["segment"],)
    return needed
