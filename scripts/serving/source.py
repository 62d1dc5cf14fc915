"""Which model folder is served."""

from __future__ import annotations

import re
from pathlib import Path

from maskserve_core.config import ConfigError
from maskserve_core.facts import load_facts
from serving.errors import ServeError

# "owner/name"; a path is written with a dot or slash in front, or exists.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str, revision: str = "") -> Path:
    """The local folder of a path or hub id; a hub model is downloaded, or found downloaded.

    Raises:
        ServeError: there is no such model, or it is none that is served.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _download(model, revision or None)
    try:
        load_facts(folder)
    except ConfigError as error:
        raise ServeError(f"--model: {str(error).removeprefix('[model] path: ')}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ServeError(
            f"--model: {folder} is a damaged model folder ({type(error).__name__}: {error})"
        ) from error
    return folder.resolve()


def _download(model: str, revision: str | None) -> Path:
    if _HUB_ID.fullmatch(model) is None:
        raise ServeError(f"--model: there is no folder {model}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ServeError(
            f"--model: there is no folder {model}, and huggingface_hub is not installed"
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision))
    except Exception as error:
        # The hub client raises its own and its transports' errors; the first line says enough.
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ServeError(
            f"--model: there is no folder {model}, and the hub did not give it: {why}"
        ) from error
