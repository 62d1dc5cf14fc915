"""decoder: latents to pixels; events without latents pass through."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "decoder"

    def open(self, config: Config) -> None:
        # Only one of them is imported: forwarding needs no torch, which takes much memory.
        if config.stages.service:
            from maskserve_engine.stages.revision import stages_revision
            from maskserve_triton.forwarded_stages import ForwardedDecoder

            self._stage: Any = ForwardedDecoder(pb_utils, config, stages_revision(config))
        else:
            from maskserve_triton.stage_models import DecoderStage

            self._stage = DecoderStage(pb_utils, config)

    def execute(self, requests: list[Any]) -> None:
        self._stage.execute(requests)

    def close(self) -> None:
        self._stage.close()
