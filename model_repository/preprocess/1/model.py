"""preprocess: an accepted edit's pictures, checked and brought to the model's resolution."""

from functools import cache
from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_common.contracts.keys import scope_of
from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.tensors import CONTROL, IMAGE
from maskserve_common.files.values import Values
from maskserve_common.tracing import make_tracer
from maskserve_engine.families.specs import load_spec
from maskserve_triton.picture_threads import PictureJob, PictureThreads
from maskserve_triton.preprocess import PreparedEdit, pixels_of, prepare_edit
from maskserve_triton.templates import templates_of
from maskserve_triton.tensor_io import Outputs, read_bytes, read_elements
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "preprocess"

    def open(self, config: Config) -> None:
        model = config.model
        self._spec = load_spec(model.path, model.native_resolution)
        self._values = Values(config.values)
        self._templates = templates_of(config, self._values)
        self._tracer = make_tracer(config, "preprocess")
        self._threads = PictureThreads(pb_utils, self._tracer, "preprocess", self._read)

    def execute(self, requests: list[Any]) -> None:
        self._threads.execute(requests)

    def close(self) -> None:
        self._threads.close()
        self._tracer.close()

    def _read(self, request: Any) -> PictureJob:
        accepted = AcceptedEdit.from_json(read_bytes(pb_utils, request, "ACCEPTED"))
        scope = scope_of(accepted.settings.request_id or "")
        images = read_elements(pb_utils, request, IMAGE) or [b""]
        mask = read_bytes(pb_utils, request, "MASK")
        pictures = [*images, mask, *read_elements(pb_utils, request, CONTROL)]

        # The job reads headers first, and then, perhaps in another thread, the pictures.
        find_template = cache(self._templates.get)

        @cache
        def read() -> list[bytes | memoryview]:
            return [self._values.read(element, scope) for element in pictures]

        def pixels() -> int:
            return pixels_of(read(), accepted, self._config, find_template)

        def prepare() -> Outputs:
            read_pictures, count = read(), len(images)
            (image, *references), (mask, *control) = read_pictures[:count], read_pictures[count:]
            arguments = accepted, self._spec, self._config, find_template, control
            return _outputs(prepare_edit(image, mask, *arguments, references=references))

        return PictureJob(scope, pixels, prepare)


def _outputs(prepared: PreparedEdit) -> Outputs:
    return {
        "PIXELS": prepared.pixels,
        "EDIT_MASK": prepared.edit_mask,
        "CONTROLS": prepared.controls,
        "REFERENCES": prepared.references,
        "REQUEST": prepared.context.request,
        "CONTEXT": prepared.context.pack(),
    }
