"""Nets of Z-Image against diffusers' ZImageControlNetModel: every version, at several depths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.packing import Packed, RowInput
from maskserve_engine.families.mmdit.control import FluxNetInput
from maskserve_engine.families.mmdit.preparation import pack_latents
from maskserve_engine.families.z_image.adapter import positions_of, rotary
from maskserve_engine.families.z_image.blocks import refined
from maskserve_engine.families.z_image.control import ZImageControlNet
from maskserve_engine.families.z_image.spec import CONTROL, PADDED_TO, pads_of
from maskserve_engine.families.z_image.weights import ZImageWeights
from tests.fakes.control_nets import random_z_image_net
from tests.fakes.jobs import tolerance
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.usefixtures("inference")

_CHANNELS, _TEXT, _REFINERS = 4, 16, 3
_PLACES = (0, 2, 3)
VERSIONS: dict[str, dict[str, Any]] = {
    "1": {},
    "2.0": {
        "control_in_dim": 9,
        "add_control_noise_refiner": "control_noise_refiner",
        "control_refiner_layers_places": (0, 1, 2),
    },
    "2.1": {
        "control_in_dim": 9,
        "add_control_noise_refiner": "control_layers",
        "control_refiner_layers_places": (0, 1),
    },
    "2.1, other places": {
        "add_control_noise_refiner": "control_layers",
        "control_refiner_layers_places": (1, 2),
    },
}


@pytest.fixture(scope="module")
def base() -> Any:
    from diffusers import ZImageTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ZImageTransformer2DModel(
            in_channels=_CHANNELS, dim=64, n_layers=4, n_refiner_layers=_REFINERS, n_heads=4,
            n_kv_heads=4, cap_feat_dim=_TEXT, axes_dims=[4, 6, 6], axes_lens=[512, 64, 64],
        ).eval()  # fmt: skip
        for name, weight in model.named_parameters():
            if name.endswith("pad_token"):
                torch.nn.init.normal_(weight)
    return model


def drawn(base: Any, version: str) -> tuple[Any, ZImageControlNet]:
    """Diffusers' net, and net of the same weights."""
    sizes = {"control_layers_places": _PLACES, "n_refiner_layers": _REFINERS}
    model = random_z_image_net(1, **{**sizes, **VERSIONS[version]})
    weights = ZImageWeights.of(base)
    net = ZImageControlNet.of(model, base.config, weights, 4 * _CHANNELS, CONTROL)
    return type(model).from_transformer(model, base), net


def row_of(
    base: Any, net: ZImageControlNet, latents: Tensor, hint: Tensor, words: Tensor
) -> RowInput:
    """The input of a net for a row of all tokens."""
    height, width = latents.shape[1] // 2, latents.shape[2] // 2
    pads, weights = pads_of(height * width), ZImageWeights.of(base)
    text = len(words) + pads_of(len(words)) + pads
    cis = rotary(base, positions_of(height, width, text, pads), latents.device)
    embedded = refined(weights, words, PADDED_TO, cis[: text - pads])
    embedded = torch.cat((embedded, weights.image_pad.expand(pads, -1)))
    row = RowInput(pack_latents(latents), embedded, None, None, cis, pads=pads)
    picture, control = pack_latents(hint), ControlInput("x", np.zeros((0, 0, 3), np.uint8))
    net_input = FluxNetInput.encode(control, net, picture, [(embedded, None, None)], None)
    return net_input.passes(row)[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_net_of_every_version_equals_diffusers(base: Any, version: str) -> None:
    """In a batch of rows of other sizes, scales, times and prompts, with pads and without."""
    torch.manual_seed(int(fresh_rng().integers(100)))
    model, net = drawn(base, version)
    sizes, scales, words = ((8, 16), (6, 10), (16, 16)), (0.4, 1.3, 0.7), (5, 40, 32)
    latents = [torch.randn(_CHANNELS, *size) for size in sizes]
    hints = [torch.randn(_CHANNELS, *size) for size in sizes]
    prompts = [torch.randn(count, _TEXT) for count in words]
    times = torch.tensor([900.0, 500.0, 20.0])
    rows = [row_of(base, net, *one) for one in zip(latents, hints, prompts, strict=True)]
    packed = Packed(rows)
    [at] = net.vectors(times[None], packed)
    outputs = list(net.samples(packed, at, scales))
    further = model.config.control_in_dim - _CHANNELS
    for number, scale in enumerate(scales):
        context = torch.cat((hints[number], torch.zeros(further, *sizes[number])))
        expected = model(
            [latents[number][:, None]],
            1 - times[number : number + 1] / 1000,
            [prompts[number]],
            [context[:, None]],
            conditioning_scale=scale,
        )
        assert net.places == tuple((_REFINERS + place,) for place in expected)
        image, text = len(rows[number].tokens), len(rows[number].text)
        for samples, output in zip(outputs, expected.values(), strict=True):
            actual = scale * samples[number]
            # diffusers: the picture, its pads, the text; here the picture is last
            pads = rows[number].pads
            order = torch.cat(
                (
                    torch.arange(text, text + image),
                    torch.arange(text - pads, text),
                    torch.arange(text - pads),
                )
            )
            difference = (actual[order] - output[0]).abs().max()
            assert difference <= tolerance(output.numpy())


def test_the_scale_acts_inside_a_net_of_version_2(base: Any) -> None:
    """So its outputs, times the scale, are not those of scale 1, times the scale."""
    _, net = drawn(base, "2.1")
    row = row_of(base, net, *torch.randn(2, _CHANNELS, 8, 16), torch.randn(5, _TEXT))
    packed = Packed([row])
    [at] = net.vectors(torch.tensor([[500.0]]), packed)
    halves, wholes = (list(net.samples(packed, at, [scale])) for scale in (0.5, 1.0))
    assert not torch.allclose(halves[0][0], wholes[0][0], atol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"control_layers_places": (0, 4)}, r"its control_layers_places is \[0, 4\].*below 4"),
        ({"control_layers_places": (2, 0)}, "in ascending order"),
        ({"control_in_dim": 3}, "its control_in_dim is 3; expected: 4 or more"),
        ({"n_refiner_layers": 2}, "its n_refiner_layers is 2, that of the model 3"),
        (
            {**VERSIONS["2.0"], "control_refiner_layers_places": (0, 3)},
            r"its control_refiner_layers_places is \[0, 3\]",
        ),
        (
            {**VERSIONS["2.0"], "control_refiner_layers_places": ()},
            r"its control_refiner_layers_places is \[\]; expected: 1 to",
        ),
        (
            {**VERSIONS["2.1"], "control_layers_places": (0,)},
            r"its control_refiner_layers_places is \[.*\]; expected: 1 to 1 numbers",
        ),
    ],
)
def test_a_net_of_another_base_is_refused(base: Any, sizes: dict[str, Any], message: str) -> None:
    net = random_z_image_net(1, **{"n_refiner_layers": _REFINERS, **sizes})
    with pytest.raises(ValueError, match=message):
        ZImageControlNet.of(net, base.config, ZImageWeights.of(base), 4 * _CHANNELS, CONTROL)
