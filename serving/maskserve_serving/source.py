"""Resolution of `--model` to a local folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_engine.checkpoints.request import CheckpointRequest
from maskserve_engine.families.specs import DENSE_ONLY, load_spec
from maskserve_engine.spec.model_index import read_model_index
from maskserve_serving.checkpoint import (
    CheckpointParts,
    describe,
    folder_of,
    is_checkpoint,
    name_of,
)
from maskserve_serving.errors import ServeError
from maskserve_serving.files import checked, read_tables, with_values
from maskserve_workflows.nodes import NODE_FILES

# "owner/name". A path begins with a dot or slash, or exists.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Fetch = Callable[..., str]
_NO_PARTS = CheckpointParts()
_SERVED_FILES = ["*.json", "*.toml", "*/*"]
"""Files of a hub model: its folders, and files other than weights beside them. FLUX.1's folders
have a second copy of the weights there, in one file."""
_NODE = ["*.json", "*.txt", "*.safetensors"]
"""Files of a node's model in transformers' form, and no other forms of weights; of a model with a
form of its own all are fetched."""
_TRANSFORMER = ["transformer/*.safetensors"]
"""Files that a GGUF file replaces."""


def from_hub(model: str, **options: Any) -> str:
    """Return the folder of a hub model, downloaded if necessary."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, **options))


def with_model(
    tables: dict[str, Any],
    model: str,
    files: list[str] | None = None,
    fetch: Fetch = from_hub,
    parts: CheckpointParts = _NO_PARTS,
) -> dict[str, Any]:
    """Return tables with the local folder of `model`, at the revision that they name.

    Args:
        tables: configuration tables.
        model: folder, hub id or checkpoint file.
        files: patterns of a hub model's files to fetch; None: all that serving needs.
        fetch: huggingface_hub's `snapshot_download`, or a stand-in.
        parts: what stands beside a checkpoint file.

    Raises:
        ServeError: there is no such model, or it is not supported.
    """
    model_table = tables.get("model", {})
    if is_checkpoint(model):
        file = Path(model).expanduser()
        folder = _checkpoint_folder(file, parts, files, fetch)
        name = model_table.get("name") or name_of(file)
        return with_values(tables, "model", path=str(_served(folder)), name=name)
    if parts:
        raise ServeError(
            f"--base, --text-encoder, --vae: stand beside a checkpoint file; {model} is none"
        )
    without = _TRANSFORMER if model_table.get("gguf") else []
    folder = resolve_model(model, str(model_table.get("revision", "")), files, without, fetch)
    if files is None:
        stages = tables.get("stages", {}).get("service")
        for sentence in parts_without_weights(folder, gguf=bool(without), stages=bool(stages)):
            raise ServeError(sentence)
    tables = with_values(tables, "model", path=str(folder))
    if not Path(model).exists() and not tables["model"].get("name"):
        # A downloaded model's folder is named after its revision; clients know the hub id.
        tables = with_values(tables, "model", name=model.split("/")[-1])
    return tables


_MODELS = ("transformer", "unet", "vae", "text_encoder")
"""How the names of parts with weights begin."""
_DENOISERS = ("transformer", "unet")
_ANY_WEIGHTS = ("*.safetensors", "*.bin")


def parts_without_weights(folder: Path, *, gguf: bool = False, stages: bool = False) -> list[str]:
    """Return a sentence for each part of a model folder that has no weights.

    Args:
        folder: folder in diffusers format.
        gguf: whether a GGUF file has the transformer's.
        stages: whether a service has the text encoders and the VAE.
    """
    return [
        f"--model: {folder} has no weights of its {name} ({value[-1]}); use a folder that has all "
        "parts, as diffusers saves it"
        for name, value in read_model_index(folder).items()
        if name.startswith(_MODELS) and isinstance(value, list) and value[0]
        if not (gguf and name == "transformer") and not (stages and name not in _DENOISERS)
        if not any(any((folder / name).glob(files)) for files in _ANY_WEIGHTS)
    ]


