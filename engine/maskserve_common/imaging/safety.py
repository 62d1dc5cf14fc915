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
    """The function that `[safety] check` names; None: it names none.

    Raises:
        ConfigError: there is no such function, or there is a model, too.
    """
    named = config.safety.check
    if not named:
        return None
    if config.safety.model:
        raise ConfigError(
            "safety.check: cannot be combined with safety.model; accepted: one of them"
        )
    place, _, function = named.rpartition(":")
    try:
        check = getattr(_module(place), function)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigError(f"safety.check: {named} cannot be imported ({error})") from None
    if not callable(check):
        raise ConfigError(f"safety.check: {named} is not a function")
    return cast(Check, check)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("operators_check", place)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def let_pass(check: Check, source: Image.Image, prompt: str, result: Image.Image) -> None:
    """Raise unless the check accepts a picture.

    Raises:
        Refused: it does not; the message is the check's.
        EngineFailed: the check itself failed.
    """
    try:
        reason = check(source, prompt, result)
    except Exception as error:
        log.exception("the operator's check of pictures failed")
        raise EngineFailed("the operator's check of pictures failed") from error
    if reason is not None:
        raise Refused(reason)
