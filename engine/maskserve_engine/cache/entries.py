"""Entries: cached activations of one template at one anchor, and their storage formats.

`model` keeps the tensor as it is; `int8` and `float8` keep one scale per channel; `int4` keeps one
scale per channel and one per token and group of 32 channels. Scales per channel cost nothing
beside the tokens, and keep a few large channels from drowning the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from maskserve_common.config import ENTRY_FORMATS
from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.reserve import Block, padded

GROUP = 32
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = 448.0
_STEPS = torch.arange(16, dtype=torch.float32) - 8
_PAIRS = torch.stack((_STEPS.repeat(16), _STEPS.repeat_interleave(16)), dim=-1)
_PAIRS = _PAIRS.view(torch.float64).flatten()
"""[256] the two numbers of each int4 byte, seen as one float64. On a CPU the table takes half the
time of splitting bytes.
"""


@dataclass(frozen=True, slots=True)
class Coded:
    """A [tokens, channels] tensor in a storage format."""

    format: str
    data: Tensor
    """[tokens, channels], or [tokens, channels / 2] bytes for int4."""
    scale: Tensor | None = None
    """[channels] float32."""
    groups: Tensor | None = None
    """[tokens, channels / 32] float16, int4 only."""

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(len(self.data))

    def nbytes_of(self, tokens: int) -> int:
        """Return the bytes that `tokens` tokens take."""
        by_token = self.data.nbytes + (0 if self.groups is None else self.groups.nbytes)
        fixed = 0 if self.scale is None else self.scale.nbytes
        return fixed + by_token * tokens // max(1, len(self.data))

    @property
    def channels(self) -> int:
        return self.data.shape[1] * (2 if self.format == "int4" else 1)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.data, self.scale, self.groups) if t is not None)

    def map(
        self, tokens: Callable[[Tensor], Tensor], channels: Callable[[Tensor], Tensor] | None = None
    ) -> Coded:
        """Return a copy with `tokens` applied to tensors with a row per token, and `channels` to
        the scale per channel.
        """
        scale = self.scale if self.scale is None or channels is None else channels(self.scale)
        groups = None if self.groups is None else tokens(self.groups)
        return replace(self, data=tokens(self.data), scale=scale, groups=groups)

    def take(self, index: Tensor) -> Coded:

        def selected(t: Tensor) -> Tensor:
            # float8 has no index_select on every backend: bytes have.
            raw = t.view(torch.uint8) if t.dtype == _FLOAT8 else t
            return raw.index_select(0, index).view(t.dtype)

        return self.map(selected)

    def columns(self, begin: int, end: int, of: int) -> Coded:
        """Return the channels of heads `begin` to `end` of `of`, for all tokens; a view.

        Raises:
            ValueError: these heads would cut int4's groups of channels.
        """

        def cut(t: Tensor) -> Tensor:
            return t[..., slice(*cut_at(t.shape[-1], begin, end, of))]

        return self.map(cut, cut)

    def into(self, out: Tensor) -> None:
        """Decode into `out`, [tokens, channels] of any float dtype."""
        if self.format == "model":
            out.copy_(self.data)
        elif self.format == "int4":
            assert self.scale is not None
            assert self.groups is not None
            pairs = _PAIRS.to(self.data.device).index_select(0, self.data.flatten().int())
            grouped = pairs.view(torch.float32).view(*self.groups.shape, GROUP).to(out.dtype)
            grouped.mul_(self.groups.to(out.dtype)[:, :, None])
            torch.mul(grouped.flatten(1), self.scale.to(out.dtype), out=out)
        else:
            assert self.scale is not None
            scale = self.scale.to(out.dtype)
            # Integers are promoted on the way; float8 is not.
            data = self.data if self.format == "int8" else self.data.to(out.dtype)
            torch.mul(data, scale, out=out)


def cut_at(width: int, begin: int, end: int, of: int) -> tuple[int, int]:
    """Return the bounds, among `width` numbers, of the parts `begin` to `end` of `of` equal parts.

    Raises:
        ValueError: a bound is no whole number.
    """
    first, last = divmod(width * begin, of), divmod(width * end, of)
    if first[1] or last[1]:
        raise ValueError(f"heads are no whole part of {width} numbers; int4 has one per {GROUP}")
    return first[0], last[0]


def encode(x: Tensor, format: str) -> Coded:
    """Store x [tokens, channels] contiguously, token by token.

    Raises:
        ValueError: unknown format, or int4 with channels not divisible by 32.
    """
    if format == "model":
        return Coded(format, x.clone(memory_format=torch.contiguous_format))
    if format not in ENTRY_FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(ENTRY_FORMATS)}")
    wide = x.float().contiguous()
    largest = wide.abs().amax(dim=0) if len(wide) else wide.new_zeros(wide.shape[1])
    scale = largest.clamp_min(1e-12)
    if format == "int8":
        scale = scale / 127.0
        return Coded(format, (wide / scale).round_().to(torch.int8), scale)
    if format == "float8":
        scale = scale / _FLOAT8_MAX
        return Coded(format, (wide / scale).to(_FLOAT8), scale)
    if x.shape[1] % GROUP:
        raise ValueError(f"int4 needs channels divisible by {GROUP}, not {x.shape[1]}")
    grouped = (wide / scale).unflatten(1, (-1, GROUP))
    groups = (grouped.abs().amax(dim=2) / 7.0).clamp_min(1e-7).half()
    steps = (grouped / groups.float()[:, :, None]).round_().clamp_(-7, 7).add_(8).flatten(1)
    low, high = steps.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return Coded(format, low | (high << 4), scale, groups)


PARTS = ("h", "kv", "end", "map")
"""Parts of an entry: a block's input hidden states, its keys and values, its stack's output, and a
feature map that a UNet keeps behind its blocks.
"""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One block's activations of the image tokens of its level.

    A model that runs twice per step (classifier-free guidance) keeps both halves, one behind the
    other: `tokens` is then twice the level's.
    """

    hidden: Coded | None = None
    """[tokens, width] at the block's input: part `h`."""
    keys: Coded | None = None
    """[tokens, width] after norm and rotary embedding: part `kv`, with the values."""
    values: Coded | None = None
    end: Coded | None = None
    """[tokens, width] at the block's output: part `end`, where a UNet's stack ends."""
    map: Coded | None = None
    """[tokens, width] of a feature map's positions: part `map`; no block has any."""
    parts: Mapping[str, tuple[Coded, ...]] = field(init=False, repr=False, compare=False)
    """Tensors of the parts that are kept, in the order of PARTS."""

    def __post_init__(self) -> None:
        fields = (self.hidden,), (self.keys, self.values), (self.end,), (self.map,)
        part_tensors = zip(PARTS, fields, strict=True)
        parts = {part: tensors for part, tensors in part_tensors if None not in tensors}
        object.__setattr__(self, "parts", parts)

    @property
    def nbytes(self) -> int:
        return sum(coded.nbytes for tensors in self.parts.values() for coded in tensors)

    def part(self, name: str) -> tuple[Coded, ...]:
        """Return the tensors of one of PARTS; none if it is not kept."""
        return self.parts.get(name, ())

    def map_coded(self, change: Callable[[Coded], Coded]) -> BlockEntry:
        tensors = (self.hidden, self.keys, self.values, self.end, self.map)
        return BlockEntry(*(coded and change(coded) for coded in tensors))


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """All blocks of a template at one anchor. It is immutable."""

    anchor: Anchor
    blocks: tuple[BlockEntry, ...]
    """Blocks in the order of execution. Behind them, if kept: the feature maps, in the order of
    their use, and last the means and variances of all maps' groups.
    """
    memory: Block | None = field(default=None, repr=False, compare=False)
    """The reserve's block with its tensors; None: they lie elsewhere."""
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(block.nbytes for block in self.blocks))

    @property
    def room(self) -> int:
        return sum(
            padded(tensor.nbytes)
            for block in self.blocks
            for tensors in block.parts.values()
            for coded in tensors
            for tensor in coded.tensors()
        )

    def within(self, block: Block) -> AnchorEntry:
        """Return a copy in a block of the reserve, made by as few kernels as possible."""
        sources: list[Tensor] = []
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            target = block.empty(tensor.shape, tensor.dtype)
            sources.append(tensor.contiguous().view(torch.uint8))
            copies.append(target.view(torch.uint8))
            return target

        blocks = tuple(
            [
                block_entry.map_coded(lambda coded: coded.map(copy, copy))
                for block_entry in self.blocks
            ]
        )
        torch._foreach_copy_(copies, sources)
        return AnchorEntry(self.anchor, blocks, block)

    @property
    def broken(self) -> bool:
        """Whether the entry can no longer be read; only entries in files can break."""
        return False


