"""Check of what a model's `run` yields, beside the outputs that the node's signature declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from maskserve_workflows.values import Areas, Judgement, NamedValue

_ACCEPTED: Final = {
    "picture": "pixels uint8 [H, W, 3], or a picture that the node received",
    "mask": "pixels uint8 [H, W], or a mask that the node received",
    "text": "str",
    "verdict": "Judgement",
    "regions": "Areas",
    "pictures": "a list of pictures",
    "verdicts": "a list of verdicts",
}


def misfit(outputs: Any, kinds: Mapping[str, str]) -> str:
    """Return the problem of a call's outputs, and the accepted ones; empty: they fit.

    Args:
        outputs: outputs by name, as `run` yields them.
        kinds: kind of each output that the signature declares.
    """
    if not isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__}; accepted: {', '.join(kinds)} by name"
    if outputs.keys() != kinds.keys():
        return f"{', '.join(map(str, outputs)) or 'nothing'}; accepted: {', '.join(kinds)}"
    for name, kind in kinds.items():
        value = outputs[name]
        if kind in ("pictures", "verdicts"):
            if not isinstance(value, tuple | list):
                return f"{name}: {_described(value)}; accepted: {_ACCEPTED[kind]}"
            kind, parts = kind[:-1], list(value)
        else:
            parts = [value]
        for part in parts:
            if not _is(kind, part):
                return f"{name}: {_described(part)}; accepted: {_ACCEPTED[kind]}"
    return ""


def _is(kind: str, value: Any) -> bool:
    """Return whether one value is of a kind."""
    if kind not in ("picture", "mask"):
        return isinstance(value, {"text": str, "verdict": Judgement, "regions": Areas}[kind])
    if not isinstance(value, np.ndarray):
        return isinstance(value, bytes | memoryview | NamedValue)
    if value.dtype != np.uint8 or not value.size:
        return False
    return value.ndim == 2 if kind == "mask" else value.ndim == 3 and value.shape[2] == 3


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"
