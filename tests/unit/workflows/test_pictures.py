"""Nodes that compose pictures, beside brute force."""

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from maskserve_common.config import Config, LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import encode_png
from maskserve_engine.nodes.pictures import PictureNodes
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.pictures import (
    components,
    encode_mask,
    read_mask,
    read_picture,
)
from maskserve_workflows.values import Areas, Judgement
from maskserve_workflows.wire import pack_values, unpack_values
from tests.support.examples import examples
from tests.support.workflows import run_one

LIMITS = LimitsConfig()
NODES = PictureNodes(ModelSetup("", Config(limits=LIMITS)))


def run(node, **inputs):
    kind = NODE_TYPES[node]
    settings = {k: inputs.pop(k) for k in list(inputs) if k not in kind.inputs}
    table = kind.settings(**settings)
    all_settings = {name: getattr(table, name) for name in kind.settings.__struct_fields__}
    return run_one(NODES, node, inputs, all_settings)


def flooded(white):
    """The parts of a mask, pixel by pixel."""
    unvisited, parts = {tuple(point) for point in np.argwhere(white)}, []
    while unvisited:
        part, waiting = np.zeros_like(white), [min(unvisited)]
        unvisited.discard(waiting[0])
        while waiting:
            row, column = waiting.pop()
            part[row, column] = True
            for near in (
                (row - 1, column),
                (row + 1, column),
                (row, column - 1),
                (row, column + 1),
            ):
                if near in unvisited:
                    unvisited.discard(near)
                    waiting.append(near)
        parts.append(part)
    return parts


def picture(seed, side=32):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


@given(arrays(np.bool_, st.tuples(st.integers(1, 9), st.integers(1, 9))))
@examples(200)
def test_components_are_those_of_a_flood(white):
    parts, flood_parts = components(white), flooded(white)
    assert [part.white(white.shape).tobytes() for part in parts] == [
        x.tobytes() for x in flood_parts
    ]
    assert [part.area for part in parts] == [int(part.sum()) for part in flood_parts]
    boxes = [(r.min(), r.max() + 1, c.min(), c.max() + 1) for r, c in map(np.nonzero, flood_parts)]
    assert [part.box for part in parts] == boxes


@pytest.mark.parametrize(
    ("side", "every", "smallest", "message"),
    [
        (2048, 2, 0.0, "mask: is cut 2097152 times along its rows; accepted: up to 131072"),
        (512, 4, 0.0, "mask: has 16384 parts; accepted: up to 16"),
        (512, 4, 0.1, None),
    ],
)
def test_a_mask_of_specks_costs_little(side, every, smallest, message):
    """Each speck was a mask as large as the picture: 100 KB of them took 250 GB."""
    white = np.zeros((side, side), np.bool_)
    white[::every, ::every] = True
    if every == 2:
        white[1::2, 1::2] = True  # no two of them touch
    mask = encode_mask(white)
    tracemalloc.start()
    try:
        if message is None:
            assert run("split", mask=mask, smallest=smallest)["regions"] == Areas((), ())
        else:
            with pytest.raises(InvalidRequest, match=message):
                run("split", mask=mask, smallest=smallest)
        assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    finally:
        tracemalloc.stop()


def test_a_part_of_many_runs_is_joined_in_a_pass():
    """Each run looked at all runs of the row above: with combs of 2,000 teeth 60 million looks."""
    white = np.zeros((60, 4000), np.bool_)
    white[:, ::2] = True
    white[-1] = True
    looks = 0

    def count(frame, event, _):
        nonlocal looks
        looks += event == "line"
        return count

    previous_trace = sys.gettrace()
    sys.settrace(count)
    try:
        (part,) = components(white)
    finally:
        sys.settrace(previous_trace)
    assert part.area == int(white.sum())
    assert looks < 40 * 60 * 2000


def test_regions_that_stay_apart_are_of_one_wave():
    white = np.zeros((64, 64), np.bool_)
    white[:20, :20] = white[:16, 30:40] = white[50:60, 50:60] = True
    white[30, 5] = True  # too small
    areas = run("split", mask=encode_mask(white), smallest=0.01, apart=12)["regions"]
    assert [int(read_mask(mask, LIMITS).sum()) for mask in areas.masks] == [400, 160, 100]
    assert areas.waves == (0, 1, 0)
    assert (
        run("split", mask=encode_mask(white), smallest=0.01, apart=8)["regions"].waves == (0,) * 3
    )


def test_composing_takes_what_each_part_changed():
    source = picture(1)
    first, second = source.copy(), source.copy()
    first[:8, :8] = 255 - first[:8, :8]
    second[20:, 20:] = 255 - second[20:, 20:]
    parts = (encode_png(first), encode_png(second))
    composed = read_picture(
        run("compose", picture=encode_png(source), parts=parts)["picture"], LIMITS
    )
    expected = first.copy()
    expected[20:, 20:] = second[20:, 20:]
    assert np.array_equal(composed, expected)
    with pytest.raises(InvalidRequest, match="parts: is 16x16; accepted: 32x32, as the picture"):
        run("compose", picture=encode_png(source), parts=(encode_png(picture(2, 16)),))


def test_what_is_cut_out_goes_back_where_it_was():
    whole, white = picture(3), np.zeros((32, 32), np.bool_)
    white[10:20, 2:9] = True
    mask = encode_mask(white)
    cut = run("crop", picture=encode_png(whole), mask=mask, around=4)["picture"]
    assert np.array_equal(read_picture(cut, LIMITS), whole[6:24, :13])
    back = run("paste", picture=encode_png(whole), part=cut, mask=mask, around=4)["picture"]
    assert np.array_equal(read_picture(back, LIMITS), whole)
    with pytest.raises(InvalidRequest, match="mask: is empty"):
        run("crop", picture=encode_png(whole), mask=encode_mask(~white & white))


def test_masks_are_inverted_and_pictures_padded_and_outlined():
    white = np.eye(8, dtype=np.bool_)
    inverted = run("invert", mask=encode_mask(white))["mask"]
    assert np.array_equal(read_mask(inverted, LIMITS), ~white)
    padded = run("pad", picture=encode_png(picture(4)), left=3, bottom=2)["picture"]
    assert read_picture(padded, LIMITS).shape == (34, 35, 3)
    flat = np.zeros((16, 16, 3), np.uint8)
    flat[:, 8:] = 200
    rims = read_picture(run("outline", picture=encode_png(flat))["picture"], LIMITS)
    assert rims[:, 7:10].min() == 255
    assert rims[:, :6].max() == 0


def test_the_best_has_passed_or_the_highest_score():
    judgements = (Judgement(0.9, False), Judgement(0.5, True), Judgement(0.5, True))
    assert run("best", pictures=(b"a", b"b", b"c"), verdicts=judgements) == {
        "picture": b"b", "verdict": judgements[1],
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match="verdicts: are 1 for 2 pictures"):
        run("best", pictures=(b"a", b"b"), verdicts=judgements[:1])


def test_values_come_back_from_the_wire():
    values = {
        "picture": b"p", "mask": b"m", "name": "Änne", "verdict": Judgement(0.25, True),
        "regions": Areas((b"a", b"b"), (0, 1)), "pictures": (b"1", b"2"),
        "verdicts": (Judgement(0.5, False),),
    }  # fmt: skip
    kinds = {name: "text" if name == "name" else name for name in values}
    layout, elements = pack_values(values, kinds)
    assert unpack_values(layout, elements) == values
    with pytest.raises(ValueError, match="8 elements are not those of the layout"):
        unpack_values(layout, elements[:-1])
