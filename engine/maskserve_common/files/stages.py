"""Files by which a worker's encoder and decoder tell its other models something.

They lie in the runtime folder: the encoded empty prompt, with which the denoiser primes, and in
`replicas` the states of each stage's replicas, where services run the stages. If all replicas of a
stage are away, the worker takes no edits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from maskserve_common.config import Config, Stage
from maskserve_common.contracts.status_record import NodeStatus, State
from maskserve_common.files.store import FileStore

STAGES: tuple[Stage, ...] = ("encoder", "decoder")
PRIMING_PROMPT_FILE = "priming_prompt.npz"
NO_ANSWER = "the stage service does not answer; try again later"
"""Error message for clients while the service does not answer."""
_decode = msgspec.json.Decoder(dict[str, State]).decode


class StageOutages:
    """The stages of a worker whose services do not answer."""

    def __init__(self, config: Config) -> None:
        self._files = FileStore(Path(config.runtime_dir) / "replicas")
        self._forwards = bool(config.stages.service)

    def mark(self, stage: Stage, states: Mapping[str, State]) -> None:
        """Publish the states of a stage's replicas, by address, to the worker's other processes."""
        self._files.write(stage, msgspec.json.encode(states))

    def names(self) -> list[Stage]:
        """Stages that no replica answers for now."""
        return [stage for stage, states in self._states().items() if "ready" not in states.values()]

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

    def services(self) -> list[NodeStatus]:
        """Return the replicas of the stages as a status record lists them."""
        return [
            NodeStatus(address, stage, state)
            for stage, states in self._states().items()
            for address, state in states.items()
        ]

    def _states(self) -> dict[Stage, dict[str, State]]:
        """Return the replicas' states by stage and address, of stages that have published them."""
        states: dict[Stage, dict[str, State]] = {}
        for stage in STAGES if self._forwards else ():
            with suppress(FileNotFoundError):
                states[stage] = _decode((self._files.folder / stage).read_bytes())
        return states
