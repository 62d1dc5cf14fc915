"""Encoder and decoder that a service runs for several workers give what each worker's own would,
byte for byte. tests/triton/test_stages.py has what becomes of requests whose service fails.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from maskserve_benchmarks.edits.direct import request_of
from maskserve_common.contracts.meta import final_meta
from maskserve_common.contracts.postprocess_context import PostprocessContext
from maskserve_common.files.stages import PRIMING_PROMPT_FILE
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages.revision import stages_revision
from maskserve_triton.batched_requests import batched
from maskserve_triton.forwarded_stages import ForwardedDecoder, ForwardedEncoder
from maskserve_triton.stage_models import DecoderStage, EncoderStage
from tests.fakes import loras
from tests.fakes.ip_adapters import build_image_encoder
from tests.fakes.jobs import WORDS, Case, config_of, random_case
from tests.fakes.pb_utils import FakeTriton, Request
from tests.fakes.tiny_qwen_image import EDIT, build_tiny_qwen_image
from tests.support.draws import fresh_rng
from tests.support.stage_server import StageServer

TIMES = {"ENCODED": "ms", "META": "timings_ms"}
"""Times, the only part of an answer that may differ."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    hides = "maskserve_triton.stage_models.hide_unused_libraries"
    monkeypatch.setattr(hides, lambda config, **more: None)  # this process is not a model's
    with ExitStack() as stack:
        yield stack


def to_encode(api: FakeTriton, case: Case, prompt: str) -> Request:
    edit = request_of(case.pixels, prompt, case.settings, case.seed, "edit")
    tensors = {
        "REQUEST": edit.to_json(),
        "PIXELS": case.pixels,
        "EDIT_MASK": case.mask,
        "CONTROLS": np.zeros((0, *case.pixels.shape), np.uint8),
        "REFERENCES": np.zeros(0, np.uint8),
    }
    return api.request("", **batched(tensors))


def to_decode(case: Case, latents: Any) -> dict[str, Any]:
    edit = request_of(case.pixels, case.prompt, case.settings, case.seed, "edit")
    paste = bytes(case.mask)
    context = PostprocessContext(edit.to_json(), bytes(case.pixels), paste, decoded=True)
    meta = final_meta(edit, "w", "m", {"cache": "miss"}, {})
    return batched({"LATENTS": latents, "META": meta, "CONTEXT": context.pack()})


def answer_to(stage: Any, request: Request) -> dict[str, Any]:
    """But for times."""
    stage.execute([request])
    answer = request.sender.wait(600)
    assert not answer.has_error(), answer.error().message()
    tensors = {}
    for output_tensor in answer.output_tensors():
        array = np.asarray(output_tensor.as_numpy())
        tensors[output_tensor.name()] = (array.dtype.name, array.shape, array.tobytes())
        if output_tensor.name() in TIMES:
            document = json.loads(array[0, 0])
            document.pop(TIMES[output_tensor.name()])
            tensors[output_tensor.name()] = document
    return tensors


@pytest.mark.parametrize(
    "model",
    [
        "fill",
        # The same code; these have a negative prompt, and prompts about a picture.
        pytest.param("sdxl-base", marks=pytest.mark.slow),
        pytest.param("qwen-edit", marks=pytest.mark.slow),
    ],
)
def test_what_comes_back_is_what_the_worker_would_have_made(
    model: str,
    tmp_path: Path,
    tiny_fill: Path,
    tiny_unets: dict[str, Path],
    opened: ExitStack,
) -> None:
    folder = {"fill": tiny_fill, **tiny_unets}.get(model)
    folder = folder or build_tiny_qwen_image(tmp_path / "model", EDIT)
    api, config, rng = FakeTriton(), config_of(folder), fresh_rng()
    stage_pairs: dict[str, dict[str, Any]] = {}
    for name in ("own", "service"):
        at = replace(config, runtime_dir=str(tmp_path / name))
        stage_pairs[name] = {"encoder": EncoderStage(api, at), "decoder": DecoderStage(api, at)}
        for stage in stage_pairs[name].values():
            opened.callback(stage.close)
    server = opened.enter_context(StageServer(api, stage_pairs["service"]))
    stages = replace(config.stages, service=server.url)
    workers = [
        replace(config, stages=stages, runtime_dir=str(tmp_path / f"worker-{n}")) for n in range(2)
    ]
    revision = stages_revision(config)
    encoders = [ForwardedEncoder(api, worker, revision) for worker in workers]
    decoders = [ForwardedDecoder(api, worker, revision) for worker in workers]
    for stage in (*encoders, *decoders):
        opened.callback(stage.close)

    expected = (tmp_path / "own" / PRIMING_PROMPT_FILE).read_bytes()
    for worker in workers:
        assert (Path(worker.runtime_dir) / PRIMING_PROMPT_FILE).read_bytes() == expected
    cases = [random_case(rng) for _ in range(3)]
    spec = load_spec(str(folder), 0)
    for _ in range(8):
        # What is kept of one worker's edits serves the other's, as it would have its own.
        case, prompt, integers = (
            cases[rng.integers(3)],
            str(rng.choice(WORDS)),
            int(rng.integers(2)),
        )
        local_answer = answer_to(stage_pairs["own"]["encoder"], to_encode(api, case, prompt))
        assert answer_to(encoders[integers], to_encode(api, case, prompt)) == local_answer
        height, width = (side // spec.vae_scale_factor for side in case.mask.shape)
        latents = rng.standard_normal((spec.latent_channels, height, width), np.float32)
        decode = to_decode(case, latents)
        local_answer = answer_to(stage_pairs["own"]["decoder"], api.request("", **decode))
        assert answer_to(decoders[integers], api.request("", **decode)) == local_answer
    assert api.violations == []


def test_only_what_encoder_and_decoder_are_made_of_tells_stages_apart(
    tiny_fill: Path, tiny_inpaint: Path
) -> None:
    config = config_of(tiny_fill)
    revision = stages_revision(config)
    assert revision == stages_revision(config_of(tiny_fill, model={"weights": "nf4"}))
    longer = replace(config.model, max_sequence_length=config.model.max_sequence_length + 1)
    assert revision != stages_revision(replace(config, model=longer))
    assert revision != stages_revision(config_of(tiny_inpaint))


def test_the_bytes_of_a_fused_lora_tell_stages_apart(tiny_fill: Path, tmp_path: Path) -> None:
    """Hosts have copies at paths of their own, and files of one name may differ."""

    def revision(path: Path, scale: float) -> str:
        return stages_revision(config_of(tiny_fill, model={"fuse_loras": [f"{path}:{scale}"]}))

    file, copy = tmp_path / "a.safetensors", tmp_path / "copy.safetensors"
    for path in (file, copy):
        loras.write(path, loras.lora(seed=0))
    first = revision(file, 0.5)
    assert first == revision(copy, 0.5)
    assert first != revision(file, 0.7)
    loras.write(file, loras.lora(seed=1))
    assert first not in (revision(file, 0.5), stages_revision(config_of(tiny_fill)))


def test_an_image_encoder_tells_stages_apart(tiny_fill: Path, tmp_path: Path) -> None:
    revisions = {stages_revision(config_of(tiny_fill))}
    for seed in range(2):
        build_image_encoder(tmp_path / str(seed) / "image_encoder", seed)
        copy = config_of(tiny_fill, ip_adapters={"folder": str(tmp_path / str(seed))})
        revisions.add(stages_revision(copy))
    assert len(revisions) == 3
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    copy = config_of(tiny_fill, ip_adapters={"folder": str(tmp_path / "copy")})
    assert stages_revision(copy) in revisions
