"""The operator's own check of requests and answers."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias, cast

from PIL import Image

from maskserve_common.config import Config, ConfigError
from maskserve_common.errors import EngineFailed, Refused

log = logging.getLogger("maskserve")

Check: TypeAlias = Callable[[Image.Image, str, Image.Image], str | None]
"""Check of the source, the prompt and the answer's picture (RGB or RGBA, of the answer's size):
returns why the picture is refused; None: it is accepted."""


def load_check(config: Config) -> Check | None:
    """Return the function that `[safety] check` names; None: no check is configured.

    Raises:
        ConfigError: the function cannot be imported, or `[safety] model` is set, too.
    """
    name = config.safety.check
    if not name:
        return None
    if config.safety.model:
        raise ConfigError(
            "safety.check: cannot be combined with safety.model; accepted: one of them"
        )
    module, _, function = name.rpartition(":")
    try:
        check = getattr(_module(module), function)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigError(f"safety.check: {name} cannot be imported ({error})") from None
    if not callable(check):
        raise ConfigError(f"safety.check: {name} is not a function")
    return cast(Check, check)


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("operators_check", name)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_acceptance(check: Check, source: Image.Image, prompt: str, result: Image.Image) -> None:
    """Raise unless the check accepts a picture.

    Raises:
        Refused: the check refuses it; the message is the check's.
        EngineFailed: the check itself failed.
    """
    try:
        reason = check(source, prompt, result)
    except Exception as error:
        log.exception("the operator's check of pictures failed")
        raise EngineFailed("the operator's check of pictures failed") from error
    if reason is not None:
        raise Refused(reason)
