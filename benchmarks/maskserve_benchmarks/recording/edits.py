"""The edits of a record: always the same, sent one after the other."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.soak.bad_input import BAD_REQUESTS
from maskserve_benchmarks.soak.pictures import Picture, draw

Protocol = Literal["grpc", "http", "stream"]
PROMPT = "a red star"
# Seeds of pictures: dense edits, templates of the cache, registered templates.
_DENSE, _CACHED, _REGISTERED, _ADAPTED = 1000, 2000, 3000, 4000
TEMPLATES = (draw(_REGISTERED, 128, 128), draw(_REGISTERED + 1, 96, 160, 0.15))
"""Pictures that are registered and primed before the edits."""


@dataclass(frozen=True, slots=True)
class Case:
    """One edit of a record."""

    name: str
    protocol: Protocol
    inputs: dict[str, bytes]
    """IMAGE, MASK, PROMPT, SETTINGS, and CONTROL if there is a control picture."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker, and the edits to send to it."""

    model: Path
    config: str
    """Configuration of the worker, in TOML."""
    cases: Callable[[Sequence[str]], list[Case]]
    """Makes the edits from the worker's ids of TEMPLATES."""
    devices: Literal[1, 2] = 1


def cases(template_ids: Sequence[str]) -> list[Case]:
    """Return the 60 edits.

    Args:
        template_ids: the worker's ids of TEMPLATES.
    """
    edit_cases = [
        *_dense_edits(),
        *_mask_edits(),
        *_output_edits(),
        *_cached_edits(),
        *_template_edits(template_ids),
        *_stream_edits(),
    ]
    return [*edit_cases, *_refused_edits()]


def _adapter_edits(lora: str, net: str, outline: Callable[[Picture], bytes]) -> list[Case]:
    """Return edits with a LoRA, with a ControlNet, and with both: dense, cached, and with new and
    known templates.
    """
    picture, edit_cases = draw(_ADAPTED, 128, 128), []
    adapters: tuple[tuple[str, dict[str, Any]], ...] = (
        ("lora", {"loras": [{"name": lora, "scale": 0.8}]}),
        ("control", {"controls": [{"name": net, "image": 0, "end": 0.8}]}),
    )
    for name, adapter_settings in (*adapters, ("both", adapters[0][1] | adapters[1][1])):
        for cache in ("off", "require"):
            case = _case(
                f"{name}-{cache}", picture, cache=cache, **adapter_settings, num_inference_steps=8
            )
            edit_cases.append(
                _with(case, CONTROL=outline(picture)) if "controls" in adapter_settings else case
            )
    return edit_cases


def _outline(picture: Picture) -> bytes:
    """Return the rim of the masked box, white on black."""
    left, top, right, bottom = picture.box
    rim = np.zeros_like(picture.pixels)
    rim[top:bottom, left:right] = 255
    rim[top + 3 : bottom - 3, left + 3 : right - 3] = 0
    return encode(rim, "PNG")


def _common_edits(template_ids: Sequence[str]) -> list[Case]:
    """Return some edits of each kind that every model and any number of devices accepts."""
    picture = draw(_ADAPTED + 1, 128, 128)
    edit_cases = [
        _case("dense", picture),
        _case("dense-no-prompt", picture, prompt=""),
        _case("dense-wide", draw(_ADAPTED + 2, 96, 160), num_inference_steps=7),
        _case("cached", picture, cache="require", num_inference_steps=8),
        _case("cached-half", draw(_ADAPTED + 3, 128, 128, 0.5), cache="require"),
        _case("stream", picture, "stream", progress=True, preview_every=2, num_inference_steps=6),
    ]
    for i, name in enumerate(template_ids):
        edit_cases.append(_case(f"template-{i}", TEMPLATES[i], template_id=name, cache="auto"))
    return edit_cases


def _config(**tables: Mapping[str, object]) -> str:
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join((*lines, ""))


