"""The configuration file of a worker or router: TOML.

An unknown key or a value out of range is a ConfigError that names it. A model folder may carry a
`maskserve.toml` with its own `[model]` defaults: the file named by MASKSERVE_CONFIG wins over it
key by key.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from maskserve_common.config import Config, ConfigError, NodesConfig
from maskserve_common.reading import Misread, Table, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", bound=Table)


def load_config(path: str | os.PathLike[str] | None = None) -> Config:
    """Return the configuration of this process.

    Args:
        path: TOML file; `None` reads MASKSERVE_CONFIG, and without that the defaults.

    Raises:
        ConfigError: naming the file and key.
    """
    path = path if path is not None else os.environ.get("MASKSERVE_CONFIG")
    return config_of(read_toml(Path(path)) if path else {})


def config_of(values: Mapping[str, Any]) -> Config:
    """The configuration that these tables of a TOML file make, over the model folder's defaults.

    Raises:
        ConfigError: naming the key.
    """
    model = values.get("model", {})
    model_path = model.get("path", "") if isinstance(model, dict) else ""
    if model_path and isinstance(model_path, str):
        defaults = Path(model_path) / "maskserve.toml"
        if defaults.is_file():
            values = laid_over(read_toml(defaults), values)
    return read_tables(_with_node_models(values), Config)


def _with_node_models(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables with the models that `[nodes]` names by keys of their own in its `models`.

    Only who reads node files knows the names (`node_folders.check_names`).
    """
    nodes = values.get("nodes")
    if not isinstance(nodes, dict) or not isinstance(nodes.get("models", {}), dict):
        return values
    names = {
        key: source
        for key, source in nodes.items()
        if key not in NodesConfig.__struct_fields__ and isinstance(source, str)
    }
    fixed_keys = {key: value for key, value in nodes.items() if key not in names}
    return {**values, "nodes": {**fixed_keys, "models": {**nodes.get("models", {}), **names}}}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def read_tables(values: Mapping[str, Any], kind: type[T]) -> T:
    """A configuration of that kind.

    Raises:
        ConfigError: naming the key, as `[limits] max_steps`.
    """
    try:
        return read(values, kind)
    except Misread as error:
        table, _, key = error.path.rpartition(".")
        where = f"[{table}] {key}" if table else key
        raise ConfigError(f"{where}: {error.problem}; accepted: {error.accepted}") from error


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of both; where both have a key, that of `above`."""
    tables = dict(below)
    for name, value in above.items():
        base_value = tables.get(name)
        if isinstance(base_value, dict) and isinstance(value, dict):
            value = {**base_value, **value}
        tables[name] = value
    return tables


def read_json(path: Path, setting: str = "[model] path") -> dict[str, Any]:
    """A JSON object of a model folder, which a setting names; ConfigError if it is none."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} is not valid JSON") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{setting}: {path} is not a JSON object")
    return loaded
