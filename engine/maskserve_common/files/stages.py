"""Files that a worker's encoder and decoder leave in the runtime folder for its other models: the
encoded empty prompt, which the denoiser primes with; and, while a stage service does not answer, a
file for each stage in `away`: the worker then takes no edits.
"""

from __future__ import annotations

import os
from pathlib import Path

from maskserve_common.config import Config, Stage
from maskserve_common.contracts.status_record import NodeStatus
from maskserve_common.files.store import FileStore

STAGES: tuple[Stage, ...] = ("encoder", "decoder")
PRIMING_PROMPT_FILE = "priming_prompt.npz"
NO_ANSWER = "the stage service does not answer; try again later"
"""Error message for clients while the service does not answer."""


class StageOutages:
    """The stages of a worker whose service does not answer."""

    def __init__(self, config: Config) -> None:
        self._files = FileStore(Path(config.runtime_dir) / "away")
        self._forwards = bool(config.stages.service)

    def mark(self, stage: Stage, *, lost: bool) -> None:
        """Publish to the worker's other processes whether a stage is lost."""
        if lost:
            self._files.write(stage, b"")
        else:
            (self._files.folder / stage).unlink(missing_ok=True)

    def names(self) -> list[Stage]:
        """Stages that do not answer now."""
        if not self._forwards:
            return []
        return [stage for stage in STAGES if os.access(self._files.folder / stage, os.F_OK)]

    def nodes(self, model: str) -> list[NodeStatus]:
        """Return the stages as a status record lists them; none where the worker has its own
        stages.
        """
        if not self._forwards:
            return []
        away = self.names()
        return [
            NodeStatus(stage, model, "loading" if stage in away else "ready") for stage in STAGES
        ]
