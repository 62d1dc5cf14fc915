"""Readers of files and SETTINGS name every fault, with what they accept."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given as random
from hypothesis import strategies as st
from msgspec import Meta

from maskserve_common.reading import Misread, Table, read, require_known


class Part(Table, frozen=True):
    name: Annotated[str, Meta(pattern=r"\A[a-z]+\Z", max_length=5, description="up to 5 letters")]
    scale: Annotated[float, Meta(ge=-1, le=1)] = 1.0


class Whole(Table, frozen=True):
    count: Annotated[int, Meta(ge=0, le=9)] | None = None
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    mode: Literal["on", "off"] = "on"
    flag: bool = False
    parts: Annotated[tuple[Part, ...], Meta(max_length=2)] = ()


@pytest.mark.parametrize(
    ("value", "path", "problem", "accepted"),
    [
        ({"count": 10}, "count", "10 is out of range", "0 to 9"),
        ({"count": 10**30}, "count", "a huge integer is out of range", "0 to 9"),
        ({"count": "4"}, "count", "'4' is not an integer", "0 to 9"),
        ({"count": True}, "count", "True is not an integer", "0 to 9"),
        ({"count": "x" * 90}, "count", "'" + "x" * 56 + "... is not an integer", "0 to 9"),
        ({"share": 0}, "share", "0 is out of range", "a number above 0 to 1"),
        ({"share": float("nan")}, "share", "nan is not a finite number", "a number above 0 to 1"),
        ({"share": float("inf")}, "share", "inf is not a finite number", "a number above 0 to 1"),
        ({"share": 10**400}, "share", "a huge integer is out of range", "a number above 0 to 1"),
        ({"mode": "maybe"}, "mode", "'maybe' is not one of them", "off, on"),
        ({"flag": 1}, "flag", "1 is not a boolean", "true or false"),
        ({"parts": {}}, "parts", "{} is not a list", "a list"),
        ({"parts": [{"name": "a"}] * 3}, "parts", "has 3 entries", "a list"),
        ({"parts": [1]}, "parts[0]", "1 is not an object", "an object with name, scale"),
        ({"parts": [{}]}, "parts[0].name", "is missing", "up to 5 letters"),
        ({"parts": [{"name": "A"}]}, "parts[0].name", "'A' has another form", "up to 5 letters"),
        ({"parts": [{"name": "abcdef"}]}, "parts[0].name", "is 6 characters", "up to 5 letters"),
        ({"parts": [{"name": "a\n"}]}, "parts[0].name", r"'a\n' has another", "up to 5 letters"),
        ({"parts": [{"name": "a", "x": 1}]}, "parts[0].x", "is not a known key", "name, scale"),
        ({"parts": [{"name": "a", "scale": 2}]}, "parts[0].scale", "2 is out", "a number from -1"),
        ({"`$.parts` ": 1}, "`$.parts` ", "is not a known key", "count, flag, mode, parts, share"),
        ({"": 1}, "", "is not a known key", "count, flag"),
        ({"mode": "\ud800"}, "mode", "holds lone surrogates", "Unicode text"),
        ({"\ud800": 1}, "\ud800", "holds lone surrogates", "Unicode text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(value: Any, path: str, problem: str, accepted: str) -> None:
    with pytest.raises(Misread) as refused:
        read(value, Whole)
    assert refused.value.path == path
    assert refused.value.problem.startswith(problem)
    assert refused.value.accepted.startswith(accepted)


def test_null_stands_for_not_given_where_the_key_is_known() -> None:
    known_fields = {*Whole.__struct_fields__, *Part.__struct_fields__}
    value = {"count": None, "mode": None, "parts": [{"name": "a", "scale": None}], "x": None}
    assert require_known(value, known_fields) == {"parts": [{"name": "a"}], "x": None}


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from((*Whole.__struct_fields__, "name", "x")), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@random(st.dictionaries(st.sampled_from((*Whole.__struct_fields__, "x")), json))
def test_anything_is_read_or_refused(value: dict[str, Any]) -> None:
    with suppress(Misread):
        read(value, Whole)
