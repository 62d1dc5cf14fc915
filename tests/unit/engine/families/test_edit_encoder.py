"""The encoder of a worker gives an edit the same bits whatever it has kept from others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.edits.direct import Direct, request_of
from maskserve_common.config import Config, ValuesConfig
from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import Overloaded
from maskserve_common.files.values import Values
from maskserve_common.imaging.masks import component_boxes
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.priming_prompt import PromptFile
from maskserve_engine.families.encoder import Encoder, TextEncoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.stages.encoded import Encoded, TokensRead
from maskserve_engine.stages.vae_pieces import PixelBox
from maskserve_triton.encoder import EditEncoder
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.run_encodings import RunEncodings
from tests.fakes.jobs import WORDS, Case, config_of, random_case
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng
from tests.support.text_loras import of_text, served

pytestmark = pytest.mark.spread("model", sort=is_unet)

Make = Callable[..., EditEncoder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes the encoder of a worker that serves a model."""
    encoders = []

    def make(encoder: Encoder, config: Config, **stages: int) -> EditEncoder:
        configured = structs.replace(config.stages, **stages)
        changed = structs.replace(config, stages=configured, runtime_dir=str(tmp_path))
        encoders.append(EditEncoder(encoder, changed))
        return encoders[-1]

    yield make
    for edit_encoder in encoders:
        edit_encoder.close()


def edit_of(case: Case, prompt: str | None = None) -> EditRequest:
    text = case.prompt if prompt is None else prompt
    return request_of(case.pixels, text, case.settings, case.seed, "edit")


def same(actual: Encoded, expected: Encoded) -> None:
    np.testing.assert_array_equal(actual.moments, expected.moments)
    np.testing.assert_array_equal(actual.masked_moments, expected.masked_moments)
    same_arrays(actual.conditioning, expected.conditioning)
    assert (actual.negative is None) == (expected.negative is None)
    same_arrays(actual.negative or {}, expected.negative or {})


def same_arrays(actual: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)


@pytest.mark.parametrize("budget", [0, 40_000, 2**30], ids=["none", "few", "all"])
@pytest.mark.parametrize("model", ["fill", "inpaint", "sdxl-base"])
def test_what_is_kept_is_what_would_be_made(
    model: str,
    budget: int,
    make: Make,
    tiny_fill: Path,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
) -> None:
    folder = {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}[model]
    config, rng = config_of(folder), fresh_rng()
    encoder = load_encoder(config)
    edit_encoder = make(encoder, config, prompt_bytes=budget, template_bytes=budget)
    pictures = [random_case(rng).pixels for _ in range(3)]
    seen_prompts, seen_pictures = set(), set()
    for _ in range(24):
        pixels = pictures[rng.integers(3)]
        mask = (rng.random(pixels.shape[:2]) < 0.5).astype(np.uint8) * 255
        negative = str(rng.choice(WORDS)) if model != "fill" and rng.random() < 0.5 else None
        settings = EditSettings(negative_prompt=negative)
        case = Case(pixels, mask, str(rng.choice(WORDS)), settings, 1)
        edit = edit_of(case)
        actual, report = edit_encoder.encode(edit, pixels, mask)
        same(actual, encoder.encode(pixels, mask, case.prompt, negative))
        texts = {(case.prompt, False), *([(negative, True)] if negative is not None else [])}
        if budget == 2**30:
            assert report.prompt == ("kept" if texts <= seen_prompts else "made")
            assert report.template == ("kept" if edit.pixels_id in seen_pictures else "made")
        if budget == 0:
            assert (report.prompt, report.template) == ("made", "made")
        seen_prompts |= texts
        seen_pictures.add(edit.pixels_id)
        assert edit_encoder.prompts.nbytes <= budget
        assert edit_encoder.pictures.nbytes <= budget


