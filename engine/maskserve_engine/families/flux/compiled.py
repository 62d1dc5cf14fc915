"""The segments of FLUX blocks, before and after attention, compiled by torch.compile.

A segment is a function of tensors: weights, tokens, vectors and indices, of which no size but the
model's own is fixed. So one graph of each segment serves all blocks of a sort, whatever rows, masks
and entries there are, and all are compiled at start. What lies between the segments (attention and
the cache) stays as it is.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from maskserve_engine.batch.packing import Packing
from maskserve_engine.families.flux.blocks import (
    clip,
    split,
    stream_post,
)
from maskserve_engine.families.flux.weights import Double, FluxWeights, Single
from maskserve_engine.layers.modulation import add_gated, modulate
from maskserve_engine.layers.qk_norm_rope import norm_heads

_log = logging.getLogger(__name__)
_ROWS, _TEXT, _IMAGE = 3, 37, 53
"""Sizes that segments are compiled with: no two sizes of a model are like these."""


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device`; None if it can."""
    name = "CC" if device.type == "cuda" else "CXX"
    program = os.environ.get(name) or {"CC": "gcc", "CXX": "g++"}[name]
    if shutil.which(program) is None:
        return f"there is no compiler ({program}, or another that {name} names)"
    return None


def compile_segments(weights: FluxWeights) -> CompiledSegments | None:
    """The segments of the model's blocks, compiled; None, with the reason in the log, if that
    fails. Takes most of a minute; a process that finds the files of an earlier one, a few seconds.
    """
    reason = missing_compiler(weights.device)
    if not weights.plain:
        reason = "weights of the blocks are in a form of a library's own"
    if reason is not None:
        _log.warning("blocks run uncompiled: %s", reason)
        return None
    begin, segments = time.perf_counter(), CompiledSegments()
    try:
        with torch.inference_mode():
            segments.warm_up(weights)
    except Exception:  # whatever a compiler can raise; the model serves without
        _log.exception("blocks run uncompiled: torch.compile has failed")
        return None
    # What was not foreseen runs as it stands: to compile it would hold up every row's step.
    torch.compiler.set_stance("eager_on_recompile")
    _log.info("blocks are compiled; that took %.1f s", time.perf_counter() - begin)
    return segments


def _rotated(x: Tensor, norms: Tensor, cis: Tensor) -> Tensor:
    """`qk_norm_rope` in real numbers: complex ones are not compiled; `cis` [N, head_dim / 2, 2]."""
    real, imaginary = norm_heads(x, norms).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cis[:, None, None].unbind(-1)
    both = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(both, dim=-1).flatten(-2).to(x.dtype)