_ADAPTER_FOLDERS = {
    "adapters": {"store": str(CHECKOUT / "assets" / "adapters")},
    "controls": {"folder": str(CHECKOUT / "assets" / "controlnets")},
}
SITES = {
    "demo": Site(
        DEMO_MODEL,
        _config(**_ADAPTER_FOLDERS),
        lambda ids: [*cases(ids), *_adapter_edits("hollow", "outline", _outline)],
    ),
    "unet": Site(
        CHECKOUT / "assets" / "models" / "demo-unet",
        _config(**_ADAPTER_FOLDERS),
        lambda ids: [
            *_common_edits(ids),
            *_adapter_edits("unet-ninth-colour", "unet-outline", _outline),
        ],
    ),
    "ranks": Site(DEMO_MODEL, _config(engine={"policy": "deadline"}), _common_edits, devices=2),
}
"""All workers of a whole record, recorded one after the other."""


def _case(
    name: str, picture: Picture, protocol: Protocol = "grpc", prompt: str = PROMPT, **settings: Any
) -> Case:
    all_settings = {
        "seed": 7,
        "num_inference_steps": 4,
        "cache": "off",
        "request_id": name,
        **settings,
    }
    inputs = {
        "IMAGE": b"" if "template_id" in settings else picture.image,
        "MASK": picture.mask,
        "PROMPT": prompt.encode(),
        "SETTINGS": json.dumps(all_settings).encode(),
    }
    return Case(name, protocol, inputs)


def _with(case: Case, **inputs: bytes) -> Case:
    return replace(case, inputs={**case.inputs, **inputs})


def _dense_edits() -> Iterator[Case]:
    sizes = ((128, 128), (256, 256), (64, 200), (301, 77), (1, 1), (3, 50))
    for i, (height, width) in enumerate(sizes):
        yield _case(f"dense-{height}x{width}", draw(_DENSE + i, height, width), seed=i)
    square = draw(_DENSE + 10, 128, 128)
    for steps in (1, 7, 20):
        yield _case(f"dense-steps-{steps}", square, num_inference_steps=steps)
    for strength in (0.3, 0.6):
        name = f"dense-strength-{strength}"
        yield _case(name, square, strength=strength, num_inference_steps=10)
    yield _case("dense-no-prompt", square, prompt="")
    yield _case("dense-long-prompt", square, "http", prompt="a blue circle beside a house " * 9)
    yield _case("dense-large-seed", square, "http", seed=2**63 - 1, priority=5, deadline_ms=600_000)


def _mask_edits() -> Iterator[Case]:
    numbers = count(_DENSE + 20)
    borders: tuple[dict[str, Any], ...] = (
        {"mask_dilate": 9},
        {"mask_feather": 6},
        {"mask_dilate": 5, "mask_feather": 12},
    )
    for mask_settings in borders:
        name = "-".join(("mask", *(f"{key[5:]}-{value}" for key, value in mask_settings.items())))
        yield _case(name, draw(next(numbers), 120, 140, 0.1), **mask_settings)
    for share in (0.02, 1.0):
        yield _case(f"mask-share-{share}", draw(next(numbers), 128, 128, share))
    picture = draw(next(numbers), 128, 96)
    for mode in ("auto", "alpha", "white"):
        case = _case(f"mask-transparent-{mode}", picture, mask_mode=mode)
        yield _with(case, MASK=_transparent(picture))


