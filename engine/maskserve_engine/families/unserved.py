"""Models that diffusers has and no family serves, with what sets them apart."""

from __future__ import annotations

from types import MappingProxyType

_LAYERED = "Qwen-Image-Layered answers with a stack of layers"
_FIBO = "Bria's Fibo takes a description in JSON, which another model writes"
UNSERVED = MappingProxyType(
    {
        "QwenImageLayeredPipeline": _LAYERED,
        "QwenImageLayeredModularPipeline": _LAYERED,
        "GlmImagePipeline": "GLM-Image first writes tokens of a picture, one after the other",
        "JoyImageEditPlusPipeline": "JoyImage-Edit for one picture is served, not for several",
        "BriaFiboPipeline": _FIBO,
        "BriaFibo2Pipeline": _FIBO,
        "BriaFiboEditPipeline": _FIBO,
    }
)
"""Clauses by the class in a folder's index."""