@pytest.mark.parametrize("model", ["inpaint", "sdxl-base"])
def test_without_a_mask_the_source_is_encoded_once_and_without_one_nothing_is(
    model: str, make: Make, tiny_inpaint: Path, tiny_unets: dict[str, Path]
) -> None:
    folder = {"inpaint": tiny_inpaint, **tiny_unets}[model]
    config, rng = config_of(folder), fresh_rng()
    encoder = load_encoder(config)
    edit_encoder, case = make(encoder, config), random_case(rng)
    full, none = np.full_like(case.mask, 255), np.zeros((0, 0, 3), np.uint8)
    whole = EncoderInput(replace(edit_of(case), kind="edit"), case.pixels, full)
    generation = replace(edit_of(case), kind="generate", template_id="", pixels_id="")
    for template in ("made", "kept"):
        results = list(edit_encoder.encode_all([whole, EncoderInput(generation, none, full)]))
        (edited, edited_report), (blank, blank_report) = results  # type: ignore[misc]
        np.testing.assert_array_equal(edited.moments, encoder.moments(case.pixels))
        assert edited_report.template == template
        assert blank.moments.shape == edited.moments.shape
        assert not blank.moments.any()
        assert blank_report.template is None
        same_arrays(blank.conditioning, edited.conditioning)


def test_an_empty_prompt_without_a_source_is_no_priming_prompt(tmp_path: Path) -> None:
    """Models whose prompts are about a picture have none."""
    config = structs.replace(
        config_of(build_tiny_qwen_image21(tmp_path / "model")), runtime_dir=str(tmp_path)
    )
    edit_encoder, case = EditEncoder.load(config), random_case(fresh_rng())
    mask, none = np.full((32, 64), 255, np.uint8), np.zeros((0, 0, 3), np.uint8)
    edit = replace(edit_of(case, ""), kind="generate", template_id="", pixels_id="")
    for prompt in ("made", "kept"):
        encoded, report = edit_encoder.encode(edit, none, mask)
        same_arrays(encoded.conditioning, load_encoder(config).encode_prompt(""))
        assert report.prompt == prompt
    edit_encoder.close()


def test_what_an_edit_still_reads_outlives_its_eviction(make: Make, tiny_fill: Path) -> None:
    config, rng = config_of(tiny_fill), fresh_rng()
    encoder = load_encoder(config)
    one, other = random_case(rng), random_case(rng)
    size = encoder.template(one.pixels).nbytes
    edit_encoder = make(encoder, config, template_bytes=size)
    reading, _ = edit_encoder.encode(edit_of(one), one.pixels, one.mask)
    edit_encoder.encode(edit_of(other), other.pixels, other.mask)
    edit_encoder.encode(edit_of(other), other.pixels, other.mask)
    same(reading, encoder.encode(one.pixels, one.mask, one.prompt))
    _, again = edit_encoder.encode(edit_of(one), one.pixels, one.mask)
    assert again.template == ("made" if encoder.template(other.pixels).nbytes <= size else "kept")


def test_equal_prompts_of_different_lengths_never_share(make: Make, tiny_fill: Path) -> None:
    short = config_of(tiny_fill, model={"max_sequence_length": 16})
    long = config_of(tiny_fill, model={"max_sequence_length": 32})
    one, other = (make(load_encoder(config), config) for config in (short, long))
    other.prompts._cache = one.prompts._cache  # as if one process kept those of both
    case = random_case(fresh_rng())
    for edit_encoder, length in ((one, 16), (other, 32), (one, 16)):
        actual, _ = edit_encoder.encode(edit_of(case, "a red star"), case.pixels, case.mask)
        assert actual.conditioning["prompt_embeds"].shape[0] == length