def with_model_cache(tables: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """Return tables with the cache off if the model supports none and they do not set it.

    Args:
        tables: tables with the model's folder.
        report: receives a line about it.
    """
    model = tables["model"]
    spec = load_spec(model["path"], model.get("native_resolution", 0))
    if spec.caches or "enabled" in tables.get("cache", {}):
        return tables
    report(f"[cache] enabled is false: {DENSE_ONLY}")
    return with_values(tables, "cache", enabled=False)


def node_tables(file: Path) -> dict[str, Any]:
    """Return the tables of a node server's configuration file, in which a relative path of
    `[nodes]` begins at the file's folder.
    """
    tables, base = read_tables(file), file.absolute().parent
    nodes = checked(tables).nodes

    def located(name: str) -> str:
        path = base / Path(name).expanduser()
        return name if _HUB_ID.fullmatch(name) and not path.exists() else str(path)

    files = {"verify_key_file": nodes.verify_key_file, **nodes.folders()}
    paths = {key: located(name) for key, name in files.items() if name}
    return with_values(tables, "nodes", **paths, path=[str(base / x) for x in nodes.path])


def node_path(file: Path | None) -> list[str]:
    """Return the folders in `[nodes] path` of a node server's configuration file."""
    folders: list[str] = [] if file is None else node_tables(file)["nodes"]["path"]
    return folders


def with_node_folders(
    tables: dict[str, Any], nodes: Mapping[str, str], file: object, fetch: Fetch = from_hub
) -> dict[str, Any]:
    """Return tables with the local folders of a node server's models.

    Args:
        tables: configuration tables.
        nodes: key of `[nodes]` -> folder or hub id.
        file: configuration file, for errors.
        fetch: as in `with_model`.

    Raises:
        ServeError: there is no such model.
    """
    whole = {}
    for key, model in nodes.items():
        files = _NODE if any(known.kinds for known in NODE_FILES.classes(key)) else ["*"]
        folder = _local(model, f"{file}: nodes.{key}", None, files, (), fetch)
        whole[key] = str(folder.absolute())
    return with_values(tables, "nodes", **whole)


def resolve_model(
    model: str,
    revision: str = "",
    files: list[str] | None = None,
    without: Sequence[str] = (),
    fetch: Fetch = from_hub,
) -> Path:
    """Return the local folder of a path or hub id; a hub model is downloaded if necessary.

    Args:
        model: path or hub id.
        revision: revision of a hub model; empty: the default branch.
        files: as in `with_model`.
        without: patterns of files not to fetch.
        fetch: as in `with_model`.

    Raises:
        ServeError: there is no such model, or it is not supported.
    """
    return _served(
        _local(model, "--model", revision or None, files or _SERVED_FILES, without, fetch)
    )


def _served(folder: Path) -> Path:
    """Return a model folder in full.

    Raises:
        ServeError: it is not served.
    """
    try:
        load_spec(folder)
    except ConfigError as error:
        raise ServeError(f"--model: {str(error).removeprefix('[model] path: ')}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ServeError(
            f"--model: {folder} is a damaged model folder ({type(error).__name__}: {error})"
        ) from error
    return folder.resolve()


def _checkpoint_folder(
    file: Path, parts: CheckpointParts, files: list[str] | None, fetch: Fetch
) -> Path:
    """Return the folder of a checkpoint file; arguments are those of `with_model`."""
    base, without = parts.base, [*_TRANSFORMER, "unet/*.safetensors"]
    if not Path(base).is_dir() or not base:  # the base is fetched: only what the file lacks
        description = describe(file)
        base = base or description.base
        if not base:
            raise ServeError(
                f"--model: {file} is a checkpoint of several models, by its tensors' names; name "
                "the model's folder or hub id with --base"
            )
        if parts.vae or description.vae:
            without.append("vae/*.safetensors")
    folder = _local(base, "--base", None, files or _SERVED_FILES, without, fetch)
    return folder_of(checkpoint_request(file, folder, parts, files, fetch), parts)


def checkpoint_request(
    file: Path,
    folder: Path,
    parts: CheckpointParts,
    files: list[str] | None = None,
    fetch: Fetch = from_hub,
) -> CheckpointRequest:
    """Return a checkpoint file with its base folder and the parts beside it on this host; other
    arguments are those of `with_model`.
    """
    return CheckpointRequest(
        str(file.absolute()),
        str(folder.absolute()),
        tuple(_part(name, "--text-encoder", files, fetch) for name in parts.text_encoders),
        _part(parts.vae, "--vae", files, fetch) if parts.vae else "",
        weights=files is None,
    )


def _part(name: str, key: str, files: list[str] | None, fetch: Fetch) -> str:
    """Return the folder or file of a part."""
    path = Path(name).expanduser()
    if not path.is_file():
        path = _local(name, key, None, files or _NODE, (), fetch)
    return str(path.absolute())


def _local(
    model: str,
    key: str,
    revision: str | None,
    files: Sequence[str],
    without: Sequence[str],
    fetch: Fetch,
) -> Path:
    """Return the folder itself, or that of a hub model; errors name `key`."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(model) is None:
        raise ServeError(f"{key}: there is no folder {model}")
    try:
        return Path(
            fetch(
                model,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(without),
            )
        )
    except ImportError:
        raise ServeError(
            f"{key}: there is no folder {model}, and huggingface_hub is not installed"
        ) from None
    except Exception as error:
        # The hub client raises its own and its transports' errors; the first line is enough.
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ServeError(
            f"{key}: there is no folder {model}, and the hub did not give it: {why}"
        ) from error
