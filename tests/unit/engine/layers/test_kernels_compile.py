"""Kernels in the Triton language become machine code of GPUs, which needs none of them."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from maskserve_engine.cache.entries import GROUP  # noqa: E402
from maskserve_engine.layers import read_rings  # noqa: E402
from maskserve_engine.layers.add_norm_kernel import add_norm_kernel  # noqa: E402
from maskserve_engine.layers.fp8_kernels import quantise_kernel  # noqa: E402
from maskserve_engine.layers.geglu_kernel import BLOCK, geglu_kernel  # noqa: E402
from maskserve_engine.layers.keep_ring_kernel import INTEGERS, keep_ring_kernel  # noqa: E402
from maskserve_engine.layers.keep_tokens_kernel import keep_tokens_kernel  # noqa: E402
from maskserve_engine.layers.modulation_kernels import (  # noqa: E402
    add_gated_kernel,
    add_gated_modulate_kernel,
    modulate_kernel,
)
from maskserve_engine.layers.qk_norm_rope_kernel import qk_norm_rope_kernel  # noqa: E402
from maskserve_engine.layers.read_rings_kernel import read_rings_kernel  # noqa: E402
from maskserve_engine.layers.scatter_kv_kernel import scatter_kv_kernel  # noqa: E402
from maskserve_engine.layers.shrink_expand import FIELDS, RANKS, TOKENS  # noqa: E402
from maskserve_engine.layers.shrink_expand_kernels import (  # noqa: E402
    expand_kernel,
    shrink_kernel,
    shrink_map_kernel,
)

AMPERE, ADA, HOPPER, BLACKWELL = 80, 89, 90, 100
# Each test for one device with each of its other parameters, and some test for each device.
pytestmark = pytest.mark.spread("target")
FORMATS = [
    (format, target)
    for format in ("model", "int8", "float8", "int4")
    for target in (AMPERE, ADA, HOPPER, BLACKWELL)
    if format != "float8" or target >= ADA  # else rows and maps are read one by one
]
HALF = [("bf16", target) for target in (AMPERE, ADA, HOPPER, BLACKWELL)]
OTHERS = [("fp16", HOPPER), ("fp32", HOPPER)]
REST = [
    pytest.param(dtype, target, marks=pytest.mark.slow)
    for dtype in ("fp16", "fp32")
    for target in (AMPERE, ADA, BLACKWELL)
]
ADDRESSES = ("ids", "data_a", "data_b", "scale_a", "scale_b", "groups_a", "groups_b")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing made before is taken, and Triton is not in doubt about its next version's default."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def machine_code(kernel: Any, types: dict[str, Any], sizes: dict[str, Any], target: int) -> bytes:
    content: bytes = compiled(kernel, types, sizes, target)["cubin"]
    return content


def widths(ptx: str, operation: str) -> set[int]:
    """Bytes of each load or store of the device's memory."""
    findall = re.findall(rf"{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return {int(times or 1) * int(bits) // 8 for times, bits in findall}


def compiled(
    kernel: Any,
    types: dict[str, Any],
    sizes: dict[str, Any],
    target: int,
    aligned: tuple[int, ...] = (),
) -> dict[str, Any]:
    """`aligned`: numbers of arguments that are multiples of 16, as torch's tensors are."""
    known = {**types, **dict.fromkeys(sizes, "constexpr")}
    signature = {name: known[name] for name in kernel.arg_names}
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=sizes, attrs=attributes)
    asm: dict[str, Any] = triton.compile(source, target=GPUTarget("cuda", target, 32)).asm
    return asm


@pytest.mark.parametrize(("format", "target"), FORMATS)
def test_placing(format: str, target: int) -> None:
    rows = 4
    types: dict[str, Any] = {"first": "*bf16", "other": "*bf16"}
    types |= dict.fromkeys(("row_of", "local", "to"), "*i64") | {"count": "i32"}
    sizes = {"width": 3072, "block": 1024, "tokens": 4, "rows": rows, "kind": format}
    sizes |= {"group": GROUP}
    sizes["step"] = 3 * 3072  # among queries, keys and values
    for terms, aligned, adds in product((1, 2), (False, True), (False, True)):
        pointers = rows * terms
        types |= dict.fromkeys(ADDRESSES, ("i64",) * pointers) | {"weights": ("fp32",) * pointers}
        chosen = {**sizes, "aligned": aligned, "adds": adds, "terms": terms}
        assembly = compiled(scatter_kv_kernel, types, chosen, target)
        assert assembly["cubin"].startswith(b"\x7fELF")
        stores, loads = (widths(assembly["ptx"], name) for name in ("st", "ld"))
        assert stores == {16 if aligned else 2}
        if aligned:  # the entry's numbers, of which int4 has half a byte each
            assert max(loads) == 16