def test_prompts_with_loras_are_kept_apart(tmp_path: Path, make: Make, tiny_fill: Path) -> None:
    files = {name: of_text("text_encoder", rank=rank) for name, rank in (("one", 2), ("two", 4))}
    config, [one, two] = served(tmp_path, tiny_fill, files)
    encoder = load_encoder(config)
    edit_encoder, fresh = make(encoder, config), make(encoder, config, prompt_bytes=0)
    case = random_case(fresh_rng())
    plain = replace(case, settings=EditSettings())
    mixes = [(), (one,), (two,), (one, two), (structs.replace(one, scale=0.5),)]
    pooled = []
    for loras in mixes:
        edit = replace(edit_of(plain, "a red star"), loras=loras)
        actual, first = edit_encoder.encode(edit, case.pixels, case.mask)
        again, second = edit_encoder.encode(edit, case.pixels, case.mask)
        expected, _ = fresh.encode(edit, case.pixels, case.mask)
        same(actual, expected)
        same(again, expected)
        assert (first.prompt, second.prompt) == ("made", "kept")
        pooled.append(expected.conditioning["pooled"].tobytes())
    assert len(set(pooled)) == len(mixes)
    for nothing in (structs.replace(one, scale=0.0), structs.replace(one, text=False)):
        edit = replace(edit_of(plain, "a red star"), loras=(nothing,))
        actual, report = edit_encoder.encode(edit, case.pixels, case.mask)
        assert report.prompt == "kept"
        assert actual.conditioning["pooled"].tobytes() == pooled[0]


def test_private_prompts_are_kept_for_their_key_alone(make: Make, tiny_fill: Path) -> None:
    config, case = config_of(tiny_fill), random_case(fresh_rng())
    edit_encoder = make(load_encoder(config), config)

    def how(name: str, *, private: bool) -> str:
        edit_settings = EditSettings(private_prompt=private)
        edit = replace(edit_of(replace(case, settings=edit_settings), "a secret"), request_id=name)
        return edit_encoder.encode(edit, case.pixels, case.mask)[1].prompt

    assert [how("one!a", private=True), how("one!b", private=True)] == ["made", "kept"]
    assert [how("two!a", private=True), how("a", private=True)] == ["made", "made"]
    assert [how("two!b", private=False), how("three!b", private=False)] == ["made", "kept"]
    assert how("three!c", private=True) == "made"


def test_the_empty_prompt_is_one_of_them(tmp_path: Path, tiny_fill: Path) -> None:
    encoder = EditEncoder.load(structs.replace(config_of(tiny_fill), runtime_dir=str(tmp_path)))
    case = random_case(fresh_rng())
    actual, report = encoder.encode(edit_of(case, ""), case.pixels, case.mask)
    assert report.prompt == "kept"
    written = PromptFile(tmp_path).read()
    assert written is not None
    same_arrays(written, actual.conditioning)
    encoder.close()


def test_a_template_without_an_edit_is_encoded_once(make: Make, tiny_fill: Path) -> None:
    """So is one that is primed: its masked picture is the picture itself."""
    config = config_of(tiny_fill)
    encoder = load_encoder(config)
    case = random_case(fresh_rng())
    nothing = np.zeros_like(case.mask)
    actual, _ = make(encoder, config).encode(edit_of(case, ""), case.pixels, nothing)
    same(actual, encoder.encode(case.pixels, nothing, ""))


