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

from maskserve_core.imaging.provenance import SOURCE_TYPE
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


CHECK = """\
def check(source, prompt, made):
    assert source.size == made.size
    return "no stars today" if "star" in prompt else None
"""


# tests/unit/core/imaging holds what is signed and how a check is asked and answered.
@pytest.mark.slow
def test_a_worker_with_a_certificate_signs_and_one_with_a_check_asks_it(
    model: Path, tmp_path: Path
) -> None:
    chain, key = write_signer(tmp_path)
    config = tmp_path / "worker.toml"
    config.write_text(
        f'[provenance]\ncertificate = "{chain}"\nprivate_key = "{key}"\n'
        f'[safety]\ncheck = "{tmp_path}/a_check.py:check"\n'
    )
    (tmp_path / "a_check.py").write_text(CHECK)
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        config=config,
        log_dir=tmp_path / "logs",
        say=lambda _: None,
    )
    with Supervisor(options) as running, closing(Grpc(running.workers[0].grpc_url)) as grpc:
        with pytest.raises(InferenceServerException, match=r"\[REFUSED\] no stars today"):
            grpc.edit(plain_edit())
        image, _ = grpc.edit({**plain_edit(), "PROMPT": b"a circle"})
        told = json.loads(c2pa.Reader("image/png", io.BytesIO(image)).json())
        assert told["validation_state"] == "Valid"
        (manifest,) = told["manifests"].values()
        assert manifest["claim_generator_info"][0]["name"] == "maskserve"
