"""Decoding round what is pasted: as the whole decode, for random masks and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.edits.direct import request_of
from maskserve_common.config import Config
from maskserve_common.contracts.meta import event_meta, final_meta
from maskserve_common.contracts.postprocess_context import PostprocessContext
from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import EngineFailed
from maskserve_common.imaging.masks import active_tokens, component_boxes
from maskserve_engine.families.registry import load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_engine.stages.vae_pieces import MixedNorm, Pieces, PixelBox, plan_pieces
from maskserve_triton.decoder import EditDecoder, ToDecode
from tests.fakes.jobs import config_of
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng, fresh_seed

pytestmark = pytest.mark.spread("model", sort=is_unet)

Pixels = NDArray[np.uint8]
Latents = NDArray[np.float32]


def random_box(rng: np.random.Generator, size: tuple[int, int]) -> PixelBox:
    top, left = (int(rng.integers(side)) for side in size)
    bottom, right = (
        int(rng.integers(low + 1, side + 1)) for low, side in zip((top, left), size, strict=True)
    )
    return PixelBox(top, left, bottom, right)


@pytest.mark.parametrize("seed", range(40))
def test_planned_pieces_cover_what_is_wanted_and_count_nothing_twice(seed: int) -> None:
    rng = np.random.default_rng([seed, fresh_seed()])
    size = (int(rng.integers(4, 70)), int(rng.integers(4, 70)))
    boxes = [random_box(rng, size) for _ in range(int(rng.integers(1, 17)))]
    pieces = plan_pieces(boxes, size, halos=(2, 2, 2), spread=int(rng.integers(4)))
    covered = np.zeros(size, int)
    for box in pieces.edited_boxes:
        covered[box.slices] = 1
    assert all(covered[box.slices].all() for box in boxes)
    for level in range(3):
        counted = np.zeros(pieces.at(level), int)
        for box in pieces.edited_boxes:
            counted[pieces.changed(box, level).slices] += 1
        assert counted.max() <= 1
        for box in pieces.probes:
            assert not counted[box.scaled(1 << level).slices].any()
    assert (
        pieces.share
        <= plan_pieces([PixelBox(0, 0, *size)], size, halos=(2, 2, 2), spread=0).share * 2
    )


def test_a_gpu_decodes_small_pictures_as_a_whole() -> None:
    """There the host starts a piece's operations more slowly than the device runs all of them."""
    box = PixelBox(0, 0, 16, 16)
    small, large = (
        plan_pieces([box], (side, side), halos=(4,) * 4, spread=1) for side in (64, 128)
    )
    wide = plan_pieces([PixelBox(0, 0, 90, 90)], (128, 128), halos=(4,) * 4, spread=1)
    pays = [[of.pay(0.7, 8, device) for of in (small, large, wide)] for device in ("cpu", "cuda")]
    assert pays == [[True, True, True], [False, True, False]]
    assert not large.pay(large.share, 8, "cpu")


@pytest.mark.parametrize("model", ["fill", "sd-base", "sdxl-fill"])
def test_with_the_norms_of_the_edit_itself_pieces_are_its_whole_decode(
    model: str, tiny_fill: Path, tiny_unets: dict[str, Path]
) -> None:
    """And a halo as wide as what convolutions read: nothing else may differ."""
    decoder = load_decoder(config_of({"fill": tiny_fill, **tiny_unets}[model]))
    assert decoder.has_pieces
    rng = fresh_rng()
    for _ in range(6):
        # Cells of one latent each: what a box leaves of one is exact, no share of its sum.
        size = (int(rng.integers(6, 17)), int(rng.integers(6, 17)))
        latents = rng.standard_normal((decoder.latents.channels, *size), dtype=np.float32)
        boxes = [random_box(rng, size) for _ in range(int(rng.integers(1, 4)))]
        pieces = decoder.pieces(boxes, size, halo=16, spread=0)
        decode_pieces = decoder.decode_pieces(
            latents, replace(pieces, probes=()), decoder.sums(latents)
        )
        expected = decoder.decode(latents)
        for box in boxes:
            part = box.scaled(decoder.latents.pixels).slices
            assert int(np.abs(decode_pieces[part].astype(int) - expected[part]).max()) <= 1


def test_the_norms_of_the_edit_itself_are_group_norms(tiny_fill: Path) -> None:
    """Whatever is counted inside of pieces and whatever outside."""
    decoder = load_decoder(config_of(tiny_fill))
    rng, size = fresh_rng(), (16, 16)
    latents = rng.standard_normal((decoder.latents.channels, *size), dtype=np.float32)
    middle, template = decoder._middle(latents), decoder.sums(latents)
    pieces = Pieces(
        (PixelBox(2, 3, 9, 8), PixelBox(10, 10, 16, 16)),
        size,
        (2, 2, 2),
        1,
        (PixelBox(0, 12, 2, 14),),
    )
    norm = decoder.vae.decoder.up_blocks[0].resnets[0].norm1
    maps = [middle[(..., *pieces.outer(box, 0).slices)] for box in pieces.boxes]
    results = MixedNorm(template, pieces, torch.device("cpu"))(norm, maps, 0)
    whole = norm(middle)
    for piece, box in zip(results, pieces.boxes, strict=True):
        torch.testing.assert_close(
            piece, whole[(..., *pieces.outer(box, 0).slices)], atol=1e-4, rtol=1e-4
        )


