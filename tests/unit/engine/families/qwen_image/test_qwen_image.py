"""The particulars of Qwen-Image: prompts of any length, and Lightning's sampler."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, masking_utils

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.encoder import TextEncoder
from maskserve_engine.families.qwen_image.encode import LastStates, TemplateEncoder
from maskserve_engine.families.registry import load_adapter
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_triton.accept import accept_edit
from tests.fakes.jobs import config_of
from tests.fakes.loras import of_model, write
from tests.support.cached_rows import assert_equal, result
from tests.support.family_cases import FamilyModel
from tests.support.lora_oracle import read
from tests.support.replayed import Replayed


@pytest.fixture
def model(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("qwen-image")


def test_the_contract_has_short_prompts_and_a_long_one(model: FamilyModel) -> None:
    lengths = [len(model.job(seed).conditioning["prompt_embeds"]) for seed in range(6)]
    assert min(lengths) < 20
    assert max(lengths) > 150


def test_prompts_together_are_read_as_each_alone(model: FamilyModel) -> None:
    prompts = ["", "a red star", model.case.long_prompt]
    together = model.encoder.encode_prompts(prompts)
    for prompt, conditioning in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(conditioning["prompt_embeds"], alone)
        reading = model.encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (reading.used, reading.cut) == (len(alone), 0)


def test_a_recorded_text_encoder_gives_the_states_that_it_gives_without(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each number of prompts, up to two, and each bucket of lengths."""
    encoder, capture = cast(Any, model.encoder), Replayed()
    recorded, several = copy(encoder), ["one", "two", "three"]
    text = TextEncoder(
        encoder.text.tokenizer, encoder.text.model, encoder.text.length, graphs=Graphs(capture)
    )
    recorded.text = TemplateEncoder.of(text, type(encoder.text.pipeline))
    long = model.case.long_prompt
    batches = (["a cat"], ["a red star, please"], [""], [long], ["a hat", long], several, [long])
    for prompts in batches:
        expected = encoder.encode_prompts(prompts)
        with monkeypatch.context() as patches:  # as transformers sees a device that records
            patches.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
            answers = recorded.encode_prompts(prompts)
        for answer, alone in zip(answers, expected, strict=True):
            np.testing.assert_allclose(
                answer["prompt_embeds"], alone["prompt_embeds"], rtol=1e-5, atol=1e-5
            )
    assert capture.recorded == 3


def test_a_prompt_is_cut_as_the_pipeline_cuts_it(model: FamilyModel) -> None:
    encoder = cast(Any, model.encoder)
    long, most = 40 * model.case.long_prompt, encoder.text.length
    [conditioning] = encoder.encode_prompts([long])
    with torch.inference_mode():
        states, _ = model.pipeline.encode_prompt(long, max_sequence_length=most)
    assert states.shape[1] == most
    assert_equal(conditioning["prompt_embeds"], states[0].float().numpy())


def test_a_recorded_text_encoder_launches_one_graph() -> None:
    """That of Qwen-Image, which computes no logits either."""
    about = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 8,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6,
            },
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1},
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(about).bfloat16().eval()
    with FakeCuda() as cuda, torch.inference_mode():
        rotary = fake_weights(model).model.language_model.rotary_emb
        rotary.inv_freq = torch.empty_like(rotary.inv_freq, device=DEVICE)
        ids = torch.zeros(2, 1, 100, dtype=torch.int64, device=DEVICE)
        text, launches = TextEncoder(None, model, 512), list[int]()
        for encoder in (text, text.recorded()):
            states = LastStates(encoder)
            states(input_ids=ids[0], attention_mask=ids[1])
            with cuda.watch() as log:
                states(input_ids=ids[0], attention_mask=ids[1])
            launches.append(log.launches)
    assert launches == [1157, 5], "the graph, and copies"


def test_entries_do_not_depend_on_how_long_a_prompt_is(model: FamilyModel) -> None:
    """A picture's tokens lie where they do for any prompt, so the key does not say its length."""
    adapter: Any = model.adapter
    assert adapter.spec.key_text(300, 24) == 0
    for text in (1, 300):
        positions = adapter.positions(4, 6, text, ())[text:]
        assert_equal(positions.real.numpy(), adapter.positions(4, 6, 5, ())[5:].real.numpy())


@pytest.mark.parametrize("steps", [4, 8])
def test_lightning_goes_by_a_sampler_of_its_own(
    model: FamilyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Its shift is 3 at all sizes and its end is not stretched, as its publisher samples it."""
    folder, file = tmp_path / "lightning", tmp_path / "a.safetensors"
    path = Path(shutil.copytree(model.folder, folder)) / "scheduler" / "scheduler_config.json"
    shift = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | shift), "utf-8")
    adapter = load_adapter(config_of(folder))
    write(file, of_model(model.denoiser, 5, "{}.lora_down.weight"))
    edit = model.edit(4, num_inference_steps=steps, strength=1.0)
    job = model.encoded(edit)
    row: Any = adapter.dense_row(job)
    adapter.attach(row, job, ((adapter.low_rank(read(file, folder)["denoiser"]), 1.0),))
    sampler = type(model.pipeline.scheduler).from_pretrained(path.parent)
    with model.with_lora(file, 1.0):
        stretched = model.oracle(edit)
        monkeypatch.setattr(model.pipeline, "scheduler", sampler)
        expected = model.oracle(edit)
    assert np.abs(expected - stretched).max() > 1e-2
    assert_equal(result(Replay(adapter), row), expected)


def test_guidance_that_it_does_not_have_is_refused(model: FamilyModel) -> None:
    settings, config = EditSettings(guidance_scale=4.0), config_of(model.folder)
    with pytest.raises(InvalidRequest, match=r"guidance_scale.*is not an input of this model"):
        accept_edit(settings, b"a", model.adapter.spec, config, None)
