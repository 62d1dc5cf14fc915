"""The one configuration file: TOML, named by MASKSERVE_CONFIG.

An unknown key or a value out of range is a ConfigError that names it. A model folder may carry a
`maskserve.toml` with its own `[model]` defaults: the file named by MASKSERVE_CONFIG wins over it
key by key.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from maskserve_core.config import Config, ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _checked(where: str, spec: Any, value: Any) -> Any:
    expected = type(spec.default)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not expected:
        raise ConfigError(f"{where}: {value!r} is not a {expected.__name__}")
    meta = spec.metadata
    if meta["of"] is not None and value not in meta["of"]:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(meta['of'])}")
    if meta["low"] is not None and not meta["low"] <= value <= meta["high"]:
        raise ConfigError(f"{where}: {value} is not in {meta['low']} to {meta['high']}")
    if meta["form"] and value and re.fullmatch(meta["form"], value) is None:
        raise ConfigError(f"{where}: {value!r} is not of the form {meta['form']}")
    return value


def _section(current: Any, name: str, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"[{name}] is not a table")
    specs = {f.name: f for f in fields(current)}
    unknown = sorted(set(values) - set(specs))
    if unknown:
        raise ConfigError(f"[{name}] has no key {unknown[0]!r}; it has {', '.join(specs)}")
    return replace(
        current, **{k: _checked(f"[{name}] {k}", specs[k], v) for k, v in values.items()}
    )


def apply(config: Config, values: dict[str, Any]) -> Config:
    """`config` with the tables of a parsed TOML file laid over it."""
    specs = {f.name: f for f in fields(Config)}
    for name, value in values.items():
        if name not in specs:
            raise ConfigError(f"unknown table or key {name!r}; known: {', '.join(specs)}")
        held = getattr(config, name)
        if is_dataclass(held):
            config = replace(config, **{name: _section(held, name, value)})
        else:
            config = replace(config, **{name: _checked(name, specs[name], value)})
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def load_config(path: str | os.PathLike[str] | None = None) -> Config:
    """The configuration of this process.

    Args:
        path: a TOML file; `None` reads MASKSERVE_CONFIG, and without that uses the defaults.

    Raises:
        ConfigError: naming the file and key.
    """
    path = path if path is not None else os.environ.get("MASKSERVE_CONFIG")
    return config_of(_read_toml(Path(path)) if path else {})


def config_of(values: dict[str, Any]) -> Config:
    """The configuration that these tables of a TOML file make, over the model folder's defaults.

    Raises:
        ConfigError: naming the key.
    """
    config = Config()
    model = values.get("model", {})
    model_path = model.get("path", "") if isinstance(model, dict) else ""
    if model_path and isinstance(model_path, str):
        defaults = Path(model_path) / "maskserve.toml"
        if defaults.is_file():
            config = apply(config, _read_toml(defaults))
    return apply(config, values)
