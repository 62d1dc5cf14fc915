"""docs/models.md says what is counted."""

from __future__ import annotations

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_studies.model_counts.command import (
    MODELS,
    RATIOS,
    Counted,
    bytes_table,
    edits_table,
    steps_table,
)


@pytest.fixture(scope="module")
def counted() -> dict[str, Counted]:
    return {name: Counted(model) for name, model in MODELS.items()}


def test_the_page_has_the_ranges_of_what_is_counted(counted: dict[str, Counted]) -> None:
    """From templates, with refresh steps in many steps and in few, by mask ratio."""
    page = (CHECKOUT / "docs" / "models.md").read_text(encoding="utf-8")
    models = counted.values()
    templates = [
        m.gains(m.spec.dense_steps.of(m.steps, prompt=True, side=False), template=True)
        for m in models
    ]
    refreshed = [m.gains(m.refresh_steps, template=False) for m in models]
    few = [gains for m, gains in zip(models, refreshed, strict=True) if m.steps == 4]
    many = [gains for m, gains in zip(models, refreshed, strict=True) if m.steps > 4]
    for group in (templates, many, few):
        for gains in zip(*group, strict=True):
            assert f"{min(gains):.1f} to {max(gains):.1f}" in page
    assert len(steps_table(counted).splitlines()) == len(edits_table(counted).splitlines())


def test_the_table_of_bytes_has_the_models_with_references(counted: dict[str, Counted]) -> None:
    lines = bytes_table(counted).splitlines()
    names = [name for name, count in counted.items() if count.work.context]
    assert [line.split("|")[1].strip() for line in lines[2:]] == names


def test_what_is_left_out_of_entries_is_computed_or_not_seen(counted: dict[str, Counted]) -> None:
    """Where the encoder is shown little that is little; without the outside fewer keys are read."""
    edit, plus = (counted[f"Qwen-Image-Edit{name}"] for name in ("", "-2509 and -2511"))
    for count, least, most in ((edit, 1.8, 6.5), (plus, 1.1, 2.0)):
        slower = [count.cached(m, reads_shown_tokens=False) / count.cached(m) for m in RATIOS]
        assert least < slower[-1] < slower[0] < most
        assert count.cached(0.2, outside=False) < count.cached(0.2)
        picture = count.work.tokens[0] - count.work.context
        assert count.entry() - count.entry(outside=False) == pytest.approx(
            count.entry() * picture / count.work.tokens[0]
        )


def test_encoders_run_once_for_each_pass(counted: dict[str, Counted]) -> None:
    """T5 and Qwen3 take two FLOPs of count weight for count token, and more for attention."""
    kontext, klein = counted["FLUX.1 Kontext"], counted["FLUX.2 klein 4B"]
    clip, t5 = kontext._text_encoders()
    [qwen3] = klein._text_encoders()
    assert clip < 0.01 * t5
    assert t5 == pytest.approx(2 * 512 * 4.6e9, rel=0.1)
    assert qwen3 == pytest.approx(2 * 512 * 27 * 101e6, rel=0.1)
    guided = counted["Qwen-Image"]
    [encoder_flops] = guided._text_encoders()
    assert guided.stage_flops - guided._vae() == pytest.approx(2 * encoder_flops)
