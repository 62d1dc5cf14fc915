"""Answers carry a mark that machines read, and a signature where there is a certificate."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path

import c2pa
import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from maskserve_common.imaging.provenance import SOURCE_TYPE
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.support.calls import Grpc, plain_edit
from tests.support.certificates import write_signer


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_every_answer_is_marked(grpc: Grpc, output_format: str) -> None:
    image, _ = grpc.edit(plain_edit(output_format=output_format))
    with Image.open(io.BytesIO(image)) as opened:
        assert SOURCE_TYPE.encode() in opened.info["xmp"]


JUDGE = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.judged(request) for request in requests]

    def judged(self, request):
        given = {
            name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("SOURCE", "PROMPT", "MADE")
        }
        assert given["SOURCE"].shape == given["MADE"].shape
        assert (given["SOURCE"] != given["MADE"]).any()
        prompt = given["PROMPT"][0].decode()
        assert prompt != "secret"
        reason = "no stars today" if "star" in prompt else ""
        told = pb_utils.Tensor("REASON", np.array([reason.encode()], object))
        return pb_utils.InferenceResponse([told])
"""
JUDGE_CONFIG = """\
backend: "python"
max_batch_size: 0
input { name: "SOURCE" data_type: TYPE_UINT8 dims: [-1, -1, 3] }
input { name: "PROMPT" data_type: TYPE_STRING dims: [1] }
input { name: "MADE" data_type: TYPE_UINT8 dims: [-1, -1, 3] }
output { name: "REASON" data_type: TYPE_STRING dims: [1] }
instance_group { count: 1 kind: KIND_CPU }
"""


# tests/unit/core/imaging holds what is signed, tests/triton how a model is asked.
@pytest.mark.slow
def test_a_worker_with_a_certificate_signs_and_one_with_a_model_that_checks_asks_it(
    model: Path, tmp_path: Path
) -> None:
    chain, key = write_signer(tmp_path)
    config = tmp_path / "worker.toml"
    config.write_text(
        f'[provenance]\ncertificate = "{chain}"\nprivate_key = "{key}"\n'
        f'[safety]\nmodel = "judge"\nrepository = "{tmp_path}/judges"\n'
    )
    judge = tmp_path / "judges" / "judge"
    (judge / "1").mkdir(parents=True)
    (judge / "1" / "model.py").write_text(JUDGE)
    (judge / "config.pbtxt").write_text(JUDGE_CONFIG)
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        config=config,
        log_dir=tmp_path / "logs",
        report=lambda _: None,
    )
    with Supervisor(options) as running, closing(Grpc(running.workers[0].grpc_url)) as grpc:
        with pytest.raises(InferenceServerException, match=r"\[REFUSED\] no stars today"):
            grpc.edit(plain_edit())
        with pytest.raises(InferenceServerException, match=r"\[ENGINE_FAILED\]") as failed:
            grpc.edit({**plain_edit(), "PROMPT": b"secret"})
        assert "secret" not in str(failed.value)
        image, _ = grpc.edit({**plain_edit(), "PROMPT": b"a circle"})
        manifest_store = json.loads(c2pa.Reader("image/png", io.BytesIO(image)).json())
        assert manifest_store["validation_state"] == "Valid"
        (manifest,) = manifest_store["manifests"].values()
        assert manifest["claim_generator_info"][0]["name"] == "maskserve"
