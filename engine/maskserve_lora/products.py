"""LoKr and LoHa: updates of a layer that are the product of two matrices.

    LoKr   W1 ⊗ W2    lokr_w1 [l, m], or lokr_w1_a [l, r] times lokr_w1_b [r, m]; lokr_w2 the same
    LoHa   W1 ∘ W2    hada_w1_a [out, r] times hada_w1_b [r, in]; hada_w2_a and hada_w2_b the same

With a core of Tucker's, lokr_t2 or hada_t1 and hada_t2 [r, r, k, k], a side of a convolution is
aᵀ · (core · b): its a is [r, out], its b [r, in].

Kronecker's and Hadamard's products of matrices that have factors have factors, too, of the product
of their ranks. So such an update is served as a LoRA of that rank (`adapters.lora_file`), with the
inputs of a convolution flattened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["LoRA", "LoKr", "LoHa", "OFT"]

ROLES: Mapping[str, Kind] = {
    **{f"lokr_w{side}{end}": "LoKr" for side in (1, 2) for end in ("", "_a", "_b")},
    **{f"hada_w{side}{end}": "LoHa" for side in (1, 2) for end in ("_a", "_b")},
    "lokr_t2": "LoKr",
    "hada_t1": "LoHa",
    "hada_t2": "LoHa",
}
"""Names of an update's matrices behind its layer's, and their kind."""


class Side(NamedTuple):
    """Shape of W1 or W2."""

    rows: int
    columns: int
    rank: int
    """Rank of its factors; for a whole matrix the largest that it may have."""
    whole: bool


class Product(NamedTuple):
    """Shape of an update."""

    outputs: int
    inputs: int
    """Inputs, times the places of a convolution's kernel."""
    rank: int
    """Rank of its factors as a LoRA."""
    inner_rank: int
    """Rank by which an alpha is divided; 0: no side has factors, and no alpha counts."""


def product_of(kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> Product:
    """Return the shape of an update from the shapes of its matrices, by their names in `ROLES`.

    Raises:
        ValueError: matrices are missing or do not fit; the text ends a sentence about the layer.
    """
    stem = "lokr" if kind == "LoKr" else "hada"
    first, second = (_side(f"{stem}_w{side}", shapes) for side in (1, 2))
    factored = [side for side in (second, first) if not side.whole]
    inner_rank = factored[0].rank if factored else 0
    rank = first.rank * second.rank
    if kind == "LoHa":
        if first[:2] != second[:2]:
            raise ValueError(f"has a W1 of {first[:2]} and a W2 of {second[:2]}")
        outputs, inputs = first[:2]
    else:
        outputs, inputs = first.rows * second.rows, first.columns * second.columns
    return Product(outputs, inputs, min(rank, outputs, inputs), inner_rank)


def core_of(name: str) -> str:
    """Return the name of a side's core."""
    return name.replace("_w", "_t")


def _side(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Side:
    whole, left, right = (shapes.get(f"{name}{end}") for end in ("", "_a", "_b"))
    core = shapes.get(core_of(name))
    if whole is not None:
        if left is not None or right is not None or core is not None or len(whole) not in (2, 4):
            raise ValueError(f"has {name} in another form")
        rows, columns = whole[0], math.prod(whole[1:])
        side = Side(rows, columns, min(rows, columns), whole=True)
    elif core is not None and left is not None and right is not None:
        if len(core) != 4 or len(left) != 2 or len(right) != 2 or core[:2] != left[:1] + right[:1]:
            raise ValueError(
                f"has factors of {name} that do not fit their core: {list(left)}, {list(core)}, "
                f"{list(right)}"
            )
        side = Side(left[1], right[1] * core[2] * core[3], core[0], whole=False)
    elif left is not None and right is not None:
        if len(left) != 2 or len(right) not in (2, 4) or left[1] != right[0]:
            raise ValueError(f"has factors of {name} that do not fit: {list(left)}, {list(right)}")
        side = Side(left[0], math.prod(right[1:]), right[0], whole=False)
    else:
        raise ValueError(f"is not whole: it has no {name}")
    if min(side[:3]) < 1:
        raise ValueError(f"has an empty {name}")
    return side