class Recorder:
    """Records a priming row's activations and makes an entry of them.

    Its inputs may be views: it keeps encoded copies.

    Args:
        kinds: kinds to keep per block: any of "h", "kv". Ends are kept whenever they are recorded.
        format: storage format.
        maps: number of feature maps to keep.
        text_tokens: number of first text tokens that show the source to the text encoder; their
            keys and values are kept behind the image's.
        words: number of the text tokens behind these, which are not kept.
    """

    def __init__(
        self,
        kinds: Sequence[frozenset[str]],
        format: str,
        maps: int = 0,
        text_tokens: int = 0,
        words: int = 0,
    ) -> None:
        self.kinds, self.format, self.maps, self._text_tokens = kinds, format, maps, text_tokens
        self._text = text_tokens + words
        self.text = text_tokens > 0
        """Whether entries hold text tokens too."""
        self._hidden: dict[int, Coded] = {}
        self._keys: dict[int, tuple[Coded, Coded]] = {}
        self._ends: dict[int, Coded] = {}
        self._maps: list[Coded] = []
        self._moments: list[Tensor] = []

    def hidden(self, block: int, hidden: Tensor) -> None:
        """`hidden` [tokens, width]: image tokens at the block's input."""
        if "h" in self.kinds[block]:
            self._hidden[block] = encode(hidden, self.format)

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Record `keys` and `values` [tokens, heads, head_dim] of the image tokens, behind the
        text's if that is kept.
        """
        if "kv" in self.kinds[block]:
            tensors = [keys, values]
            if self._text_tokens:
                tensors = [torch.cat((x[self._text :], x[: self._text_tokens])) for x in tensors]
            self._keys[block] = (
                encode(tensors[0].flatten(1), self.format),
                encode(tensors[1].flatten(1), self.format),
            )

    def end(self, block: int, output: Tensor) -> None:
        """Record `output` [tokens, width] of the stack that ends with `block`."""
        self._ends[block] = encode(output, self.format)

    def keep_map(self, positions: Tensor) -> Tensor:
        """Record the next feature map `positions` [n, width]; return it as it will be read."""
        self._maps.append(encode(positions, self.format))
        stored = torch.empty_like(positions)
        self._maps[-1].into(stored)
        return stored

    def moments(self, moments: Tensor) -> None:
        """Record `moments` [halves, 2 · groups] of the last map: means, then variances."""
        self._moments.append(moments)

    def entry(self, anchor: Anchor) -> AnchorEntry:
        blocks = []
        for block in range(len(self.kinds)):
            keys, values = self._keys.get(block, (None, None))
            blocks.append(BlockEntry(self._hidden.get(block), keys, values, self._ends.get(block)))
        assert len(self._maps) == len(self._moments) == self.maps
        if self.maps:
            blocks += [BlockEntry(map=feature_map) for feature_map in self._maps]
            blocks.append(BlockEntry(map=encode(torch.cat(self._moments), "model")))
        return AnchorEntry(anchor, tuple(blocks))
