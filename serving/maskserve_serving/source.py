"""Which model folder is served."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_engine.families.specs import DENSE_ONLY, load_facts
from maskserve_serving.errors import ServeError
from maskserve_serving.files import with_values

# "owner/name"; a path is written with a dot or slash in front, or exists.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Fetch = Callable[..., str]
_SERVED = ["*.json", "*.toml", "*/*"]
"""Of a hub model: folders, and beside them what is no weights. FLUX.1's have the same weights once
more there, in one file."""
_NODE = ["*.json", "*.txt", "*.safetensors"]
"""Of a node's model: what transformers reads, and no weights in other forms."""
_TRANSFORMER = ["transformer/*.safetensors"]
"""What a GGUF file takes the place of."""


def from_hub(model: str, **wanted: Any) -> str:
    """The folder of a hub model, downloaded, or found downloaded."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, **wanted))


def with_model(
    tables: dict[str, Any],
    model: str,
    files: list[str] | None = None,
    fetch: Fetch = from_hub,
) -> dict[str, Any]:
    """Configuration tables that name the local folder of `model`, at the revision they ask for.

    Args:
        tables: of the configuration.
        model: folder or hub id.
        files: patterns of those that are wanted of a hub model; None: all that is served.
        fetch: huggingface_hub's `snapshot_download`, or what stands for it.

    Raises:
        ServeError: there is no such model, or it is none that is served.
    """
    model_table = tables.get("model", {})
    without = _TRANSFORMER if model_table.get("gguf") else []
    folder = resolve_model(model, str(model_table.get("revision", "")), files, without, fetch)
    tables = with_values(tables, "model", path=str(folder))
    if not Path(model).exists() and not tables["model"].get("name"):
        # A downloaded model's folder is named after its revision; clients know the hub id.
        tables = with_values(tables, "model", name=model.split("/")[-1])
    return tables


def with_its_cache(tables: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Configuration tables without a cache where the model has none, unless they ask for one.

    Args:
        tables: that name the model's folder.
        say: told of it.
    """
    model = tables["model"]
    facts = load_facts(model["path"], model.get("native_resolution", 0))
    if facts.caches or "enabled" in tables.get("cache", {}):
        return tables
    say(f"[cache] enabled is false: {DENSE_ONLY}")
    return with_values(tables, "cache", enabled=False)


def with_node_folders(
    tables: dict[str, Any], nodes: Mapping[str, str], file: object, fetch: Fetch = from_hub
) -> dict[str, Any]:
    """Configuration tables that name the local folders of a node server's models.

    Args:
        tables: of the configuration.
        nodes: folder or hub id by key of `[nodes]`.
        file: that they are read from.
        fetch: as `with_model`.

    Raises:
        ServeError: there is no such model.
    """
    whole = {
        key: str(_local(model, f"{file}: nodes.{key}", None, _NODE, (), fetch).absolute())
        for key, model in nodes.items()
    }
    return with_values(tables, "nodes", **whole)


def resolve_model(
    model: str,
    revision: str = "",
    files: list[str] | None = None,
    without: Sequence[str] = (),
    fetch: Fetch = from_hub,
) -> Path:
    """The local folder of a path or hub id; a hub model is downloaded, or found downloaded.

    Args:
        model: path or hub id.
        revision: of a hub model; empty: the default branch.
        files: as `with_model`.
        without: patterns of those that are not wanted.
        fetch: as `with_model`.

    Raises:
        ServeError: there is no such model, or it is none that is served.
    """
    folder = _local(model, "--model", revision or None, files or _SERVED, without, fetch)
    try:
        load_facts(folder)
    except ConfigError as error:
        raise ServeError(f"--model: {str(error).removeprefix('[model] path: ')}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ServeError(
            f"--model: {folder} is a damaged model folder ({type(error).__name__}: {error})"
        ) from error
    return folder.resolve()


def _local(
    model: str,
    key: str,
    revision: str | None,
    files: Sequence[str],
    without: Sequence[str],
    fetch: Fetch,
) -> Path:
    """The folder itself, or that of a hub model; the errors name the key that asks for it."""
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
        # The hub client raises its own and its transports' errors; the first line says enough.
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ServeError(
            f"{key}: there is no folder {model}, and the hub did not give it: {why}"
        ) from error