def _transparent(picture: Picture) -> bytes:
    """Return the picture's mask as transparency, with white only in its left half."""
    left, top, right, bottom = picture.box
    height, width, _ = picture.pixels.shape
    mask = np.zeros((height, width, 4), np.uint8)
    mask[..., 3] = 255
    mask[top:bottom, left:right, 3] = 0
    mask[top:bottom, left : (left + right) // 2, :3] = 255
    return encode(mask, "PNG")


def _output_edits() -> Iterator[Case]:
    picture = draw(_DENSE + 40, 100, 132)
    for form in ("jpeg", "webp"):
        yield _case(f"output-{form}", picture, output_format=form)
    yield _case("output-base64", picture, "http", output_encoding="base64")
    for kind in ("JPEG", "WEBP"):
        case = _case(f"source-{kind.lower()}", picture, "http")
        yield _with(case, IMAGE=encode(picture.pixels, kind))


def _cached_edits() -> Iterator[Case]:
    picture = draw(_CACHED, 128, 128)
    for sight in ("first", "second", "third"):
        yield _case(f"cached-{sight}-sight", picture, cache="auto")
    for steps in (3, 9, 20):
        name = f"cached-reproducible-{steps}"
        yield _case(name, draw(_CACHED + 1, 128, 128), reproducible=True, cache="auto",
                    num_inference_steps=steps)  # fmt: skip
    yield _case("cached-reproducible-dense", draw(_CACHED + 2, 128, 128, 0.97), reproducible=True,
                cache="auto")  # fmt: skip
    for i, (height, width) in enumerate(((96, 128), (200, 90), (2, 2))):
        yield _case(f"cached-require-{height}x{width}", draw(_CACHED + 3 + i, height, width),
                    cache="require")  # fmt: skip
    yield _case("cached-strength", picture, cache="auto", strength=0.5, num_inference_steps=8)
    yield _case(
        "cached-feather", picture, "http", cache="auto", mask_feather=8, output_format="jpeg"
    )
    yield _case("cached-all", draw(_CACHED + 9, 96, 96, 1.0), cache="require")


def _template_edits(template_ids: Sequence[str]) -> Iterator[Case]:
    for i, (picture, name) in enumerate(zip(TEMPLATES, template_ids, strict=True)):
        yield _case(f"template-{i}-cached", picture, "http", template_id=name, cache="auto")
        yield _case(f"template-{i}-dense", picture, template_id=name)
    case = _case("template-other-mask", TEMPLATES[0], template_id=template_ids[0], cache="auto",
                 mask_feather=4, num_inference_steps=6)  # fmt: skip
    yield _with(case, MASK=draw(_REGISTERED + 2, 128, 128, 0.1).mask)


def _stream_edits() -> Iterator[Case]:
    picture = draw(_DENSE + 50, 128, 128)
    steps: dict[str, Any] = {"num_inference_steps": 8}
    yield _case("stream-plain", picture, "stream", **steps)
    yield _case("stream-progress", picture, "stream", progress=True, **steps)
    yield _case("stream-previews", picture, "stream", progress=True, preview_every=2, **steps)
    yield _case("stream-cached", picture, "stream", progress=True, preview_every=3,
                cache="require", output_format="webp", **steps)  # fmt: skip


# Fields that BAD_REQUESTS get wrong: the first bad request for each field is sent.
_BAD: tuple[tuple[str, Protocol], ...] = (
    ("IMAGE", "grpc"),
    ("MASK", "http"),
    ("PROMPT", "stream"),
    ("SETTINGS.stepz", "grpc"),
    ("SETTINGS.num_inference_steps", "http"),
    ("SETTINGS.strength", "grpc"),
    ("SETTINGS.mask_mode", "stream"),
    ("SETTINGS.template_id", "http"),
)


def _refused_edits() -> Iterator[Case]:
    for field, protocol in _BAD:
        bad = next(bad for bad in BAD_REQUESTS if bad.field == field)
        yield Case(f"refused-{field}", protocol, dict(bad.inputs))
    picture = draw(_DENSE + 60, 64, 64)
    yield _case("refused-negative-prompt", picture, negative_prompt="blue", true_cfg_scale=2.0)
    yield _case("refused-guidance", picture, guidance_scale=3.5)
    yield _case("refused-true-cfg", picture, "stream", true_cfg_scale=2.0)


def encode(pixels: Any, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()
