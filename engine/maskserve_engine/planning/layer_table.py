"""Linear layers at one place of a model, by name and shape.

One table gives the FLOPs of the model, with inputs times outputs of multiply-adds per unit, and
those of its LoRAs, which have rank times inputs plus outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

Shape = tuple[float, float]
"""Inputs and outputs; a convolution's kernel counts among the inputs."""
Shapes = Mapping[str, Shape]
"""Layers by name."""
Layers = Mapping[str, Shapes]
"""Layers by the term (`flops.TERMS`) for each unit of which they run; a layer may have several."""

Products = Callable[[str, Shape], float]
"""Multiply-adds of a layer for one unit."""


def of_model(_: str, shape: Shape) -> float:
    """Return the multiply-adds of the model itself."""
    return prod(shape)


def shape_flops(shapes: Shapes, products: Products = of_model) -> float:
    """Return the FLOPs of these layers for one unit."""
    return 2.0 * sum(products(name, shape) for name, shape in shapes.items())


def layer_flops(layers: Layers, products: Products = of_model) -> dict[str, float]:
    """Return the FLOPs per unit, by term."""
    return {term: shape_flops(shapes, products) for term, shapes in layers.items()}
