"""preprocess: an accepted edit's pictures, checked and brought to the model's resolution."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_core.config import templates_folder
from maskserve_core.config_file import load_config
from maskserve_core.contracts.facts import load_facts
from maskserve_core.contracts.request import AcceptedEdit
from maskserve_core.imaging.preprocess import prepare_edit
from maskserve_core.triton.sync_execute import respond
from maskserve_core.triton.tensor_io import read_bytes
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.worker.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_core.worker.logs import start_log
from maskserve_core.worker.templates import TemplateFolder


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        self._config = load_config()
        start_log(self._config, "preprocess")
        model = self._config.model
        self._facts = load_facts(model.path, model.native_resolution)
        self._templates = TemplateFolder(templates_folder(self._config))
        self._tracer = make_tracer(self._config, "preprocess")
        self._work = self._tracer.recorded("preprocess", self._prepare)
        end_when_stuck()
        sign_in(self._config.runtime_dir, "preprocess")

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work)

    def finalize(self) -> None:
        sign_out(self._config.runtime_dir, "preprocess")
        self._tracer.close()

    def _prepare(self, request: Any) -> dict[str, Any]:
        prepared = prepare_edit(
            read_bytes(pb_utils, request, "IMAGE"),
            read_bytes(pb_utils, request, "MASK"),
            AcceptedEdit.from_json(read_bytes(pb_utils, request, "ACCEPTED")),
            self._facts,
            self._config,
            self._templates.get,
        )
        return {
            "PIXELS": prepared.pixels,
            "EDIT_MASK": prepared.edit_mask,
            "REQUEST": prepared.context.request,
            "CONTEXT": prepared.context.pack(),
        }
