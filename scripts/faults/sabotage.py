"""What is put beside the denoiser's model.py to make its engine fail on command.

The file `sabotage` in the runtime folder says how: `raise` makes every further step raise, `hang`
makes the next one never end. It runs inside Triton; `repository.py` puts it there.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

ORDER = "sabotage"
_LOOK_S = 0.02


def install(model: Any) -> None:
    """Have instances of the TritonPythonModel class `model` obey once they are initialized."""
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
