"""Adapters that are refused by their header, before any weight is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import (
    BadAdapter,
    LoraHeader,
    check_values,
    read_header,
    read_tensors,
)
from maskserve_lora.lora_plan import plan_of
from tests.fakes.loras import LAYERS, WIDTH, Arrays, lora
from tests.support.draws import fresh_rng

DEMO = Path(__file__).parents[3] / "assets" / "models" / "demo"
DEMO_UNET = DEMO.with_name("demo-unet")
BLOCK = "transformer.transformer_blocks.0.attn.to_q"


def header_of(raw: bytes, max_bytes: int = 2**30, max_rank: int = 256) -> LoraHeader:
    return read_header(
        lambda begin, end: raw[begin:end], len(raw), max_bytes=max_bytes, max_rank=max_rank
    )


def saved(tensors: Arrays, **metadata: str) -> bytes:
    return bytes(safetensors.numpy.save(tensors, metadata or None))


def test_a_header_tells_ranks_parts_and_layers() -> None:
    tensors = {
        **lora(rank=3),
        **lora({"text_model.encoder.layers.0.mlp.fc1": (16, 64)}, 5, "text_encoder."),
        f"{BLOCK}.alpha": np.array(2.0, np.float32),
    }
    header = header_of(saved(tensors, made_by="a test"))
    assert header.rank == 5
    assert plan_of(header, None).parts == ("denoiser", "text_encoder")
    layer = header.layers["denoiser", "transformer_blocks.1.ff.net.2"]
    assert (layer.rank, layer.inputs, layer.outputs, layer.kernel) == (3, 4 * WIDTH, WIDTH, ())
    assert header.metadata == {"made_by": "a test"}


def test_of_a_long_file_only_its_header_is_read() -> None:
    raw = saved(lora(rank=64))
    ranges: list[tuple[int, int]] = []

    def read(begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return raw[begin:end]

    sizes = {f"transformer.b.{n}.{'x' * 60}": (8, 8) for n in range(2000)}
    raw = saved(lora(sizes, rank=1))
    read_header(read, len(raw), max_bytes=2**30, max_rank=256)
    assert len(ranges) == 2
    assert ranges[-1][1] == 8 + int.from_bytes(raw[:8], "little") < len(raw)


@pytest.mark.parametrize("forms", [("lora.down", "lora.up"), ("lora_down", "lora_up")])
def test_other_spellings_are_the_same_layers(forms: tuple[str, str]) -> None:
    assert header_of(saved(lora(forms=forms))).layers == header_of(saved(lora())).layers


def _without(suffix: str) -> Arrays:
    return {name: value for name, value in lora().items() if not name.endswith(suffix)}


def _with(**more: Any) -> Arrays:
    return {
        **lora(),
        **{
            f"{BLOCK}.{name.replace('__', '.')}": np.ones(shape, "f4")
            for name, shape in more.items()
        },
    }


BAD: dict[str, tuple[Callable[[], Arrays], str]] = {
    "DoRA": (lambda: _with(lora_magnitude_vector=(WIDTH,)), "DoRA"),
    "kohya's DoRA": (lambda: _with(dora_scale=(WIDTH, 1)), "DoRA"),
    "LoKr and LoRA": (lambda: _with(lokr_w1=(4, 4)), "is both LoRA and LoKr"),
    "LoHa and LoRA": (lambda: _with(hada_w1_a=(4, 4)), "is both LoRA and LoHa"),
    "LoCon's middle": (lambda: _with(lora_mid__weight=(4, 4)), "has a core that does not fit"),
    "new weights": (lambda: _with(set_weight=(WIDTH, WIDTH)), "new weights"),
    "no up": (lambda: _without("to_q.lora_B.weight"), "no up matrix"),
    "no down": (lambda: _without("to_q.lora_A.weight"), "no down matrix"),
    "no LoRA": (dict, "holds no LoRA"),
    "ranks differ": (
        lambda: {**lora(), f"{BLOCK}.lora_B.weight": np.ones((WIDTH, 3), "f4")},
        "do not fit",
    ),
    "a vector": (lambda: {**lora(), f"{BLOCK}.lora_B.weight": np.ones(WIDTH, "f4")}, "other forms"),
    "rank 0": (
        lambda: {
            **lora(),
            f"{BLOCK}.lora_A.weight": np.ones((0, WIDTH), "f4"),
            f"{BLOCK}.lora_B.weight": np.ones((WIDTH, 0), "f4"),
        },
        "do not fit",
    ),
    "two alphas": (lambda: _with(alpha=(2,)), "not a single number"),
    "integers": (lambda: lora(dtype=np.int8), "I8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_plain_lora_is_refused_in_one_sentence(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(BadAdapter, match=message) as refused:
        header_of(saved(make()))
    assert "\n" not in str(refused.value)


def test_dora_is_known_by_its_metadata_too() -> None:
    about = json.dumps({"transformer.use_dora": True})
    header = header_of(saved(lora(), lora_adapter_metadata=about))
    with pytest.raises(BadAdapter, match="DoRA"):
        plan_of(header, BaseLayers.of_folder(DEMO))


def test_size_and_rank_are_bounded() -> None:
    raw = saved(lora(rank=9))
    header_of(raw, max_bytes=len(raw), max_rank=9)
    with pytest.raises(BadAdapter, match="bytes long"):
        header_of(raw, max_bytes=len(raw) - 1)
    with pytest.raises(BadAdapter, match="rank 9"):
        header_of(raw, max_rank=8)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_are_finite(dtype: Any, bad: float) -> None:
    tensors = lora(dtype=dtype)
    places, _, _ = read_tensors(lambda a, b: saved(tensors)[a:b], len(saved(tensors)))
    check_values(np.frombuffer(saved(tensors), np.uint8), places, places)
    tensors[f"{BLOCK}.lora_B.weight"][5, 1] = bad
    with pytest.raises(BadAdapter, match="NaN or infinity"):
        check_values(np.frombuffer(saved(tensors), np.uint8), places, places)


def test_files_that_are_no_safetensors_are_refused() -> None:
    raw = saved(lora())
    head = 8 + int.from_bytes(raw[:8], "little")
    rng = fresh_rng()
    hostile = [
        b"",
        b"\x01",
        pickle.dumps({"a": 1}),
        b"PK\x03\x04" + rng.bytes(100),
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
        (50_000).to_bytes(8, "little") + b'{"a":' * 10_000,
        raw[: head - 1],
        raw[:head],
        raw[:-1],
        *(rng.bytes(int(rng.integers(0, 4000))) for _ in range(50)),
    ]
    for data in hostile:
        with pytest.raises(BadAdapter):
            header_of(data)


def test_no_change_of_a_header_breaks_its_reader() -> None:
    """One byte of the header is another: it is read or refused, and no place lies outside."""
    raw = bytearray(saved(lora()))
    head = 8 + int.from_bytes(raw[:8], "little")
    rng = fresh_rng()
    for _ in range(500):
        changed = bytearray(raw)
        changed[int(rng.integers(head))] = int(rng.integers(256))
        try:
            header = header_of(bytes(changed))
        except BadAdapter:
            continue
        assert all(0 <= place.begin <= place.end <= len(raw) for place in header.tensors.values())


# Of which model


def test_adapters_of_the_served_model_are_known_by_every_spelling() -> None:
    base = BaseLayers.of_folder(DEMO)
    flat = {name.replace(".", "_"): shape for name, shape in LAYERS.items()}
    for tensors in (
        lora(),
        lora(prefix="base_model.model."),
        lora(flat, prefix="lora_transformer_", forms=("lora_down", "lora_up")),
        lora({"double_blocks_0_img_attn_proj": (WIDTH, WIDTH)}, prefix="lora_unet_"),
    ):
        plan_of(header_of(saved(tensors)), base)


OTHER: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "a wider model": ({"transformer_blocks.0.attn.to_q": (3072, 3072)}, "is for another model"),
    "a wider input": ({"x_embedder": (999, WIDTH)}, "widens the inputs"),
}


@pytest.mark.parametrize("name", OTHER)
def test_adapters_of_another_model_are_refused(name: str) -> None:
    layers, message = OTHER[name]
    base = BaseLayers.of_folder(DEMO)
    with pytest.raises(BadAdapter, match=message):
        plan_of(header_of(saved({**lora(), **lora(layers)})), base)


def test_parts_that_the_model_has_not_are_refused() -> None:
    unet = BaseLayers.of_folder(DEMO_UNET)
    with pytest.raises(BadAdapter, match="model has no text_encoder_2"):
        plan_of(header_of(saved(lora(prefix="text_encoder_2."))), unet)
    with pytest.raises(BadAdapter, match="has no layer"):
        plan_of(header_of(saved(lora())), unet)


@pytest.mark.parametrize("name", ["hollow", "ninth-colour"])
def test_the_demo_model_s_adapters_are_its_own(name: str) -> None:
    raw = (DEMO.parents[1] / "adapters" / f"{name}.safetensors").read_bytes()
    header = header_of(raw)
    base, unet = BaseLayers.of_folder(DEMO), BaseLayers.of_folder(DEMO_UNET)
    plan_of(header, base)
    assert (header.rank, plan_of(header, base).parts) == (16, ("denoiser",))
    with pytest.raises(BadAdapter):
        plan_of(header, unet)


def test_the_demo_unet_s_adapter_is_its_own() -> None:
    path = DEMO.parents[1] / "adapters" / "unet-ninth-colour.safetensors"
    raw = path.read_bytes()
    assert len(raw) <= 2 * 2**20
    header = header_of(raw)
    base, unet = BaseLayers.of_folder(DEMO), BaseLayers.of_folder(DEMO_UNET)
    plan_of(header, unet)
    assert (header.rank, plan_of(header, unet).parts) == (8, ("denoiser",))
    with pytest.raises(BadAdapter):
        plan_of(header, base)
