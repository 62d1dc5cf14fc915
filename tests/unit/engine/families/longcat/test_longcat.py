"""The particulars of LongCat-Image and LongCat-Image-Edit: prompts that are read in two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskserve_common.errors import InvalidRequest
from tests.fakes.tiny_longcat import LENGTH
from tests.support.cached_rows import assert_equal
from tests.support.draws import fresh_rng
from tests.support.family_cases import FamilyModel

PIECES = (
    "a sign",
    "don't",
    '"OPEN"',
    "'so'",
    "“开门”",
    "‘x’",
    "it says",
    '"',
    "“",
    "",
    "12 o'clock",
)
"""Parts of drawn prompts. The pipeline exchanges words with apostrophes where there are two."""


@pytest.fixture(params=["longcat-image", "longcat-image-edit"])
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


def embeds_of(model: FamilyModel, prompt: str, pixels: Any) -> Any:
    """The encoder's states, and the pipeline's."""
    picture = model.adapter.spec.encoder_picture
    pictures, more = list[Any](), dict[str, Any]()
    if picture is not None:
        size = picture.size(*pixels.shape[:2])
        image = model.pipeline.image_processor.resize(Image.fromarray(pixels), *size)
        pictures, more = [pixels], {"image": image}
    embeds = model.encoder.encode_prompt(prompt, pictures)["prompt_embeds"]
    expected, _ = model.pipeline.encode_prompt(prompt, **more)
    return embeds, expected[0].detach().numpy()


def test_quoted_text_is_read_as_by_the_pipeline(model: FamilyModel) -> None:
    rng, pixels = fresh_rng(), model.edit(0).pixels
    for _ in range(12):
        words = [PIECES[int(at)] for at in rng.integers(0, len(PIECES), 4)]
        apostrophes = {word for word in words if word in ("don't", "12 o'clock")}
        if len(apostrophes) < 2:
            assert_equal(*embeds_of(model, " ".join(words), pixels))


def test_words_with_apostrophes_stay_where_they_are(model: FamilyModel) -> None:
    text: Any = model.encoder.text_encoders["text_encoder"]
    prompt = "it's what it isn't: don't say 'no'"
    quoted = [token for letter in "'no'" for token in text.tokens(letter)]
    assert text.words(prompt) == text.tokens(prompt.removesuffix("'no'")) + quoted


def test_a_long_prompt_is_cut(model: FamilyModel) -> None:
    """The pipeline of the edit model fails there."""
    pixels, text = model.edit(0).pixels, model.encoder.text_encoders["text_encoder"]
    prompt = "a cat " * LENGTH
    read = text.read_of(prompt)
    assert (read.used, read.used + read.cut) == (LENGTH, len(prompt))
    pictures = [pixels] if model.adapter.spec.encoder_picture else []
    whole, cut = (
        model.encoder.encode_prompt(words, pictures)["prompt_embeds"]
        for words in (prompt, prompt[:LENGTH])
    )
    assert_equal(whole, cut)


def test_a_prompt_has_the_counted_tokens(model: FamilyModel) -> None:
    """Those of the source come first, and are the same beside any prompt."""
    case, spec = model.edit(0), model.adapter.spec
    height, width = (side // spec.vae_scale_factor for side in case.mask.shape)
    picture = spec.encoder_picture_tokens(height, width)
    assert (picture > 0) == spec.semantics.reference
    first, second = (embeds_of(model, prompt, case.pixels)[0] for prompt in ("", "a red star"))
    assert len(first) == len(second) == picture + spec.text_tokens(LENGTH)
    np.testing.assert_allclose(first[:picture], second[:picture], atol=1e-5)
    assert np.abs(first[picture:] - second[picture:]).max() > 0.1


def test_a_prompt_that_names_a_pictures_place_is_refused(
    family_model: Callable[[str], FamilyModel],
) -> None:
    model = family_model("longcat-image-edit")
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt("a cat <|image_pad|>", [model.edit(0).pixels])
