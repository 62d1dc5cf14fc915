"""The context that travels from preprocess to postprocess."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.contracts.postprocess_context import PostprocessContext, request_in


@given(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50), st.booleans())
def test_every_part_comes_back(request: bytes, source: bytes, paste: bytes, decoded: bool) -> None:
    context = PostprocessContext(request, source, paste, decoded)
    packed = context.pack()
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert PostprocessContext.unpack(packed) == context
    assert request_in(packed) == request


def test_pictures_are_not_copied_again() -> None:
    packed = PostprocessContext(b"{}", b"source", b"paste", True).pack().copy()
    context = PostprocessContext.unpack(packed)
    packed[:] = ord("x")
    assert (bytes(context.source), bytes(context.paste)) == (b"xxxxxx", b"xxxxx")
    assert context.request == b"{}"
