"""What every model of a worker does as its process starts and ends."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from typing import ClassVar

from maskserve_core.config import Config
from maskserve_core.config_file import load_config
from maskserve_core.worker.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_core.worker.logs import start_log


class WorkerModel(ABC):
    """A Triton model's Python class, but for its `execute`."""

    name: ClassVar[str]
    """Of the Triton model."""

    @abstractmethod
    def open(self, config: Config) -> None:
        """Import and load what takes requests."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    def initialize(self, args: dict[str, str]) -> None:
        gc.disable()
        os.umask(0o077)  # templates, prompts and entries in files are nobody else's
        end_with_server()
        self._config = load_config()
        start_log(self._config, self.name)
        self.open(self._config)
        # What is imported and loaded stays. To look through it again and again meanwhile would take
        # a good part of a start, and a full collection that did so later would hold up a step.
        gc.collect()
        gc.freeze()
        gc.enable()
        end_when_stuck()
        sign_in(self._config.runtime_dir, self.name)

    def finalize(self) -> None:
        try:
            self.close()
        finally:
            # Now there is nothing more to do here, and who waits for that need not wait for this
            # interpreter to take itself apart.
            sign_out(self._config.runtime_dir, self.name)