def _spread(vectors: Tensor, row_of: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Each token's own vectors, from its row's."""
    return vectors.index_select(0, row_of).chunk(parts, dim=-1)


def _before_double(
    block: Double,
    c: Tensor,
    x: Tensor,
    of_c: Tensor,
    of_x: Tensor,
    row_of_c: Tensor,
    row_of_x: Tensor,
    to_rows: Tensor,
    stream_of: Tensor,
    cis: Tensor,
) -> tuple[Tensor, Tensor]:
    c_shift, c_scale, *_ = _spread(of_c, row_of_c, 6)
    x_shift, x_scale, *_ = _spread(of_x, row_of_x, 6)
    texts = block.text.qkv(modulate(c, c_shift, c_scale))
    images = block.image.qkv(modulate(x, x_shift, x_scale))
    qkv = torch.cat((texts, images)).index_select(0, to_rows)
    norms = block.norms.index_select(0, stream_of)
    qk, v = split(qkv, norms.shape[-1])
    return _rotated(qk, norms, cis), v


def _after_double(
    block: Double,
    c: Tensor,
    x: Tensor,
    attended: Tensor,
    of_c: Tensor,
    of_x: Tensor,
    row_of_c: Tensor,
    row_of_x: Tensor,
    from_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    both = attended.index_select(0, from_rows)
    text, _ = stream_post(block.text, c, both[: c.shape[0]], _spread(of_c, row_of_c, 6))
    image, _ = stream_post(block.image, x, both[c.shape[0] :], _spread(of_x, row_of_x, 6))
    return clip(text), image


def _before_single(
    block: Single, x: Tensor, vectors: Tensor, row_of: Tensor, cis: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shift, scale, _ = _spread(vectors, row_of, 3)
    both, width = block.qkv_up(modulate(x, shift, scale)), x.shape[1]
    qk, v = split(both[:, : 3 * width], block.norms.shape[-1])
    up = F.gelu(both[:, 3 * width :], approximate="tanh")
    return _rotated(qk, block.norms, cis), v, up


def _after_single(
    block: Single, x: Tensor, attended: Tensor, up: Tensor, vectors: Tensor, row_of: Tensor
) -> Tensor:
    found = block.out(torch.cat((attended, up), dim=-1))
    return clip(add_gated(x, _spread(vectors, row_of, 3)[2], found)[0])


class CompiledSegments:
    """Compiled segments; what they take is `weights.Segments`'.

    Args:
        backend: of torch.compile.
        dynamic: whether one segment serves all numbers of rows and tokens.
    """

    def __init__(self, backend: str = "inductor", *, dynamic: bool = True) -> None:
        def compiled(segment: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(segment, dynamic=dynamic, fullgraph=True, backend=backend)

        self._before_double, self._after_double = compiled(_before_double), compiled(_after_double)
        self._before_single, self._after_single = compiled(_before_single), compiled(_after_single)

    def warm_up(self, weights: FluxWeights) -> None:
        """Compile what the model's blocks need, for any number of rows and tokens."""
        device, both = weights.device, _TEXT + _IMAGE

        def some(tokens: int, width: int = weights.width) -> Tensor:
            return torch.zeros(tokens, width, dtype=weights.dtype, device=device)

        def vectors(parts: int) -> Tensor:
            made = some(_ROWS, parts * weights.width)
            mark_unbacked(made, 0)  # else a single row would be a case of its own
            return made

        def numbers(count: int, below: int) -> Tensor:
            return torch.arange(count, device=device) % below

        cis = torch.zeros(both, weights.head_dim // 2, 2, device=device)
        for double in weights.double_blocks[:1]:
            streams, of = (some(_TEXT), some(_IMAGE)), (vectors(6), vectors(6))
            rows = numbers(_TEXT, _ROWS), numbers(_IMAGE, _ROWS)
            order = numbers(both, both), numbers(both, 2)
            self._before_double(double, *streams, *of, *rows, *order, cis)
            self._after_double(double, *streams, some(both), *of, *rows, numbers(both, both))
        for single in weights.single_blocks[:1]:
            row_of = numbers(both, _ROWS)
            *_, up = self._before_single(single, some(both), vectors(3), row_of, cis)
            self._after_single(single, some(both), some(both), up, vectors(3), row_of)

    def before_double(
        self,
        block: Double,
        text: Tensor,
        image: Tensor,
        vectors: tuple[Tensor, Tensor],
        packing: Packing,
        cis: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = packing.text_stream.row_of, packing.image_stream.row_of
        order = packing.to_rows, packing.stream_of
        done: tuple[Tensor, Tensor] = self._before_double(
            block, text, image, vectors[1], vectors[0], *rows, *order, _real(cis)
        )
        return done

    def after_double(
        self,
        block: Double,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        vectors: tuple[Tensor, Tensor],
        packing: Packing,
    ) -> tuple[Tensor, Tensor]:
        rows = packing.text_stream.row_of, packing.image_stream.row_of
        done: tuple[Tensor, Tensor] = self._after_double(
            block, text, image, attended, vectors[1], vectors[0], *rows, packing.from_rows
        )
        return done

    def before_single(
        self, block: Single, x: Tensor, vectors: Tensor, packing: Packing, cis: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        done: tuple[Tensor, Tensor, Tensor] = self._before_single(
            block, x, vectors, packing.row_stream.row_of, _real(cis)
        )
        return done

    def after_single(
        self,
        block: Single,
        x: Tensor,
        attended: Tensor,
        up: Tensor,
        vectors: Tensor,
        packing: Packing,
    ) -> Tensor:
        done: Tensor = self._after_single(
            block, x, attended, up, vectors, packing.row_stream.row_of
        )
        return done


def _real(cis: Tensor) -> Tensor:
    return torch.view_as_real(cis)
