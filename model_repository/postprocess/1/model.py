"""postprocess: the edited pixels over the source, encoded; progress events carry no image."""

import math
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
from maskserve_triton.picture_threads import PictureJob, PictureThreads
from maskserve_triton.postprocess import finish_edit, store_for_run
from maskserve_triton.safety_model import check_by_model
from maskserve_triton.tensor_io import Outputs, failed_event, read_array, read_bytes
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "postprocess"

    def open(self, config: Config) -> None:
        self._mark, self._check = make_mark(config), load_check(config)
        self._values = Values(config.values)
        if config.safety.model:
            self._check = check_by_model(pb_utils, config.safety.model)
        self._tracer = make_tracer(config, "postprocess")
        self._threads = PictureThreads(pb_utils, self._tracer, "postprocess", self._read)

    def execute(self, requests: list[Any]) -> None:
        self._threads.execute(requests)

    def close(self) -> None:
        self._threads.close()
        self._tracer.close()

    def _read(self, request: Any) -> PictureJob | Outputs:
        meta = read_bytes(pb_utils, request, "META")

        def failed(error: Exception) -> Outputs:
            return {"IMAGE": b"", "META": failed_event(meta, error)}

        try:
            pixels = read_array(pb_utils, request, "PIXELS", np.uint8, ndim=3)
            if not pixels.size:
                return {"IMAGE": b"", "META": meta}
            packed = read_array(pb_utils, request, "CONTEXT", np.uint8, ndim=1)
            context = PostprocessContext.unpack(packed)
            edit = EditRequest.from_json(context.request)
        except Exception as error:
            return failed(error)
        run = parameters(request).get(RUN)

        def finish() -> Outputs:
            start = time.perf_counter()
            image = finish_edit(pixels, context, self._mark, self._check)
            image = store_for_run(image, meta, edit, run, self._values)
            taken_ms = (time.perf_counter() - start) * 1e3
            return {"IMAGE": image, "META": with_timing(meta, "postprocess", taken_ms)}

        return PictureJob(
            scope_of(edit.request_id), lambda: math.prod(edit.source_size), finish, failed
        )
