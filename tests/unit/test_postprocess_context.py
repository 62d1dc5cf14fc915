"""What travels from preprocess to postprocess."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maskserve_core.contracts.postprocess_context import PostprocessContext


@given(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50), st.booleans())
def test_every_part_comes_back(request: bytes, source: bytes, paste: bytes, decoded: bool) -> None:
    context = PostprocessContext(request, source, paste, decoded)
    packed = context.pack()
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert PostprocessContext.unpack(packed) == context
