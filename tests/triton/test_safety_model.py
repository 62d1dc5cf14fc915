"""A check of pictures that is a Triton model: what it is asked, and what its answer means."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from maskserve_common.errors import EngineFailed, Refused
from maskserve_common.imaging.safety import require_acceptance
from maskserve_triton.safety_model import check_by_model
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, failure, reply
from tests.fakes.pictures import scene


def test_a_model_is_asked_and_its_reason_refuses(api: FakeTriton) -> None:
    source, edited = scene(6, 9), 255 - scene(6, 9)

    def judge(call: Call) -> list[InferenceResponse]:
        assert np.array_equal(call.tensors["SOURCE"].as_numpy(), source)
        assert np.array_equal(call.tensors["MADE"].as_numpy(), edited)
        [prompt] = call.tensors["PROMPT"].as_numpy()
        if prompt == b"broken":
            return [failure("secret")]
        return [reply(REASON=b"no stars" if b"star" in prompt else b"")]

    api.models["judge"] = judge
    check = check_by_model(api, "judge")
    pictures = Image.fromarray(source), Image.fromarray(edited).convert("RGBA")
    require_acceptance(check, pictures[0], "a circle", pictures[1])
    with pytest.raises(Refused, match="no stars"):
        require_acceptance(check, pictures[0], "a star", pictures[1])
    with pytest.raises(EngineFailed) as failed:
        require_acceptance(check, pictures[0], "broken", pictures[1])
    assert "secret" not in str(failed.value)
