"""A copy of the model repository whose denoiser and decoder can be sabotaged."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskserve_serving.options import ENSEMBLE, MODELS

_INSTALL = "\n\nimport sabotage\n\nsabotage.install(TritonPythonModel)\n"


def sabotaged_repository(folder: Path) -> tuple[Path, Path]:
    """Both of Triton's repositories for ServeOptions. The first one is copied into `folder`."""
    copy = folder / "model_repository"
    shutil.copytree(MODELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for model in ("denoiser", "decoder"):
        version = copy / model / "1"
        shutil.copy(Path(__file__).with_name("sabotage.py"), version)
        with (version / "model.py").open("a", encoding="utf-8") as source:
            source.write(_INSTALL)
    return copy, ENSEMBLE
