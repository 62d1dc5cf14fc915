"""Hides libraries that diffusers and transformers import if installed, and that this process does
not need.

torchao and bitsandbytes compile and register code on import, and print warnings; with peft they add
1.3 s of CPU time and 70 MB to a start. scipy, of which diffusers and transformers use one function
each, takes 0.6 s and 36 MB; transformers, where no prompts are encoded, 1.7 s and 29 MB; torch's
compiler 1.6 s and 140 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, cast

from maskserve_common.config import Config
from maskserve_common.config_file import read_json

_COMPILER = "torch._dynamo"


def hide_unused_libraries(config: Config, *, text: bool = True) -> None:
    """Make imports of libraries that the configuration does not need fail, as if they were not
    installed. Workers and node servers call it before they import diffusers or transformers.

    Args:
        config: configuration of the worker or node server.
        text: whether the process encodes prompts.

    Raises:
        ConfigError: a config.json of a model folder is unreadable.
    """
    unused = unused_libraries(config, text=text)
    for library in unused:
        _hide(library)
    if "transformers" in unused:  # which imports the compiler itself
        _import_diffusers_without_compiler()


def _hide(library: str) -> bool:
    """Hide a library; return whether it was not imported yet. Python documents that importing a
    name fails if it is None in `sys.modules`.
    """
    return sys.modules.setdefault(library, None) is None  # type: ignore[arg-type]


def _import_diffusers_without_compiler() -> None:
    """Import diffusers without torch's compiler, which is imported when it is first used.

    Two modules of diffusers import it to mark functions: one tolerates its absence, the other calls
    `torch.compiler.disable`. A version that needs more of it imports it with its next modules.
    """
    import torch  # by now: a node server that only composes pictures has none

    disable = torch.compiler.disable

    def disabled_later(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
        if function is None:
            return lambda library: disabled_later(library, *how, **more)
        disabled = cache(lambda: disable(function, *how, **more))
        return wraps(function)(lambda *args, **kwargs: disabled()(*args, **kwargs))

    hidden, torch.compiler.disable = _hide(_COMPILER), cast(Any, disabled_later)
    try:
        import diffusers.hooks  # noqa: F401
    except ImportError:
        pass
    finally:
        torch.compiler.disable = disable
        if hidden:
            del sys.modules[_COMPILER]


def unused_libraries(config: Config, *, text: bool = True) -> list[str]:
    """Return the import names of unneeded libraries. An already quantised folder may need any of
    them, and quantisation may need transformers.
    """
    model, folder = config.model, Path(config.model.path)
    config_files = [Path(path) / "config.json" for path in config.nodes.folders().values()]
    config_files += folder.glob("*/config.json") if model.path else ()
    if any(read_json(file).get("quantization_config") for file in config_files):
        return []
    forms = {model.weights, model.t5_weights}
    unused = ["peft"]
    if not forms & {"int8", "int8-dynamic", "fp8"}:
        unused.append("torchao")
    if "nf4" not in forms:
        unused.append("bitsandbytes")
    if not model.gguf:
        unused.append("gguf")
    if not text and model.weights == "bf16" and not model.gguf:
        unused.append("transformers")
    sampler = folder / "scheduler" / "scheduler_config.json"
    if not (sampler.exists() and read_json(sampler).get("use_beta_sigmas")):
        unused.append("scipy")
    return unused
