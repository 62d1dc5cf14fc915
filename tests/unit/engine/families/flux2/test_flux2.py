"""The particulars of FLUX.2: its schedule, exact references, and masks of token cells."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3Model, masking_utils

from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.encoder import TextEncoder
from maskserve_engine.families.flux2.adapter import Flux2Adapter
from maskserve_engine.families.flux2.encode import LayerStates
from maskserve_engine.families.flux2.spec import LAYERS
from maskserve_engine.families.qwen_image.encode import picture_processor
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.spec.control_nets import check_config
from maskserve_engine.spec.model_spec import anchor_stride
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import config_of, tolerance
from tests.fakes.tiny_flux2 import PARTS_TEMPLATE, build_tiny_flux2, chat_tokenizer
from tests.support.cached_rows import Primed, cached, result
from tests.support.draws import fresh_rng
from tests.support.family_cases import FamilyModel
from tests.support.replayed import Replayed

pytestmark = pytest.mark.spread("model")


@pytest.fixture(params=["klein", "klein-base", "klein-kv", "flux2-dev"])
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


@pytest.mark.parametrize("name", ["klein", "flux2-dev"])
def test_a_recorded_text_encoder_gives_the_states_that_it_gives_without(
    name: str, family_model: Callable[[str], FamilyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each number of prompts, up to two; prompts of other lengths replay it."""
    encoder: Any = family_model(name).encoder
    recorded, capture = copy(encoder), Replayed()
    recorded.text = replace(encoder.text, graphs=Graphs(capture))
    several = ["one", "two", "three"]
    for prompts in (["a cat"], ["a red star, please"], [""], ["a hat", "red"], several, several):
        expected = encoder.encode_prompts(prompts)
        with monkeypatch.context() as patches:  # as transformers sees a device that records
            patches.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
            answers = recorded.encode_prompts(prompts)
        for answer, alone in zip(answers, expected, strict=True):
            np.testing.assert_allclose(
                answer["prompt_embeds"], alone["prompt_embeds"], rtol=1e-5, atol=1e-5
            )
    assert capture.recorded == 2


def test_a_recorded_text_encoder_launches_one_graph() -> None:
    """Klein 4B's, up to the last layer that is read."""
    about = Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=27, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(about).bfloat16().eval()
    model.norm = torch.nn.Identity()
    with FakeCuda() as cuda, torch.inference_mode():
        rotary = fake_weights(model).rotary_emb
        rotary.inv_freq = torch.empty_like(rotary.inv_freq, device=DEVICE)
        ids = torch.zeros(2, 1, 512, dtype=torch.int64, device=DEVICE)
        text, launches = TextEncoder(None, model, 512), list[int]()
        for encoder in (text, text.recorded()):
            states = LayerStates(encoder, LAYERS)
            states(input_ids=ids[0], attention_mask=ids[1])
            with cuda.watch() as log:
                states(input_ids=ids[0], attention_mask=ids[1])
            launches.append(log.launches)
    assert launches == [1539, 4], "the graph, and copies"