def psnr(result: Pixels, expected: Pixels) -> float:
    error = float(np.square(result.astype(float) - expected).mean())
    return 99.0 if error == 0 else 10 * float(np.log10(255**2 / error))


@pytest.fixture(scope="module")
def demo() -> tuple[Config, Decoder, Callable[[Pixels], Latents]]:
    """The demo model's decoder, and latents of a picture by its encoder."""
    config = config_of(DEMO_MODEL)
    decoder, encoder = load_decoder(config), load_encoder(config)

    def latents_of(pixels: Pixels) -> Latents:
        moments, space = encoder.moments(pixels), decoder.latents
        return (moments[: len(moments) // 2] - np.float32(space.shift)) * np.float32(space.scale)

    return config, decoder, latents_of


def scattered(rng: np.random.Generator) -> Pixels:
    mask = np.zeros((128, 128), np.uint8)
    for _ in range(int(rng.integers(1, 4))):
        top, left, high, wide = (
            int(n) for n in (*rng.integers(0, 112, 2), *rng.integers(4, 40, 2))
        )
        mask[top : top + high, left : left + wide] = 255
    return mask


@pytest.mark.parametrize(
    ("seed", "worst"), [(0, 40.0), pytest.param(None, 30.0, marks=pytest.mark.slow)]
)
def test_cached_edits_of_the_demo_model_look_as_decoded_whole(
    demo: tuple[Config, Decoder, Callable[[Pixels], Latents]], seed: int | None, worst: float
) -> None:
    """The bars of the default halo: 45 dB in the mask, 40 dB in the worst of random masks. Masks
    that were never tried may be worse: of 308 the worst had 42 dB.
    """
    config, decoder, latents_of = demo
    rng, edits = np.random.default_rng(seed), held_out_edits(200)
    psnrs = []
    for number in rng.choice(200, 24, replace=False):
        edit, other = edits[number], edits[int(rng.integers(200))]
        mask = edit.mask * np.uint8(255) if rng.random() < 0.5 else scattered(rng)
        answer = edit.target if rng.random() < 0.5 else other.target
        template, painted = latents_of(edit.source), latents_of(answer)
        active = np.zeros(16 * 16, bool)
        active[active_tokens(mask, 8, ring=1)] = True
        latents = np.where(
            active.reshape(16, 16).repeat(2, 0).repeat(2, 1), painted, template
        ).astype(np.float32)
        boxes = [
            PixelBox(*(n // 4 for n in b[:2]), *(-(-n // 4) for n in b[2:]))
            for b in component_boxes(mask, 8)
        ]
        halo = config.stages.decode_halo
        pieces = decoder.pieces(boxes, (32, 32), halo=halo, spread=3)
        if pieces.share >= 0.7:
            continue
        part = decoder.decode_pieces(latents, pieces, decoder.sums(template))
        psnrs.append(psnr(part[mask > 0], decoder.decode(latents)[mask > 0]))
    assert len(psnrs) >= 5
    assert float(np.median(psnrs)) >= 45.0
    assert min(psnrs) >= worst


class Edits:
    """Events of edits of one template, at the decoder of a worker."""

    def __init__(self, folder: Path, model: Path, **stages: int) -> None:
        config = config_of(model)
        self.config = replace_stages(config, folder, **stages)
        spec = load_spec(str(model), config.model.native_resolution)
        self.plain = load_decoder(config)
        self.decoder = EditDecoder(self.plain, spec, self.config)
        self.rng = fresh_rng()
        self.pixels = self.rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        self.moments = load_encoder(config).moments(self.pixels)
        self.mask = np.zeros((64, 64), np.uint8)
        self.mask[8:24, 10:30] = 255

    def request(self, **settings: Any) -> EditRequest:
        edit_settings = EditSettings(**{"mask_ring": 1, **settings})
        edit_request = request_of(self.pixels, "", edit_settings, 1, "mine")
        return replace(edit_request, edit_boxes=component_boxes(self.mask, 8))

    def decode(
        self, meta: bytes, edit: EditRequest, latents: Latents | None = None
    ) -> tuple[Pixels, bool]:
        """Pixels, and whether all were decoded, as META says and as they are."""
        x = self.latents() if latents is None else latents
        context = PostprocessContext(edit.to_json(), b"source", b"paste", True).pack()
        pixels, meta_bytes = self.decoder.decode(x, meta, context)
        whole = bool((pixels == self.plain.decode(x)).all())
        values = json.loads(meta_bytes)
        if values["event"] == "final":
            assert (values["decoded"] == 1.0) == whole
            assert {**values, "decoded": 1.0} == json.loads(meta)
        else:
            assert meta_bytes == meta
        return pixels, whole

    def latents(self) -> Latents:
        return self.rng.standard_normal((4, 16, 16), dtype=np.float32)

    def final(self, edit: EditRequest, cache: str = "hit") -> bytes:
        return final_meta(edit, "w", "m", {"cache": cache}, {})


def replace_stages(config: Config, folder: Path, **stages: int) -> Config:
    stages_config = msgspec.structs.replace(config.stages, **stages)
    return msgspec.structs.replace(config, stages=stages_config, runtime_dir=str(folder))


def test_who_is_decoded_in_pieces(tmp_path: Path, tiny_fill: Path) -> None:
    edits = Edits(tmp_path, tiny_fill)
    folder = MomentsFolder(tmp_path)
    folder.clear()
    edit = edits.request()
    preview = event_meta("preview", 1, 4, "mine")
    assert edits.decode(edits.final(edit), edit)[1], "the template is not known"
    folder.write(edit.pixels_id, edits.moments)
    assert edits.decode(preview, edit)[1], "a preview has the template decoded for nobody"
    assert edits.decode(edits.final(edit, "miss"), edit)[1]
    pixels, whole = edits.decode(edits.final(edit), edit)
    assert not whole
    assert not pixels[40:, 40:].any()
    assert not edits.decode(preview, edit)[1]
    folder.drop(edit.pixels_id)
    assert not edits.decode(edits.final(edit), edit)[1], "what is kept needs no file"
    for settings in ({"reproducible": True}, {"cache": "off"}):
        request = edits.request(**settings)
        assert edits.decode(edits.final(request), request)[1]
        assert edits.decode(preview, request)[1]
    edits.mask[:] = 255
    everywhere = edits.request()
    assert edits.decode(edits.final(everywhere), everywhere)[1]
    assert edits.decode(edits.final(edit), replace(edit, edit_boxes=()))[1]


def test_an_edit_that_stepped_down_is_decoded_with_the_ring_that_it_had(
    tmp_path: Path, tiny_fill: Path
) -> None:
    """META says it; what the edit asked for is another."""
    edits = Edits(tmp_path, tiny_fill)
    MomentsFolder(tmp_path).clear()
    request, took = edits.request(mask_ring=0), edits.request(mask_ring=1)
    MomentsFolder(tmp_path).write(request.pixels_id, edits.moments)
    latents = edits.latents()
    stepped = final_meta(request, "w", "m", {"cache": "hit", "mask_ring": 1}, {})
    result, _ = edits.decode(stepped, request, latents)
    np.testing.assert_array_equal(result, edits.decode(edits.final(took), took, latents)[0])
    assert (result != edits.decode(edits.final(request), request, latents)[0]).any()


@pytest.mark.parametrize("stages", [{"decode_halo": 0}, {"decode_bytes": 0}])
def test_it_can_be_switched_off(tmp_path: Path, tiny_fill: Path, stages: dict[str, int]) -> None:
    edits = Edits(tmp_path, tiny_fill, **stages)
    MomentsFolder(tmp_path).clear()
    edit = edits.request()
    MomentsFolder(tmp_path).write(edit.pixels_id, edits.moments)
    whole = edits.decode(edits.final(edit), edit)[1]
    assert whole == ("decode_halo" in stages), "without room a template is decoded for each edit"


def test_equal_edits_give_equal_pixels_whatever_came_between(
    tmp_path: Path, tiny_fill: Path
) -> None:
    edits = Edits(tmp_path, tiny_fill)
    edit, latents = edits.request(), edits.latents()
    MomentsFolder(tmp_path).clear()
    MomentsFolder(tmp_path).write(edit.pixels_id, edits.moments)
    first, _ = edits.decode(edits.final(edit), edit, latents)
    for _ in range(3):
        edits.decode(edits.final(edit), edit)
    again, _ = edits.decode(edits.final(edit), edit, latents)
    np.testing.assert_array_equal(first, again)


def test_a_file_that_is_broken_is_none(tmp_path: Path) -> None:
    folder = MomentsFolder(tmp_path)
    folder.clear()
    assert folder.read("0f") is None
    (tmp_path / "moments" / "0f.npy").write_bytes(b"\x93NUMPY")
    assert folder.read("0f") is None
    folder.drop("0f")
    folder.drop("0f")
    moments = np.ones((4, 2, 2), np.float32)
    folder.write("0f", moments)
    np.testing.assert_array_equal(folder.read("0f"), moments)
    MomentsFolder(tmp_path).clear()
    assert folder.read("0f") is None


@pytest.mark.parametrize("together", ["on", "auto"])
def test_events_decoded_together_are_as_each_alone(
    tmp_path: Path, tiny_fill: Path, together: str
) -> None:
    """Dense edits share calls of the VAE, on a CPU only where that is configured; reproducible ones
    do not, nor those in pieces.
    """
    edits = Edits(tmp_path, tiny_fill)
    stages = msgspec.structs.replace(edits.config.stages, vae_batches=together)
    config = msgspec.structs.replace(edits.config, stages=stages)
    spec = load_spec(str(tiny_fill), config.model.native_resolution)
    decoder = EditDecoder(edits.plain, spec, config)
    folder = MomentsFolder(tmp_path)
    folder.clear()
    folder.write(edits.request().pixels_id, edits.moments)
    kinds = [("miss", False), ("hit", False), ("miss", True), ("miss", False), ("hit", True)]
    work, expected = [], []
    for cache, exact in kinds:
        edit = edits.request(reproducible=exact)
        context = PostprocessContext(edit.to_json(), b"source", b"paste", True).pack()
        event = ToDecode(edits.latents(), edits.final(edit, cache), context)
        work.append(event)
        expected.append(decoder.decode(*event)[0])
    results = list(decoder.decode_all(work))
    for (cache, exact), result, alone in zip(kinds, results, expected, strict=True):
        assert not isinstance(result, Exception), result
        pixels, meta = result
        shares = together == "on" and cache == "miss" and not exact
        assert json.loads(meta)["decode_batch"] == (2 if shares else 1)
        if shares:
            assert np.abs(pixels.astype(int) - alone).max() <= 1
        else:
            np.testing.assert_array_equal(pixels, alone)


def test_an_event_that_cannot_be_decoded_harms_no_other(tmp_path: Path, tiny_fill: Path) -> None:
    edits = Edits(tmp_path, tiny_fill)
    MomentsFolder(tmp_path).clear()
    edit = edits.request()
    context = PostprocessContext(edit.to_json(), b"source", b"paste", True).pack()
    good = ToDecode(edits.latents(), edits.final(edit, "miss"), context)
    bad = good._replace(latents=np.zeros((3, 16, 16), np.float32))
    first, second, third = edits.decoder.decode_all([good, bad, good])
    assert isinstance(second, Exception)
    for outcome in (first, third):
        assert not isinstance(outcome, Exception), outcome
        np.testing.assert_array_equal(outcome[0], edits.plain.decode(good.latents))


@pytest.mark.parametrize("value", [np.float32(3e38), np.float32(np.nan)])
@pytest.mark.parametrize("together", ["on", "off"])
@pytest.mark.parametrize("cache", ["miss", "hit"])
def test_a_picture_whose_numbers_overflow_is_an_error_and_harms_no_other(
    tmp_path: Path, tiny_fill: Path, cache: str, together: str, value: np.float32
) -> None:
    """Whole, in a call with others, and in pieces."""
    edits = Edits(tmp_path, tiny_fill)
    stages = msgspec.structs.replace(edits.config.stages, vae_batches=together)
    config = msgspec.structs.replace(edits.config, stages=stages)
    spec = load_spec(str(tiny_fill), config.model.native_resolution)
    decoder = EditDecoder(edits.plain, spec, config)
    folder = MomentsFolder(tmp_path)
    folder.clear()
    folder.write(edits.request().pixels_id, edits.moments)
    edit = edits.request()
    context = PostprocessContext(edit.to_json(), b"source", b"paste", True).pack()
    good = ToDecode(edits.latents(), edits.final(edit, cache), context)
    bad = good._replace(latents=np.full_like(good.latents, value))
    alone, _ = decoder.decode(*good)
    first, second, third = decoder.decode_all([good, bad, good])
    assert isinstance(second, EngineFailed)
    assert "overflowed in the VAE's decoder" in str(second)
    for outcome in (first, third):
        assert not isinstance(outcome, Exception), outcome
        assert np.abs(outcome[0].astype(int) - alone).max() <= 1
    with pytest.raises(EngineFailed, match="overflowed"):
        decoder.decode(*bad)


def test_a_pixel_beyond_all_numbers_is_not_white(tiny_fill: Path) -> None:
    """Only what the VAE's last layer adds is infinite."""
    config = config_of(tiny_fill)
    spec = load_spec(str(tiny_fill), config.model.native_resolution)
    decoder = Decoder.load(spec, config)
    with torch.inference_mode():
        decoder.vae.decoder.conv_out.bias.fill_(float("inf"))
    with pytest.raises(EngineFailed, match="overflowed"):
        decoder.decode(np.zeros((spec.latent_channels, 8, 8), np.float32))