def worst(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Error of means, relative to their deviation."""
    means = len(expected) // 2
    error = np.square(actual[:means] - expected[:means]).mean()
    return float(np.sqrt(error / expected[:means].var()))


def test_a_masked_picture_is_encoded_round_its_mask(make: Make) -> None:
    """And is nearly what all of it gives; exact edits have all of it encoded."""
    config = config_of(DEMO_MODEL)
    encoder = load_encoder(config)
    edit_encoder, rng, errors = make(encoder, config), fresh_rng(), []
    scenes = held_out_edits(200)
    for number in rng.choice(len(scenes), 16, replace=False):
        scene = scenes[number]
        mask = scene.mask * np.uint8(255)
        expected = encoder.encode(scene.source, mask, "")
        for settings, how in (
            (EditSettings(), "whole"),  # its template was not there before
            (EditSettings(), "pieces"),
            (EditSettings(cache="require"), "pieces"),
            (EditSettings(cache="off"), "whole"),
            (EditSettings(reproducible=True), "whole"),
        ):
            case = Case(scene.source, mask, "", settings, 1)
            edit = replace(edit_of(case), edit_boxes=component_boxes(mask, 8))
            actual, report = edit_encoder.encode(edit, scene.source, mask)
            if how == "whole":
                assert report.masked == "whole"
                same(actual, expected)
            elif report.masked == "pieces":
                np.testing.assert_array_equal(actual.moments, expected.moments)
                errors.append(worst(actual.masked_moments, expected.masked_moments))
    assert len(errors) >= 8
    assert max(errors) <= 1e-3


@pytest.mark.parametrize("model", ["fill", "sd-fill"])
def test_pieces_that_see_everything_give_all_of_the_masked_picture(
    model: str, tiny_fill: Path, tiny_unets: dict[str, Path]
) -> None:
    """Their norms and their place are right: nothing is left but rounding."""
    encoder = load_encoder(config_of({"fill": tiny_fill, **tiny_unets}[model]))
    assert encoder.has_pieces
    rng = fresh_rng()
    pixels = rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)
    factor = encoder.spec.vae_scale_factor
    size = (64 // factor, 48 // factor)
    mask = np.zeros((64, 48), np.uint8)
    mask[10:30, 5:20] = 255
    box = PixelBox(10, 5, 30, 20).shrunk(factor)
    pieces = encoder.pieces([box], size, halo=64)
    everything = replace(pieces, probes=(), spread=64)
    masked_pieces = encoder.masked_pieces(pixels, mask, everything, encoder.template(pixels))
    np.testing.assert_allclose(masked_pieces, encoder.masked_moments(pixels, mask), atol=1e-4)


def test_everything_masked_is_encoded_as_a_whole(make: Make, tiny_fill: Path) -> None:
    config, case = config_of(tiny_fill), random_case(fresh_rng())
    encoder = load_encoder(config)
    edit_encoder, mask = make(encoder, config), np.full_like(case.mask, 255)
    edit = replace(edit_of(case), edit_boxes=component_boxes(mask, 8))
    for _ in range(2):
        actual, report = edit_encoder.encode(edit, case.pixels, mask)
        assert report.masked == "whole"
        same(actual, encoder.encode(case.pixels, mask, case.prompt))


@pytest.mark.slow  # the test above holds what is encoded
def test_an_edit_looks_the_same_whether_its_masked_picture_was_encoded_in_pieces(
    make: Make,
) -> None:
    """The bar: 45 dB in the mask of what the demo model paints, 40 dB in the worst of masks."""
    config = config_of(DEMO_MODEL, model={"torch_threads": 1}, cache={"enabled": False})
    direct = Direct(config)
    edit_encoder, rng, ratios = make(direct.encoder, config), fresh_rng(), []
    for number in rng.choice(96, 5, replace=False):
        scene = held_out_edits(int(number) + 1)[-1]
        mask = scene.mask * np.uint8(255)
        settings = EditSettings(
            num_inference_steps=4, guidance_scale=3.0, mask_ring=1, request_id="edit"
        )
        case = Case(scene.source, mask, scene.prompt, settings, 1)
        edit = replace(edit_of(case), edit_boxes=component_boxes(mask, 8))
        edit_encoder.encode(edit, scene.source, mask)
        encoded, report = edit_encoder.encode(edit, scene.source, mask)
        whole = direct.encoder.encode(scene.source, mask, scene.prompt)
        if report.masked == "whole":
            continue
        painted = [
            direct.decoder.decode(
                direct.denoise(
                    EditJob(
                        edit, mask, encoding.moments, encoding.masked_moments, encoding.conditioning
                    )
                ).latents
            )[mask > 0].astype(float)
            for encoding in (whole, encoded)
        ]
        error = max(float(np.square(painted[0] - painted[1]).mean()), 1e-9)
        ratios.append(10 * np.log10(255**2 / error))
    direct.engine.close(5.0)
    assert ratios
    assert np.median(ratios) >= 45.0
    assert min(ratios) >= 40.0


@pytest.mark.parametrize("aside", [False, True], ids=["one thread", "prompts aside"])
@pytest.mark.parametrize("model", ["fill", "inpaint", "sdxl-base"])
def test_edits_encoded_together_are_as_each_alone(
    model: str,
    aside: bool,
    tmp_path: Path,
    tiny_fill: Path,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
) -> None:
    folder = {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}[model]
    config, rng = config_of(folder), fresh_rng()
    encoder = load_encoder(config)
    stages = structs.replace(config.stages, vae_batches="on")
    config = structs.replace(config, stages=stages, runtime_dir=str(tmp_path))
    edit_encoder = EditEncoder(encoder, config, texts_aside=aside)
    for batch in range(4):
        work = []
        for number in range(6):
            pixels = random_case(rng).pixels
            mask = (rng.random(pixels.shape[:2]) < 0.5).astype(np.uint8) * 255
            negative = str(rng.choice(WORDS)) if model != "fill" and rng.random() < 0.5 else None
            edit_settings = EditSettings(negative_prompt=negative, reproducible=number % 3 == 0)
            # A text of its own: were all but one kept, that one would be encoded alone.
            case = Case(pixels, mask, f"{rng.choice(WORDS)} {batch} {number}", edit_settings, 1)
            work.append(EncoderInput(edit_of(case), pixels, mask))
        # All, before the encoder is asked again: a second thread has it until then.
        for edit, answer in zip(work, list(edit_encoder.encode_all(work)), strict=True):
            assert not isinstance(answer, Exception), answer
            actual, report = answer
            settings = edit.edit.settings
            expected = encoder.encode(
                edit.pixels, edit.edit_mask, edit.edit.prompt, settings.negative_prompt
            )
            if settings.reproducible:
                assert report.batch == 1
                same(actual, expected)
            else:
                assert report.batch >= 4
                near(actual, expected)
    edit_encoder.close()


def test_one_thread_alone_asks_the_tokenizers(
    tmp_path: Path, tiny_fill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer has the padding of its last call, from any thread."""
    config = structs.replace(config_of(tiny_fill), runtime_dir=str(tmp_path))
    edit_encoder = EditEncoder(load_encoder(config), config, texts_aside=True)
    threads = set()
    original = TextEncoder.read_of

    def read_of(encoder: TextEncoder, prompt: str) -> TokensRead:
        threads.add(threading.current_thread().name)
        return original(encoder, prompt)

    monkeypatch.setattr(TextEncoder, "read_of", read_of)
    case = random_case(fresh_rng())
    edit_encoder.encode(edit_of(case), case.pixels, case.mask)
    edit_encoder.close()
    assert len(threads) == 1
    assert threads.isdisjoint({threading.current_thread().name})


@pytest.mark.parametrize("model", ["fill", "sd-fill"])
def test_a_source_shares_the_call_of_its_masked_picture(
    model: str, tmp_path: Path, tiny_fill: Path, tiny_unets: dict[str, Path]
) -> None:
    """Where the VAE takes several pictures at once. What a reproducible edit reads was alone in its
    call, whatever was cached before; one at another time finds what it would have made.
    """
    config, rng = config_of({"fill": tiny_fill, **tiny_unets}[model]), fresh_rng()
    encoder, calls = load_encoder(config), list[tuple[int, int]]()
    encode_pictures = encoder.encode_pictures

    def counted(sources: Any, edits: Any) -> Any:
        calls.append((len(sources), len(edits)))
        return encode_pictures(sources, edits)

    setattr(encoder, "encode_pictures", counted)  # noqa: B010 - a method
    stages = structs.replace(config.stages, vae_batches="on")
    edit_encoder = EditEncoder(
        encoder, structs.replace(config, stages=stages, runtime_dir=str(tmp_path))
    )
    case = random_case(rng)
    mask = np.zeros_like(case.mask)
    mask[:16, :16] = 255
    expected, template = encoder.encode(case.pixels, mask, "a hat"), encoder.template(case.pixels)
    for reproducible, how, expected_calls in (
        (False, "made", [(1, 1)]),
        (False, "kept", [(0, 1)]),
        (True, "made", [(1, 0), (0, 1)]),
        (True, "kept", [(0, 1)]),
    ):
        calls.clear()
        settings = EditSettings(reproducible=reproducible, cache="off")
        edit = edit_of(replace(case, settings=settings), "a hat")
        actual, report = edit_encoder.encode(edit, case.pixels, mask)
        assert calls == expected_calls
        assert report.template == how
        (same if reproducible else near)(actual, expected)
        cached = edit_encoder.pictures.cached(edit.pixels_id)
        assert cached is not None
        assert cached.alone == reproducible
        if template.sums is not None:
            assert cached.sums is not None
            np.testing.assert_allclose(cached.sums.sums, template.sums.sums, rtol=1e-4, atol=1e-3)
    edit_encoder.close()


def test_pictures_that_share_no_call_are_as_before(
    make: Make, tiny_fill: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call of several that fails is made for each picture alone."""
    config = config_of(tiny_fill, stages={"vae_batches": "on"})
    encoder, case = load_encoder(config), random_case(fresh_rng())
    encode_pictures = encoder.encode_pictures

    def one_at_a_time(sources: Any, edits: Any) -> Any:
        if len(sources) + len(edits) > 1:
            raise MemoryError("too many")
        return encode_pictures(sources, edits)

    setattr(encoder, "encode_pictures", one_at_a_time)  # noqa: B010 - a method
    edit = edit_of(case)
    actual, report = make(encoder, config).encode(edit, case.pixels, case.mask)
    same(actual, encoder.encode(case.pixels, case.mask, case.prompt, case.settings.negative_prompt))
    assert report.template == "made"
    assert "too many" in caplog.text


def near(actual: Encoded, expected: Encoded) -> None:
    np.testing.assert_allclose(actual.moments, expected.moments, atol=2e-5)
    np.testing.assert_allclose(actual.masked_moments, expected.masked_moments, atol=2e-5)
    pairs = [(actual.conditioning, expected.conditioning)]
    pairs.append((actual.negative or {}, expected.negative or {}))
    for pair, rest in pairs:
        assert pair.keys() == rest.keys()
        for name, array in rest.items():
            np.testing.assert_allclose(pair[name], array, atol=2e-5)


def test_one_whose_lora_is_gone_harms_no_other(tmp_path: Path, make: Make, tiny_fill: Path) -> None:
    config, [lora] = served(tmp_path, tiny_fill, {"one": of_text("text_encoder", rank=2)})
    encoder = load_encoder(config)
    edit_encoder, rng = make(encoder, config), fresh_rng()
    missing = structs.replace(lora, version="0" * 16)
    cases = [random_case(rng) for _ in range(3)]
    work = [
        EncoderInput(
            replace(edit_of(replace(case, settings=EditSettings())), loras=loras),
            case.pixels,
            case.mask,
        )
        for case, loras in zip(cases, [(), (missing,), (lora,)], strict=True)
    ]
    encode_all = list(edit_encoder.encode_all(work))
    assert isinstance(encode_all[1], Overloaded)
    for number in (0, 2):
        assert not isinstance(encode_all[number], Exception), encode_all[number]


def test_prompts_that_fail_together_go_alone(
    make: Make, tiny_fill: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_fill)
    encoder = load_encoder(config)
    encode_prompts = encoder.encode_prompts

    def one_at_a_time(prompts: Any) -> Any:
        if len(prompts) > 1:
            raise MemoryError("too many")
        return encode_prompts(prompts)

    encoder.encode_prompts = one_at_a_time
    cases = [random_case(fresh_rng()) for _ in range(2)]
    work = [
        EncoderInput(edit_of(case, f"{number} stars"), case.pixels, case.mask)
        for number, case in enumerate(cases)
    ]
    for edit, answer in zip(work, make(encoder, config).encode_all(work), strict=True):
        assert not isinstance(answer, Exception), answer
        same(answer[0], encoder.encode(edit.pixels, edit.edit_mask, edit.edit.prompt))
    assert "too many" in caplog.text


@pytest.mark.parametrize("model", ["fill", "sdxl-base"])
def test_what_is_cut_of_a_prompt_is_told(
    model: str, make: Make, tiny_fill: Path, tiny_unets: dict[str, Path]
) -> None:
    folder = {"fill": tiny_fill, **tiny_unets}[model]
    config, rng = config_of(folder), fresh_rng()
    encoder = load_encoder(config)
    edits, case = make(encoder, config), random_case(rng)
    long = " ".join(rng.choice(WORDS, 600))
    negative = long if model != "fill" else None
    for prompt, away in (("a", None), (long, negative), (long, negative)):  # made, then kept
        case = replace(case, settings=EditSettings(negative_prompt=away))
        _, report = edits.encode(edit_of(case, prompt), case.pixels, case.mask)
        assert set(report.tokens) == {"prompt", *(["negative_prompt"] if away else [])}
        for name, text in (("prompt", prompt), ("negative_prompt", away)):
            for part, read in report.tokens.get(name, {}).items():
                text_encoder = encoder.text_encoders[part]
                ids = text_encoder.tokenizer(text, verbose=False).input_ids
                input_ids = text_encoder.tokenizer(
                    text, max_length=text_encoder.length, truncation=True
                ).input_ids
                assert (read.used, read.cut) == (len(input_ids), len(ids) - len(input_ids))
                field = "PROMPT" if name == "prompt" else "SETTINGS.negative_prompt"
                sentence = f"{field}: {part} reads {read.used} tokens and not the last {read.cut}"
                assert (sentence in report.warnings) == (read.cut > 0)
        assert bool(report.warnings) == (prompt == long)
        assert len(report.tokens["prompt"]) == 2
    assert report.meta["prompt_tokens"]["text_encoder"]["cut"] > 0
    json = type(report).from_json(report.to_json())
    assert json == report


@pytest.mark.parametrize("same_prompt", [False, True])
@pytest.mark.parametrize("model", ["fill", "inpaint"])
def test_a_run_encodes_a_picture_once_for_all_workers_of_a_host(
    model: str,
    same_prompt: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_fill: Path,
    tiny_inpaint: Path,
) -> None:
    """Five variants, each at a worker of its own, made the encoding five times."""
    config, rng = config_of({"fill": tiny_fill, "inpaint": tiny_inpaint}[model]), fresh_rng()
    encoder, calls = load_encoder(config), Counter[str]()
    for name in ("template", "encode_prompt"):
        function = getattr(encoder, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(encoder, name, counted)
    values = Values(ValuesConfig(str(tmp_path / "values")))
    values.begin("", "run")

    def new_workers() -> list[EditEncoder]:
        return [
            EditEncoder(
                encoder,
                structs.replace(config, runtime_dir=str(tmp_path / str(number))),
                run_encodings=RunEncodings(values, lambda: "of these stages"),
            )
            for number in range(6)
        ]

    case = random_case(rng)
    mask = (rng.random(case.pixels.shape[:2]) < 0.5).astype(np.uint8) * 255
    texts = [WORDS[0]] * 5 if same_prompt else [f"{WORDS[0]} {number}" for number in range(5)]
    edits = [edit_of(replace(case, prompt=text)) for text in texts]

    def variants(workers: Sequence[EditEncoder], run: str) -> list[Encoded]:
        inputs = [EncoderInput(edit, case.pixels, mask, None, run) for edit in edits]
        encoded = []
        for worker, edit_input in zip(workers[1:], inputs, strict=True):
            [result] = worker.encode_all([edit_input])
            assert not isinstance(result, Exception)
            encoded.append(result[0])
        return encoded

    alone = variants(new_workers(), "")
    assert calls == {"template": 5, "encode_prompt": 5}, "without the plan each worker encodes"
    workers = new_workers()
    calls.clear()
    maker = edit_of(replace(case, prompt=WORDS[0] if same_prompt else ""))
    [result] = workers[0].encode_all(
        [EncoderInput(maker, case.pixels, mask, None, "run", makes=True)]
    )
    assert not isinstance(result, Exception)
    shared = variants(workers, "run")
    assert calls == {"template": 1, "encode_prompt": 1 if same_prompt else 6}
    for actual, expected in zip(shared, alone, strict=True):
        same(actual, expected)
    values.end("", "run")
    assert values.stored().count == 0
    for worker in workers:
        worker.close()