@pytest.mark.parametrize("steps", [1, 4, 28, 50])
@pytest.mark.parametrize("tokens", [16, 1024, 4096, 4300, 4301, 9000])
def test_schedules_are_shifted_as_the_pipelines_are(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    shift = Flux2Adapter.shift({}, tokens, steps)
    assert shift == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


def test_a_distilled_model_has_an_anchor_for_each_of_its_four_steps(tmp_path: Path) -> None:
    """Where its own schedule has them."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    folder = build_tiny_flux2(tmp_path / "klein")
    adapter: Any = load_adapter(config_of(folder))
    sampler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    steps = adapter.spec.steps_default(0)
    anchors = adapter.anchors(4096, steps, anchor_stride(0, adapter.spec))
    sampler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(4096, steps)
    )
    sigmas = [anchor.sigma for anchor in anchors]
    assert sigmas == pytest.approx(sampler.sigmas[:4].tolist(), abs=1e-6)
    assert sigmas == pytest.approx([1.0, 0.967, 0.908, 0.767], abs=1e-3)


def test_a_context_that_the_plan_does_not_compute_sees_the_priming_prompt(
    model: FamilyModel,
) -> None:
    """References that are exact see no prompt."""
    job = model.job(1, num_inference_steps=3, strength=1.0)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row: Any = cached(model.replay, job, Primed(model.adapter, model.encoder, job))
    dense = result(model.replay, model.adapter.dense_row(job))
    apart = np.abs(result(model.replay, row, "kv") - dense).max()
    assert (apart <= tolerance(dense)) == model.adapter.spec.semantics.exact


def test_what_klein_does_not_take_is_refused_in_a_sentence(model: FamilyModel) -> None:
    spec, config = model.adapter.spec, config_of(model.folder)
    edit_settings = EditSettings(negative_prompt="x", guidance_scale=None)
    with pytest.raises(InvalidRequest, match=r"negative_prompt.*cannot be used by this model"):
        accept_edit(edit_settings, b"a", spec, config, None)
    if spec.guidance == "none":
        with pytest.raises(InvalidRequest, match=r"guidance_scale.*is not an input of this model"):
            accept_edit(EditSettings(guidance_scale=4.0), b"a", spec, config, None)
    with pytest.raises(ValueError, match="takes no ControlNets"):
        check_config({"_class_name": "FluxControlNetModel"}, spec)


def test_a_mask_keeps_no_share_of_the_source_in_a_thin_stroke(model: FamilyModel) -> None:
    """The pipeline samples it between four pixels of a cell; grown to latents alone it would be
    left at a part.
    """
    spec, edit = model.adapter.spec, model.edit(0)
    stroke = np.zeros((64, 64), np.uint8)
    stroke[9:11] = 255
    pixels = np.zeros((64, 64, 3), np.uint8)

    def shares(mask: NDArray[np.uint8]) -> set[float]:
        """How much of a token each latent of a row's mask may change."""
        job = model.encoded(replace(edit, pixels=pixels, mask=mask))
        row: Any = model.adapter.dense_row(job)
        return set(row.image.masked.blend.mask.flatten().tolist())

    assert shares(mask_for_model(stroke, spec)) == {0.0, 1.0}
    assert shares(mask_for_model(stroke, replace(spec, mask_latents=1))) - {0.0, 1.0}


@pytest.fixture
def pixtral(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Transformers' PixtralProcessor. Its module imports one function of a module that needs
    torchvision, and calls it for no prompt.
    """
    pictures = ModuleType("image_processing_pixtral")
    vars(pictures)["get_resize_output_image_size"] = None
    package = "transformers.models.pixtral"
    monkeypatch.setitem(sys.modules, f"{package}.image_processing_pixtral", pictures)
    monkeypatch.delitem(sys.modules, f"{package}.processing_pixtral", raising=False)
    yield importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor
    sys.modules.pop(f"{package}.processing_pixtral")


def test_devs_tokenizer_reads_prompts_as_its_processor(pixtral: Any, tmp_path: Path) -> None:
    """In the pipeline's template, from the files that the processor writes: cut, padded, alone or
    together.
    """
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from transformers import AutoTokenizer, PixtralImageProcessorPil

    images = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    whole = chat_tokenizer(more=images)
    whole.chat_template = PARTS_TEMPLATE
    processor = picture_processor(pixtral, PixtralImageProcessorPil(), whole)
    processor.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rng = fresh_rng()
    words = ("a red star", "étoile", "[IMG]", "<|im_end|>", "猫", " ", "x" * 300)
    for count in (1, 3):
        prompts = [" ".join(rng.choice(words, int(rng.integers(0, 5)))) for _ in range(count)]
        read, expected = (
            reader.apply_chat_template(
                format_input(prompts), add_generation_prompt=False, tokenize=True,
                return_dict=True, return_tensors="pt", padding="max_length", truncation=True,
                max_length=600,
            )
            for reader in (tokenizer, processor)
        )  # fmt: skip
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(read[name], expected[name])
