"""Steps of several passes padded to few sizes, so that one recorded step (`graphs`) serves many
batches.

Masks decide how long such a step is, and rows join and leave. Padded, streams and keys have one of
few lengths, and where a row lies in them is data that is copied in:

    text stream    | text 0 | text 1 | … | pads |
    image stream   | image 0 | image 1 | … | pads |
    keys           | row 0 | row 1 | … | key of the pads | unused |

Pads are a pass behind all others. They see one key, which no row sees, and nothing reads their
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Inputs
from maskserve_engine.batch.packing import Packed, Packing, PlacedKV, Stream, pack
from maskserve_engine.batch.row_updates import MovingRows
from maskserve_engine.batch.transfer import copy_tensors, mapped, moved
from maskserve_engine.layers.scatter_kv import slots_of
from maskserve_engine.layers.shrink_expand import padded_tiles

QUANTUM, KEYS = 256, 1024
"""Streams and keys have multiples of so many tokens; unused keys cost memory alone."""
LONE_TEXT, LONE_IMAGE = 64, 128
"""The same for the streams of a lone pass, where pads weigh more."""


class Sizes(NamedTuple):
    """Lengths of a padded step: all that its shapes depend on."""

    passes: int
    text: int
    image: int
    keys: int

    @classmethod
    def of(cls, text: Sequence[int], image: Sequence[int], keys: int) -> Sizes:
        """Return the sizes for passes of these computed tokens that see `keys` keys in all."""
        quanta = (LONE_TEXT, LONE_IMAGE) if len(text) == 1 else (QUANTUM, QUANTUM)
        of_text, of_image = map(padded, (sum(text), sum(image)), quanta)
        return cls(len(text), of_text, of_image, padded(keys + 1, KEYS))


def padded(count: int, quantum: int) -> int:
    """Return the next of few lengths, which lie twice as far apart where pads weigh less."""
    step = quantum if count <= 8 * quantum else 2 * quantum
    return -(-count // step) * step


def sizes_of(packed: Packed) -> Sizes | None:
    """Return the sizes to which rows are padded; None: they see what a padded step does not have,
    fixed tokens or the context at time 0.
    """
    narrow = packed.layout.narrow
    at_time_0 = narrow.modes is not None or any(narrow.context)
    if at_time_0 or packed.sees_fixed or any(row.pads for row in packed.rows):
        return None
    return Sizes.of(narrow.text, narrow.image, narrow.all_keys.k_spans[-1][1])


class PaddedRows(Packed):
    """Tensors of a padded step. Any rows of its sizes may be copied in (`take`); it has no entries
    and keeps nothing.
    """

    padded = True
    sizes: Sizes

    @classmethod
    def of(cls, packed: Packed, sizes: Sizes, inputs: Inputs, *, alone: bool = False) -> Self:
        """Return the tensors, in the memory of `inputs`, with these rows; `alone`: also as
        image-only blocks see them.
        """

        def empty(like: Tensor, count: int) -> Tensor:
            return inputs.empty(like, (count, *like.shape[1:]))

        rows = cls.__new__(cls)
        vars(rows).update(vars(packed))
        vars(rows).pop("wide_cis", None)  # made of the tensors before
        vars(rows).pop("alone", None)
        if alone:
            rows.alone = cls.of(packed.alone, sizes._replace(text=0), inputs)
        rows.pads = None
        rows.rows, rows.cached = (), (None,) * len(packed.cached)
        rows.captures, rows.primes = (None,) * len(packed.captures), False
        rows.residuals = dict.fromkeys(packed.residuals)
        rows.sizes, rows.placed_kv = sizes, PlacedKV()
        rows.tokens, rows.text = empty(packed.tokens, sizes.image), empty(packed.text, sizes.text)
        rows.cis = empty(packed.cis, sizes.text + sizes.image)
        rows.tokens[: len(packed.tokens)] = packed.tokens
        rows.cached_cis = packed.cis[:0]  # no padded step projects cached tokens
        rows.layout = replace(
            packed.layout, narrow=mapped(_padded(packed.layout.narrow, sizes), inputs.copy)
        )
        rows.take(packed)
        return rows

    @property
    def moving(self) -> list[MovingRows]:
        """The streams, for the updates of rows' LoRAs."""
        narrow = self.layout.narrow
        streams = narrow.text_stream, narrow.image_stream, narrow.row_stream
        return [
            MovingRows(stream.spans, stream.tiles) for stream in streams if stream.tiles is not None
        ]

    def take(self, other: Packed) -> None:
        for to, source in ((self.text, other.text), (self.cis, other.cis)):
            to[: len(source)].copy_(source)
        if "alone" in vars(self):
            self.alone.take(other.alone)
        copy_tensors(self.layout.narrow, _padded(other.layout.narrow, self.sizes))


def _padded(packing: Packing, sizes: Sizes) -> Packing:
    device = packing.row_stream.row_of.device
    return padded_packing(packing.text, packing.image, packing.cached, sizes, device)


@lru_cache(maxsize=16)
def padded_packing(
    text: tuple[int, ...],
    image: tuple[int, ...],
    cached: tuple[int, ...],
    sizes: Sizes,
    device: torch.device,
) -> Packing:
    """Return the layout of passes and their pads. Cached, since batches last many steps.

    Args:
        text: text tokens of each pass.
        image: computed image tokens of each pass.
        cached: cached tokens of each pass.
        sizes: the padded step's.
        device: device of the tensors.
    """
    passes, computed = len(text), sum(text) + sum(image)
    pads = sizes.text - sum(text), sizes.image - sum(image)
    nothing = ((0,),) * (passes + 1)
    exact = pack(
        (*text, pads[0]),
        (*image, pads[1]),
        (*((count,) for count in cached), (0,)),
        nothing,
        device,
        (0,) * (passes + 1),
        False,
    )
    keys = computed + sum(cached)
    assert exact.core_in_keys is not None
    segments = replace(
        exact.all_keys,
        q_spans=((0, sizes.text + sizes.image),),
        k_spans=((0, sizes.keys),),
        k_ends=exact.all_keys.k_ends.clamp(max=keys + 1),
        q_uniform=0,
        k_uniform=0,
        moving=True,
    )
    no_slots = slots_of(((0, 0),))  # rows of other sizes have other ones
    packing = replace(
        exact,
        text_stream=_moving(exact.text_stream, passes),
        image_stream=_moving(exact.image_stream, passes),
        row_stream=_moving(exact.row_stream, passes),
        computed=segments,
        all_keys=segments,
        core_in_keys=exact.core_in_keys.clamp(max=keys),
        slots=no_slots,
        fixed_slots=no_slots,
    )
    return moved(packing, device)


def _moving(stream: Stream, passes: int) -> Stream:
    """Let pads take the vectors of the last pass, and no row rely on equal lengths."""
    return replace(
        stream,
        row_of=stream.row_of.clamp(max=passes - 1),
        uniform=0,
        broadcasts=False,
        tiles=padded_tiles(stream.spans[:passes], stream.spans[-1][1]),
    )
