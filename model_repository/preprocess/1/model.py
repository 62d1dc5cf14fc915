"""preprocess: an accepted edit's pictures, checked and brought to the model's resolution."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_common.contracts.keys import scope_of
from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.tensors import CONTROL
from maskserve_common.files.values import Values
from maskserve_common.tracing import make_tracer
from maskserve_engine.families.specs import load_spec
from maskserve_triton.preprocess import prepare_edit
from maskserve_triton.sync_execute import respond
from maskserve_triton.templates import templates_of
from maskserve_triton.tensor_io import read_bytes, read_elements
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "preprocess"

    def open(self, config: Config) -> None:
        model = config.model
        self._facts = load_spec(model.path, model.native_resolution)
        self._values = Values(config.values)
        self._templates = templates_of(config, self._values)
        self._tracer = make_tracer(config, "preprocess")
        self._work = self._tracer.recorded("preprocess", self._prepare)

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work)

    def close(self) -> None:
        self._tracer.close()

    def _prepare(self, request: Any) -> dict[str, Any]:
        accepted = AcceptedEdit.from_json(read_bytes(pb_utils, request, "ACCEPTED"))
        scope = scope_of(accepted.settings.request_id or "")

        def read(element: bytes) -> bytes | memoryview:
            return self._values.read(element, scope)

        prepared = prepare_edit(
            read(read_bytes(pb_utils, request, "IMAGE")),
            read(read_bytes(pb_utils, request, "MASK")),
            accepted,
            self._facts,
            self._config,
            self._templates.get,
            [read(raw_element) for raw_element in read_elements(pb_utils, request, CONTROL)],
        )
        return {
            "PIXELS": prepared.pixels,
            "EDIT_MASK": prepared.edit_mask,
            "CONTROLS": prepared.controls,
            "REQUEST": prepared.context.request,
            "CONTEXT": prepared.context.pack(),
        }
