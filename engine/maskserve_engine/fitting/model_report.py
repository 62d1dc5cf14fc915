"""A model and the cards that hold it, by configs and headers: `maskserve check`.

The command runs it as a process, since diffusers maps a checkpoint's names with torch:

    python -m maskserve_engine.fitting.model_report REQUEST.json

The request is a `CheckpointRequest`: without a file its base is the model; without a base the file
is only described.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from maskserve_common.config_file import config_of
from maskserve_engine.checkpoints.folder import describe, make_folder, run_request
from maskserve_engine.checkpoints.request import Card, CheckpointRequest, ModelReport
from maskserve_engine.families.specs import load_spec
from maskserve_engine.fitting.card_table import Shapes, best_fits
from maskserve_engine.spec.model_index import read_model_index


def report(request: CheckpointRequest) -> ModelReport:
    """Return the report of a model.

    Raises:
        ConfigError: it is damaged or not served; one sentence.
    """
    if not request.file:
        return ModelReport(cards=_cards(request.base))
    description = describe(Path(request.file))
    if not request.base:
        return ModelReport(description)
    with tempfile.TemporaryDirectory(prefix="maskserve-check-") as folder:
        shapes = msgspec.structs.replace(request, folder=folder, weights=False)
        missing = make_folder(shapes)
        return ModelReport(description, tuple(missing), _cards(folder))


def _cards(folder: str) -> tuple[Card, ...]:
    cache = {"enabled": load_spec(folder).caches}
    return best_fits(Shapes(config_of({"model": {"path": folder}, "cache": cache})))


def _needs_text(request: CheckpointRequest) -> bool:
    """Return whether a text encoder's size follows from its class, which takes seconds to import,
    and not from its files.
    """
    folder = Path(request.base)
    if request.file:
        return bool(request.base)
    return any(
        name.startswith("text_encoder") and not any((folder / name).glob("*.safetensors"))
        for name in read_model_index(folder)
    )


def _leave_out_compiler() -> None:
    """Leave out torch's compiler, which torch imports for two seconds to mark the functions that
    know the shapes of results. Nothing is compiled here.
    """
    stub: Any = ModuleType("torch._dynamo")
    stub.disable = lambda function, *_, **__: function
    sys.modules.setdefault(stub.__name__, stub)


def main(argv: list[str]) -> int:
    """Print the report of a request as JSON."""

    def run(request: CheckpointRequest) -> None:
        if not _needs_text(request):
            _leave_out_compiler()
        print(msgspec.json.encode(report(request)).decode())

    return run_request(argv, run, _needs_text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
