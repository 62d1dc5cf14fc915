"""A module beside model.py of the denoiser and the decoder that makes them fail on command.

The file `sabotage` in the runtime folder selects the engine's failure: with `raise` every further
step raises, with `hang` the next step never ends. While a file `sabotage-previews` exists, the
decoder raises at each preview. The module runs inside Triton; `repository.py` copies it there.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from maskserve_common.config_file import load_config

ORDER = "sabotage"
PREVIEWS = "sabotage-previews"
_LOOK_S = 0.02


def install(model: Any) -> None:
    """Make instances of the denoiser's or the decoder's TritonPythonModel obey."""
    if model.name == "decoder":
        _install_in_decoder()
    else:
        _install_in_denoiser(model)


def _install_in_decoder() -> None:
    from maskserve_triton.stage_models import DecoderStage

    decode, order = DecoderStage._decode, Path(load_config().runtime_dir) / PREVIEWS

    def decode_or_obey(self: Any, events: Any) -> Any:
        ordered = order.exists()
        for event, picture in zip(events, decode(self, events), strict=True):
            is_preview = b'"preview"' in event.meta
            yield RuntimeError("sabotaged") if ordered and is_preview else picture

    DecoderStage._decode = decode_or_obey  # type: ignore[method-assign]


def _install_in_denoiser(model: Any) -> None:
    initialize = model.initialize

    def initialize_and_obey(self: Any, args: Any) -> None:
        initialize(self, args)
        order = Path(self._config.runtime_dir) / ORDER
        thread = threading.Thread(target=_obey, args=(self._engine, order), daemon=True)
        thread.start()

    model.initialize = initialize_and_obey


def _obey(engine: Any, order: Path) -> None:
    while not order.exists():
        time.sleep(_LOOK_S)
    engine.adapter.step = {"raise": _raise, "hang": _hang}[order.read_text()]


def _raise(*_: object) -> None:
    raise RuntimeError("sabotaged")


def _hang(*_: object) -> None:
    time.sleep(3600)