@pytest.mark.parametrize(("format", "target"), FORMATS)
def test_reading_round_tiles(format: str, target: int) -> None:
    types = {"rings": "*bf16", "moments": "*fp32", "totals": "*fp32", "table": "*i64"}
    sizes = {"fields": read_rings.FIELDS, "norm_groups": 32, "kind": format, "group": GROUP}
    sizes |= {"positions": read_rings.POSITIONS, "block": read_rings.BLOCK}
    binary = machine_code(read_rings_kernel, types | {"halves": "i32"}, sizes, target)
    assert binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("target", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_keeping_what_a_refresh_step_computed(target: int) -> None:
    types = dict.fromkeys(("first", "other"), "*bf16") | {"ids": "*i64", "data": "*i8"}
    types |= dict.fromkeys(("last_a", "last_b", "slopes_a", "slopes_b"), "*i8")
    scales = ("last_scales_a", "last_scales_b", "slopes_scales_a", "slopes_scales_b", "scales")
    types |= dict.fromkeys(scales, "*fp32") | {"count": "i32", "stride": "i32", "reach": "fp32"}
    for terms in (1, 2, 3):
        sizes = {"width": 1280, "tokens": 64, "block": 32, "terms": terms}
        assert machine_code(keep_tokens_kernel, types, sizes, target).startswith(b"\x7fELF")
    types = dict.fromkeys(("x", "ring"), "*bf16") | {"at_ring": "*i64"}
    types |= dict.fromkeys(("means", "variances"), "*fp32")
    types |= dict.fromkeys(INTEGERS, "i32")
    for norms in (False, True):
        sizes = {"channels": 10, "positions": 128, "block": 16, "norms": norms}
        assert machine_code(keep_ring_kernel, types, sizes, target).startswith(b"\x7fELF")


@pytest.mark.parametrize(("dtype", "target"), [*HALF, *OTHERS, *REST])
def test_turning_heads(dtype: str, target: int) -> None:
    types = {"x": f"*{dtype}", "norms": "*fp32", "cis": "*fp32", "stream_of": "*i64"}
    types |= {"x_stride": "i64", "eps": "fp32"}
    for streams in (False, True):
        sizes = {"heads": 24, "head_dim": 128, "block": 32, "streams": streams}
        assert machine_code(qk_norm_rope_kernel, types, sizes, target).startswith(b"\x7fELF")


def assert_compiles(kernel: Any, types: dict[str, Any], sizes: dict[str, Any], target: int) -> None:
    """With tokens as they are and, where there is any, in FP8."""
    for fp8 in (False, True) if target >= ADA else (False,):
        out = {"out": "*fp8e4nv"} if fp8 else {}
        known = {**types, "out_scales": "*fp32", **out}
        binary = machine_code(kernel, known, {**sizes, "fp8": fp8}, target)
        assert binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("target", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize(("width", "more"), [(3072, 0), (0, 12288), (3072, 12288)])
def test_quantising_tokens(width: int, more: int, target: int) -> None:
    types = dict.fromkeys(("x", "up"), "*bf16") | {"out": "*fp8e4nv", "scales": "*fp32"}
    types |= dict.fromkeys(("x_stride", "up_stride"), "i64")
    sizes = {"width": width, "more": more}
    sizes |= {f"{name}block": triton.next_power_of_2(max(1, size))
              for name, size in (("", width), ("more_", more))}  # fmt: skip
    assert machine_code(quantise_kernel, types, sizes, target).startswith(b"\x7fELF")


@pytest.mark.parametrize("target", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_modulating(target: int) -> None:
    sizes = {"width": 3072, "block": 4096}
    streams = dict.fromkeys(("x", "out"), "*bf16") | {"row_of": "*i64"}
    norm = {"shifts": "*bf16", "scales": "*bf16", "eps": "fp32"}
    norm |= dict.fromkeys(("shifts_stride", "scales_stride"), "i64")
    gate = {"y": "*bf16", "gates": "*bf16", "gates_stride": "i64"}
    assert machine_code(add_gated_kernel, streams | gate, sizes, target).startswith(b"\x7fELF")
    types = streams | norm | gate | {"added": "*bf16"}
    for one_row in (False, True):
        of_row = {**sizes, "one_row": one_row}
        assert_compiles(modulate_kernel, streams | norm, of_row, target)
        assert_compiles(add_gated_modulate_kernel, types, of_row, target)


@pytest.mark.parametrize("target", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_between_the_products_of_a_unets_block(target: int) -> None:
    numbers = dict.fromkeys(("x", "y", "weight", "bias", "added", "normed"), "*bf16")
    sizes = {"width": 1280, "block": 2048}
    binary = machine_code(add_norm_kernel, numbers | {"eps": "fp32"}, sizes, target)
    assert binary.startswith(b"\x7fELF")
    sizes = {"width": 5120, "block": BLOCK}
    gated = compiled(geglu_kernel, {"x": "*bf16", "out": "*bf16"}, sizes, target, aligned=(0, 1))
    assert widths(gated["ptx"], "ld") == widths(gated["ptx"], "st") == {16}


@pytest.mark.parametrize(("dtype", "target"), [*HALF, *OTHERS, *REST])
def test_updates_of_rows(dtype: str, target: int) -> None:
    sizes = {"tokens": TOKENS, "ranks": RANKS, "block": 128, "fields": FIELDS}
    tables = dict.fromkeys(("tiles", "slices", "ends"), "*i64") | {"low": f"*{dtype}"}
    tables |= dict.fromkeys(("first", "most"), "i32")
    shrink = {"x": f"*{dtype}", "last": "i32", "x_stride": "i32", "inner": "i32"}
    expand = {"out": f"*{dtype}", "scales": "*fp32", "outputs": "i32", "places": "i32"}
    expand |= dict.fromkeys(("pass_stride", "place_stride", "output_stride"), "i32")
    for kernel, arguments in ((shrink_kernel, shrink), (expand_kernel, expand)):
        assert machine_code(kernel, tables | arguments, sizes, target).startswith(b"\x7fELF")
    del tables["first"]
    numbers = ("pass", "channel", "row", "column")
    of_map = {"x": f"*{dtype}"} | dict.fromkeys([f"{number}_stride" for number in numbers], "i32")
    numbers = ("channels", "height", "width", "places", "out_width", "stride", "padding")
    of_map |= dict.fromkeys(numbers, "i32")
    square = {**sizes, "block": 64, "side": 3}
    binary = machine_code(shrink_map_kernel, tables | of_map, square, target)
    assert binary.startswith(b"\x7fELF")
