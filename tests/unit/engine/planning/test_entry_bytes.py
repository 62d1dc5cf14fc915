"""Bytes of entries against arrays that hold them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_engine.cache.entries import encode
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.entry_bytes import FORMATS, block_bytes, end_bytes, entry_bytes
from tests.support.model_configs import TINY_SDXL


def stored(name: str, tokens: int, channels: int) -> int:
    """Bytes that the engine's own codec makes of [tokens, channels]."""
    if not tokens:
        return 0
    values = torch.randn(tokens, channels)
    if name in ("float32", "bfloat16"):
        return values.to(getattr(torch, name)).nbytes
    return encode(values, name).nbytes


@pytest.mark.parametrize(("name", "dtype"), [("float32", np.float32), ("bfloat16", np.uint16)])
def test_plain_formats_are_the_arrays_bytes(name: str, dtype: type) -> None:
    assert FORMATS[name].bytes_of(100, 48) == np.empty((100, 48), dtype).nbytes


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_8_bit_formats_add_a_scale_per_channel(name: str) -> None:
    values, scales = np.empty((100, 48), np.int8), np.empty(48, np.float32)
    assert FORMATS[name].bytes_of(100, 48) == values.nbytes + scales.nbytes


@pytest.mark.parametrize("name", ["int8", "float8", "int4"])
def test_the_engine_stores_what_is_counted(name: str) -> None:
    assert FORMATS[name].bytes_of(100, 64) == stored(name, 100, 64)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_nothing_to_load_is_no_bytes(fmt) -> None:  # type: ignore[no-untyped-def]
    assert fmt.bytes_of(0, 48) == 0


def test_flux_entries() -> None:
    work = flux_work(FLUX_DEV, 128, 128)
    fmt = FORMATS["bfloat16"]
    loads = block_bytes(work, [(3645.0,)], fmt)
    assert loads.shape == (57, 2)
    assert loads[0].tolist() == [3645 * 3072 * 2, 3645 * 3072 * 4]
    assert end_bytes(work, loads).tolist() == [0.0]
    # One anchor of a 1024x1024 template: 2.67 GiB of K and V, half of it as `h`.
    assert entry_bytes(work, "kv", fmt) == 57 * 4096 * 3072 * 2 * 2
    assert entry_bytes(work, "h", fmt) == 57 * 4096 * 3072 * 2
    assert entry_bytes(work, "kv", fmt, copies=2) == 2 * entry_bytes(work, "kv", fmt)


def test_unet_entries_hold_the_end_of_each_stack() -> None:
    work = unet_work(TINY_SDXL, 16, 16)
    fmt = FORMATS["float32"]
    tokens = tuple(float(n) for n in work.tokens)
    loads = block_bytes(work, [tokens], fmt)
    ends = end_bytes(work, loads)
    assert len(ends) == len(work.before)
    last = [max(b.width for b in work.blocks if b.stack == s) for s in range(len(ends))]
    levels = [next(b.level for b in work.blocks if b.stack == s) for s in range(len(ends))]
    assert ends.tolist() == [
        4 * work.tokens[level] * h for level, h in zip(levels, last, strict=True)
    ]
    assert entry_bytes(work, "kv", fmt) == loads[:, 1].sum() + ends.sum()


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
def test_rows_add_up_and_each_has_its_scales(name: str) -> None:
    work, fmt = unet_work(TINY_SDXL, 16, 16), FORMATS[name]
    rows = [(200.0, 50.0, 12.0), (100.0, 30.0, 9.0), (0.0, 0.0, 0.0)]
    together = block_bytes(work, rows, fmt)
    expected = [
        [sum(stored(name, int(r[b.level]), k * b.width) for r in rows) for k in (1, 2)]
        for b in work.blocks
    ]
    np.testing.assert_array_equal(together, expected)
