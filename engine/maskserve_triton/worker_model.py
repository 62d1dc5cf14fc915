"""Start and end of every model's process on a worker."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

from maskserve_common.config import Config
from maskserve_common.config_file import load_config
from maskserve_common.garbage import without_garbage_collection
from maskserve_common.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_common.logs import start_log


class WorkerModel(ABC):
    """A Triton model's Python class, but for its `execute`."""

    name: ClassVar[str]
    """Name of the Triton model."""

    @abstractmethod
    def open(self, config: Config) -> None:
        """Import and load what takes requests."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""

    def initialize(self, args: dict[str, str]) -> None:
        os.umask(0o077)  # templates, prompts and entries in files are nobody else's
        end_with_server()
        self._config = load_config()
        if self._config.nodes.models:
            from maskserve_workflows.node_folders import check_worker_names

            check_worker_names(self._config.nodes)
        start_log(self._config, self.name)
        with without_garbage_collection():
            self.open(self._config)
        end_when_stuck()
        sign_in(self._config.runtime_dir, self.name)

    def finalize(self) -> None:
        try:
            self.close()
        finally:
            # The work is done: a process that waits for the end need not wait until this
            # interpreter has shut down.
            sign_out(self._config.runtime_dir, self.name)
