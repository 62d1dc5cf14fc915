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

import msgspec

from maskserve_common.config_file import config_of
from maskserve_engine.checkpoints.folder import describe, make_folder, run_request
from maskserve_engine.checkpoints.request import Card, CheckpointRequest, ModelReport
from maskserve_engine.families.specs import load_spec
from maskserve_engine.fitting.card_table import Shapes, best_fits


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


def main(argv: list[str]) -> int:
    """Print the report of a request as JSON."""
    return run_request(argv, lambda request: print(msgspec.json.encode(report(request)).decode()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
