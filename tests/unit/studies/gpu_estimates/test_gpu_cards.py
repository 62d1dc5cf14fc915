"""Estimates of GPUs follow from counted work."""

from __future__ import annotations

from argparse import Namespace

import pytest

from maskserve_studies.gpu_estimates.cards import (
    CARDS,
    FORMS,
    H100,
    RTX_4090,
    Counted,
    edit_times,
    flux_between,
    flux_crop,
    flux_stages_s,
    offers,
    sdxl_stages_s,
    step_ms,
    tile_use,
)

ARGUMENTS = Namespace(bytes_reached=0.7, launch_us=6.0)
BF16, FP8, INT8, NF4 = FORMS
DENSE = Counted(4608, 59.5e12, 14.9e12, 23.8e9, 27e9, 15.4e9, 553)
"""A step of FLUX.1-dev, nearly as it is counted."""


def test_a_step_takes_its_flops_its_bytes_or_its_host() -> None:
    computes = Counted(0, 1e14, 0.0, 1e9, 1e9, 0.0, 100)
    assert step_ms(H100, computes, BF16, "cuDNN", ARGUMENTS) == pytest.approx(1e3 * 1e14 / 593.4e12)
    assert step_ms(H100, computes, FP8, "cuDNN", ARGUMENTS) == pytest.approx(1e3 * 1e14 / 1187.4e12)
    reads = Counted(0, 1e9, 0.0, 18e9, 5e9, 4e9, 100)
    bandwidth = 0.7 * 3.35e12
    assert step_ms(H100, reads, BF16, "cuDNN", ARGUMENTS) == pytest.approx(1e3 * 27e9 / bandwidth)
    unpacks = 27e9 + 9e9 * 3
    assert step_ms(H100, reads, INT8, "cuDNN", ARGUMENTS) == pytest.approx(
        1e3 * unpacks / bandwidth
    )
    waits = reads._replace(launches=10**5)
    assert step_ms(H100, waits, BF16, "cuDNN", ARGUMENTS) == pytest.approx(600.0)
    attends = Counted(0, 0.0, 1e14, 0.0, 0.0, 0.0, 0)
    assert step_ms(H100, attends, BF16, "FA3", ARGUMENTS) < step_ms(
        H100, attends, BF16, "cuDNN", ARGUMENTS
    )


def test_a_card_is_offered_what_it_holds() -> None:
    assert {offer.form for offer in offers(RTX_4090) if offer.model == "FLUX.1"} == {
        FP8,
        INT8,
        NF4,
    }
    assert {offer.attention for offer in offers(RTX_4090)} == {"FA2"}
    assert {(e.form, e.attention) for e in offers(H100) if e.model == "FLUX.1"} == {
        (form, kernel) for form in FORMS for kernel in ("cuDNN", "FA3")
    }


def test_dense_steps_are_near_what_others_have_published() -> None:
    """With one share for all cards a 4090 was at 2.2 times."""
    for card in CARDS:
        if card.published is not None:
            form = {"fp8": FP8, "bf16": BF16}[card.published.form]
            of = DENSE if form is BF16 else DENSE._replace(weights=11.9e9)
            times = [step_ms(card, of, form, kernel, ARGUMENTS) for kernel in card.attention]
            assert any(abs(ms / card.published.ms - 1) < 0.16 for ms in times), card.name


def test_few_tokens_fill_a_card_less_than_many() -> None:
    shares = [tile_use(tokens, H100.multiprocessors) for tokens in (450, 962, 4608, 10**6)]
    assert shares == sorted(shares)
    assert shares[0] < 0.85 * shares[2]
    assert 0.9 < shares[-1] <= 1.0


def test_a_step_between_refresh_steps_multiplies_no_text_and_moves_more() -> None:
    hit = Counted(962, 12e12, 1e12, 23.8e9, 1e9, 7e9, 667)
    between = flux_between(hit, 0.11)
    assert between.products < 0.55 * hit.products
    assert between.other_bytes > hit.other_bytes
    assert between.launches == hit.launches  # the change is added as the entry is placed


def test_stages_take_what_an_h200_took_and_more_on_slower_cards() -> None:
    by_name = {card.name: flux_stages_s(card) for card in CARDS}
    assert by_name["H200"] == pytest.approx(0.024 + 2 * 0.047 + 0.085)
    assert by_name["RTX 4090"] > by_name["L40S"] > by_name["H200"] > by_name["B200"]
    for card in CARDS:  # without T5, and both pictures in float32 at half the rate
        assert sdxl_stages_s(card) / by_name[card.name] == pytest.approx(0.273 / 0.203)


def test_an_edit_of_few_steps_gains_less() -> None:
    offer = next(item for item in offers(H100) if item.form is FP8)

    def time(offer: object, ratio: float | None, between_refreshes: bool = False) -> float:
        return 100.0 if ratio is None else 10.0 if between_refreshes else 20.0

    gains = []
    for steps in (28, 8, 4):
        dense, hit, first = edit_times(offer, 0.11, steps, 0.2, time)
        assert hit < first < dense
        gains.append(dense / first)
    assert gains == sorted(gains, reverse=True)
    assert (
        edit_times(offer, 0.11, 2, 0.2, time).first == edit_times(offer, 0.11, 2, 0.2, time).dense
    )


def test_a_crop_has_a_quarter_of_the_pictures_tokens() -> None:
    crop = flux_crop(DENSE)
    assert crop.tokens == 1024 + 512
    assert crop.weights == DENSE.weights
    assert crop.products < crop.tokens / DENSE.tokens * DENSE.products * 1.02
    assert crop.attention < DENSE.attention / 8
