"""The folders of a node server's models: their classes, and the folders that calls need."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from maskserve_common.config import ConfigError, NodesConfig, is_url
from maskserve_common.config_file import read_json
from maskserve_common.files.digests import file_digest
from maskserve_common.reading import nearest
from maskserve_workflows.node_types import NodeModel
from maskserve_workflows.nodes import NODE_FILES


def revision_of(model: NodeModel, source: str = "") -> str:
    """Return a digest of a model's code and folder; models with equal ones give equal answers."""
    digest, folder = hashlib.blake2b(Path(model.file).read_bytes(), digest_size=16), Path(source)
    files = sorted(x.relative_to(folder) for x in folder.rglob("*") if x.is_file() and source)
    for file in files:
        if not any(part.startswith(".") for part in file.parts):  # notes of the hub, and digests
            digest.update(f"{file}:{file_digest(folder, str(file))};".encode())
    return digest.hexdigest()


class NodeFolder(NamedTuple):
    """A model's folder."""

    name: str
    model: NodeModel
    nbytes: int
    """Bytes of its weight files."""

    @property
    def version(self) -> str:
        """Version for `ResourceCache`: a name has one version while its server runs."""
        return self.name

    @classmethod
    def of(cls, name: str, path: Path) -> NodeFolder:
        """Return a model's folder. Raises ConfigError: no class of the model accepts it."""
        by_kind = {kind: model for model in NODE_FILES.classes(name) for kind in model.kinds}
        if by_kind:
            kind = read_json(path / "config.json", f"nodes.{name}").get("model_type")
            if kind not in by_kind:
                accepted = ", ".join(by_kind)
                raise ConfigError(f"nodes.{name}: {path} is a {kind}; accepted: {accepted}")
            model = by_kind[kind]
        elif path.is_dir():
            [model] = NODE_FILES.classes(name)
        else:
            raise ConfigError(f"nodes.{name}: {path} is not a folder; accepted: a folder")
        weights = list(path.glob("*.safetensors")) or [x for x in path.rglob("*") if x.is_file()]
        return cls(name, model, sum(file.stat().st_size for file in weights))


def check_names(nodes: NodesConfig) -> None:
    """Raise ConfigError if a key of `[nodes]` names no model."""
    sources = {model.source for model in NODE_FILES.models if model.source}
    known = sorted({*nodes.__struct_fields__, *sources})
    for name in nodes.models:
        if name not in sources:
            problem = f"is not a known key{nearest(name, known)}"
            raise ConfigError(f"[nodes] {name}: {problem}; accepted: {', '.join(known)}")


def check_worker_names(nodes: NodesConfig) -> None:
    """Raise ConfigError if a key of a worker's `[nodes]` names no model of the files in `path`;
    the worker itself uses none of them.
    """
    if nodes.models:
        NODE_FILES.read(nodes.path)
        check_names(nodes)


def light_models(nodes: NodesConfig) -> dict[str, NodeModel]:
    """Return the models without a folder that a node server runs, by name: those that need nothing
    in `[nodes]`, and those at a URL.
    """
    return {
        model.name: model
        for model in NODE_FILES.models
        if not model.source or is_url(nodes.source(model.source))
    }


def node_folders(nodes: NodesConfig) -> dict[str, tuple[NodeFolder, ...]]:
    """Return model -> folders whose weights its calls need, the model's own first.

    `find` with GroundingDINO also needs `segment`, which cuts out the boxes that it finds.

    Raises:
        ConfigError: a key is unknown, a folder has another class, or a needed one is missing.
    """
    check_names(nodes)
    folders = {name: NodeFolder.of(name, Path(path)) for name, path in nodes.folders().items()}
    needed = {}
    for name, folder in folders.items():
        for other in folder.model.needs:
            if other not in folders:
                accepted = ", ".join(x for model in NODE_FILES.classes(other) for x in model.kinds)
                kind = next(iter(folder.model.kinds), name)
                raise ConfigError(
                    f"nodes.{name}: a {kind} needs nodes.{other}; accepted: {accepted}"
                )
        needed[name] = (folder, *(folders[other] for other in folder.model.needs))
    return needed
