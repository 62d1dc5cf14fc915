"""LoRA files of people who mean harm: each costs a sentence, and next to no time.

Work is counted and not timed: lines of Python that a header makes its reader run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.header_process import Bounds, HeaderDescription, HeaderProcess, describe_header
from maskserve_lora.lora_header import BadAdapter, check_values, read_header
from maskserve_lora.lora_plan import plan_of
from tests.fakes.loras import LAYERS, lora
from tests.support.cost import lines_run

DEMO = Path(__file__).parents[3] / "assets" / "models" / "demo"
BOUNDS = Bounds(str(DEMO), "", 2**30, 256)


@pytest.fixture(scope="module")
def base() -> BaseLayers:
    return BaseLayers.of_folder(DEMO)


def file_of(declared: dict[str, Any], nbytes: int = 0) -> bytes:
    """A file with this header, whatever it says, and so many bytes behind it."""
    text = json.dumps(declared).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def tensor(*shape: int, begin: int = 0, dtype: str = "F32") -> dict[str, Any]:
    nbytes = 4 * int(np.prod(shape, dtype=object))
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}


def many(count: int, name: str) -> bytes:
    return file_of({name.format(n): tensor(1, begin=4 * n) for n in range(count)}, 4 * count)


PAIR = {
    "transformer.x.lora_A.weight": tensor(1, 1),
    "transformer.x.lora_B.weight": tensor(1, 1, begin=4),
}
PATTERNS = {f"a{n}.to_q": 1 for n in range(30_000)}
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a name of 64 KB": lambda: file_of({"lora_A." * 9000 + ".weight": tensor(4, 128)}, 2048),
    "a name of norms": lambda: file_of({"norm" * 16_000 + ".weight": tensor(1)}, 4),
    "40,000 dimensions": lambda: file_of({"x.lora_A.weight": tensor(*[1] * 40_000)}, 4),
    "dimensions beyond all numbers": lambda: file_of(
        {"x.lora_A.weight": {"dtype": "F32", "shape": [2**62] * 8, "data_offsets": [0, 4]}}, 4
    ),
    "a negative side": lambda: file_of({"x.lora_A.weight": tensor(-1, 4)}, 16),
    "tensors over one another": lambda: file_of(
        {"x.lora_A.weight": tensor(4, 128), "x.lora_B.weight": tensor(128, 4)}, 2048
    ),
    "offsets backwards": lambda: file_of(
        {"x.lora_A.weight": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, 8
    ),
    "50,000 tensors": lambda: many(50_000, "transformer.x{}.lora_A.weight"),
    "20,000 tensors that nobody knows": lambda: many(20_000, "norm{}"),
    "patterns without end": lambda: file_of(
        {
            **{f"transformer.a{n}.to_q.lora_{ab}.weight": tensor(1, 1, begin=4 * (2 * n + m))
               for n in range(2000) for m, ab in enumerate("AB")},
            "__metadata__": {"lora_adapter_metadata": json.dumps(
                {"transformer.lora_alpha": 1, "transformer.alpha_pattern": PATTERNS})},
        },
        16_000,
    ),
    "an alpha of a thousand digits": lambda: file_of(
        {**PAIR,
         "__metadata__": {"ss_network_alpha": "9" * 100_000}},
        8,
    ),
    "metadata in metadata": lambda: file_of(
        {**PAIR,
         "__metadata__": {"lora_adapter_metadata": "[" * 100_000}},
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_refused_in_a_sentence_after_little_work(name: str, base: BaseLayers) -> None:
    raw = HOSTILE[name]()
    descriptions: list[HeaderDescription] = []
    lines = lines_run(
        lambda: descriptions.append(describe_header(raw, len(raw), b"", BOUNDS, base))
    )
    assert descriptions[0].problem
    assert len(descriptions[0].problem) < 400
    assert "\n" not in descriptions[0].problem
    assert lines < 3_000_000


def test_a_header_that_takes_too_long_costs_its_own_file_alone() -> None:
    """In a process of its own, which is ended; the next header has another."""
    headers = HeaderProcess(BOUNDS, limit_s=1.0, module="tests.fakes.slow_headers")
    try:
        assert "takes longer than 1 s" in headers.describe(b"slow", 4, b"").problem
        assert "ends the process" in headers.describe(b"dead", 4, b"").problem
        assert headers.describe(b"good", 4, b"") == HeaderDescription(rank=7)
    finally:
        headers.close()


def test_headers_are_read_in_a_process_of_their_own(tmp_path: Path) -> None:
    """The same as in this one."""
    import safetensors.numpy

    base = BaseLayers.of_folder(DEMO)
    headers = HeaderProcess(BOUNDS)
    try:
        for raw in (
            bytes(safetensors.numpy.save(lora())),
            *(make() for make in list(HOSTILE.values())[:6]),
        ):
            expected = describe_header(raw, len(raw), b"", BOUNDS, base)
            assert headers.describe(raw, len(raw), b"") == expected
    finally:
        headers.close()


# Whatever a header holds

_names = st.one_of(
    st.text(max_size=40),
    st.builds(
        "{}{}.{}{}".format,
        st.sampled_from(["transformer.", "lora_unet_", "text_encoder.", "base_model.model.", ""]),
        st.sampled_from([*LAYERS, "x", "double_blocks_0_img_attn_qkv", "norm_out.linear"]),
        st.sampled_from(
            ["lora_A", "lora_B", "lora_down", "lora_up", "alpha", "diff", "diff_b", "lora_A.x", "s"]
        ),
        st.sampled_from([".weight", "", ".bias"]),
    ),
)
_sizes = st.integers(-2, 600)
_tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "C64", "x", ""]),
        "shape": st.one_of(
            st.lists(_sizes, max_size=5), st.sampled_from([[4, 128], [128, 4], [4, 512], []])
        ),
        "data_offsets": st.one_of(st.lists(_sizes, max_size=3), st.just("packed")),
    }
)
_metadata = st.dictionaries(
    st.sampled_from(["lora_adapter_metadata", "lora_alpha", "ss_network_alpha", "adapter_config"]),
    st.one_of(
        st.text(max_size=20),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
            lambda inner: st.dictionaries(
                st.sampled_from(["transformer.lora_alpha", "lora_alpha", "alpha_pattern", "bias",
                                 "transformer.alpha_pattern", "use_rslora", "peft_type"]),
                inner, max_size=4,
            ),
            max_leaves=6,
        ).map(json.dumps),
    ),
)  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A header of such parts, most of whose tensors lie where they should, or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    declared, end = draw(st.dictionaries(_names, _tensors, max_size=8)), 0
    sizes = {"F16": 2, "BF16": 2, "I64": 8, "C64": 8, "F8_E4M3": 1}
    for tensor_entry in declared.values():
        if tensor_entry["data_offsets"] == "packed":
            count = int(np.prod([max(side, 0) for side in tensor_entry["shape"]], dtype=object))
            nbytes = min(sizes.get(tensor_entry["dtype"], 4) * count, 2**20)
            tensor_entry["data_offsets"] = [end, end + nbytes]
            end += nbytes
    whole: dict[str, Any] = {**declared, "__metadata__": draw(_metadata)}
    raw = bytearray(file_of(whole, end))
    if draw(st.booleans()):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


def look(raw: bytes, base: BaseLayers) -> None:
    """It is read, or refused in a sentence; and what is read lies in the file."""
    why = ""
    try:
        header = read_header(lambda begin, end: raw[begin:end], len(raw), max_rank=256)
        assert all(
            0 <= tensor.begin <= tensor.end <= len(raw) for tensor in header.tensors.values()
        )
        plan = plan_of(header, base)
        check_values(np.frombuffer(raw, np.uint8), header.tensors, plan.tensors, plan.zeros)
    except BadAdapter as error:
        why = str(error)
    assert "\n" not in why
    assert len(why) < 600


@given(raw=files())
@settings(max_examples=150)
def test_whatever_a_header_holds_it_is_read_or_refused(raw: bytes, base: BaseLayers) -> None:
    look(raw, base)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))  # Hypothesis keeps all that it has drawn for a test
@given(raw=files())
@settings(max_examples=2_000)
def test_whatever_many_headers_hold_they_are_read_or_refused(
    part: int, raw: bytes, base: BaseLayers
) -> None:
    look(raw, base)
