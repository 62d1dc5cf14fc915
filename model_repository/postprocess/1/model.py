"""postprocess: the edited pixels over the source, encoded; progress events carry no image."""

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_common.contracts.keys import scope_of
from maskserve_common.contracts.meta import with_timing
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.postprocess_context import PostprocessContext
from maskserve_common.contracts.request import EditRequest
from maskserve_common.files.values import RUN, Values
from maskserve_common.imaging.provenance import make_mark
from maskserve_common.imaging.safety import load_check
from maskserve_common.tracing import make_tracer
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.safety_model import check_by_model
from maskserve_triton.sync_execute import failed_event, respond
from maskserve_triton.tensor_io import read_bytes, view_array
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "postprocess"

    def open(self, config: Config) -> None:
        self._mark, self._check = make_mark(config), load_check(config)
        self._values = Values(config.values)
        if config.safety.model:
            self._check = check_by_model(pb_utils, config.safety.model)
        self._tracer = make_tracer(config, "postprocess")
        self._work = self._tracer.recorded("postprocess", self._finish, output="IMAGE")

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work, self._failed)

    def close(self) -> None:
        self._tracer.close()

    def _finish(self, request: Any) -> dict[str, Any]:
        start = time.perf_counter()
        meta = read_bytes(pb_utils, request, "META")
        pixels = view_array(pb_utils, request, "PIXELS", np.uint8, ndim=3)
        if not pixels.size:
            return {"IMAGE": b"", "META": meta}
        context = PostprocessContext.unpack(
            view_array(pb_utils, request, "CONTEXT", np.uint8, ndim=1)
        )
        image = finish_edit(pixels, context, self._mark, self._check)
        image = self._put(image, request, context, meta) or image
        taken_ms = (time.perf_counter() - start) * 1e3
        return {"IMAGE": image, "META": with_timing(meta, "postprocess", taken_ms)}

    def _put(
        self, image: bytes, request: Any, context: PostprocessContext, meta: bytes
    ) -> bytes | None:
        """Store the answer for a run and return its reference; None: return the answer itself."""
        run = parameters(request).get(RUN)
        if run is None or json.loads(meta)["event"] != "final":
            return None
        edit = EditRequest.from_json(context.request)
        if edit.settings.keep_result:  # the front reads it
            return None
        return self._values.put([image], scope_of(edit.request_id), run)

    def _failed(self, request: Any, error: Exception) -> dict[str, Any]:
        return {"IMAGE": b"", "META": failed_event(read_bytes(pb_utils, request, "META"), error)}
