"""What travels from preprocess to postprocess."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maskserve_core.carried import Carried
from tests.fakes.scripted_engine import EDIT


@given(st.binary(max_size=50), st.binary(max_size=50), st.text(max_size=20))
def test_every_part_comes_back(source: bytes, paste: bytes, prompt: str) -> None:
    carried = Carried(replace(EDIT, prompt=prompt), source, paste)
    packed = carried.pack()
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert Carried.unpack(packed) == carried
