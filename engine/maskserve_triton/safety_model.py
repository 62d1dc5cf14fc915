"""A safety check of pictures by a model of the worker's Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_common.errors import EngineFailed
from maskserve_common.imaging.images import as_mode
from maskserve_common.imaging.safety import Check
from maskserve_triton.tensor_io import named_tensors


def check_by_model(api: Any, name: str) -> Check:
    """Return a check that calls a model. Inputs: SOURCE and MADE (UINT8 [H, W, 3], RGB) and PROMPT
    (BYTES [1]). Output: REASON (BYTES [1]), which is empty if the picture may pass.
    """

    def check(source: Image.Image, prompt: str, result: Image.Image) -> str | None:
        inputs: dict[str, npt.NDArray[np.uint8] | bytes] = {
            "SOURCE": np.asarray(as_mode(source, "RGB")),
            "PROMPT": prompt.encode(),
            "MADE": np.asarray(as_mode(result, "RGB")),
        }
        call = api.InferenceRequest(
            model_name=name,
            requested_output_names=["REASON"],
            inputs=named_tensors(api, inputs),
        )
        answer = call.exec()
        if answer.has_error():
            raise EngineFailed(answer.error().message())
        reason = api.get_output_tensor_by_name(answer, "REASON").as_numpy().reshape(-1)
        # A reason that is no UTF-8 refuses the picture, too.
        return bytes(reason[0]).decode(errors="replace") or None

    return check
