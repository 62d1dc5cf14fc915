"""Sequence parallelism over packed rows: several ranks take a step together (DeepSpeed Ulysses,
arXiv 2309.14509).

Every rank holds the weights and all rows, and computes its *share* of each row: a part of the text
tokens, of the computed image tokens and of the cached ones. Attention needs all tokens, but its
heads are independent. So before attention the ranks exchange tokens for heads, and after it heads
for tokens: two exchanges per block.

    between attentions   all heads of   | text 0 | image 0 | text 1 | …   a part of each row
    in attention         some heads of  | rank 0 | rank 1 | …             put into row order

Shares may be uneven, and empty. A rank needs its own heads of a cached row's keys and values only.
At the end of the step the ranks exchange the model's answers, so that all have all latents, and any
of them can continue alone or with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from maskserve_engine.batch.forward import CaptureKeys, FillCached, State, Transformer
from maskserve_engine.batch.packing import (
    CachedTokens,
    Capture,
    Packed,
    Packing,
    RowInput,
    TokenCache,
)
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.entries import Coded
from maskserve_engine.layers.attention import Span, spans
from maskserve_engine.layers.scatter_kv import KvSource

_LOCAL = "127.0.0.1"


class Exchange(Protocol):
    rank: int
    count: int
    deals: bool
    """Whether the ranks always deal a step's passes (`cfg_parallel`) and never share tokens."""

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Send each rank its part, all of one dtype, and receive `sizes` elements from each, rank
        by rank.

        Raises:
            RuntimeError: a rank has not answered in time.
        """
        ...


class GangExchange:
    """An `Exchange` by torch.distributed. It uses a process group outside of any world, so one
    process may hold several, and ranks may be threads.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        count: int,
        device: torch.device,
        timeout_s: float,
        *,
        deals: bool = False,
    ) -> None:
        self.rank, self.count, self.deals = rank, count, deals
        self.sent = 0
        backends: Any = dist  # torch's stubs lack most of it
        if device.type == "cuda":
            options = backends.ProcessGroupNCCL.Options()
            make = backends.ProcessGroupNCCL
        else:
            options = backends.ProcessGroupGloo._Options()
            options._devices = [backends.ProcessGroupGloo.create_device(hostname=_LOCAL)]
            make = backends.ProcessGroupGloo
        options._timeout = timedelta(seconds=timeout_s)
        self._group = make(store, rank, count, options)
        self._options = backends.AllToAllOptions()

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in parts])
        item_bytes = flat.element_size()
        received = flat.new_empty(sum(sizes))
        to = [part.numel() * item_bytes for part in parts]
        self._group.alltoall_base(
            received.view(torch.uint8),  # bytes: not every backend has every dtype
            flat.view(torch.uint8),
            [size * item_bytes for size in sizes],
            to,
            self._options,
        ).wait()
        self.sent += sum(to) - to[self.rank]
        return received


def share_of(length: int, rank: int, count: int) -> Span:
    """Return [begin, end) of a rank's share of `length` tokens or heads. Shares differ by at most
    one, and rank 0, which reports a step's reads, has no fewer than any other.
    """
    return -(-length * rank // count), -(-length * (rank + 1) // count)


@dataclass(frozen=True)
class RankRoute:
    counts: tuple[int, ...]
    ordered: Tensor | None
    """[N] position of each packed token among the tokens of rank 0, rank 1, …; None: keep the
    travelling order."""
    travelling: Tensor | None
    """[N] the inverse permutation."""


def _route(rows: Sequence[Sequence[int]], count: int, *, one_will_do: bool) -> RankRoute:
    """Return the route for rows of several sections, each shared by all ranks; `rows` are the
    lengths.
    """
    begins = [begin for begin, _ in spans([length for row in rows for length in row])]
    lengths = [length for row in rows for length in row]
    of_ranks = [
        np.concatenate([begin + np.arange(*share_of(length, rank, count))
                        for begin, length in zip(begins, lengths, strict=True)])
        for rank in range(count)
    ]  # fmt: skip
    counts = tuple(len(positions) for positions in of_ranks)
    if len(rows) == 1 and one_will_do:
        return RankRoute(counts, None, None)
    travelling = np.concatenate(of_ranks)
    return RankRoute(counts, torch.from_numpy(np.argsort(travelling)), torch.from_numpy(travelling))


@dataclass(frozen=True, slots=True)
class _HeadsOfRank:
    """Cuts cached keys and values to the heads of one rank."""

    heads: Span
    all_heads: int
    cis: Tensor
    """[n, head_dim / 2] of any tokens: gives head size, dtype and device."""

    def of(self, source: KvSource) -> KvSource:
        changes = tuple(
            [change._replace(parts=self._all_cut(change.parts)) for change in source.changes]
        )
        return replace(source, parts=self._all_cut(source.parts), changes=changes)

    def _all_cut(self, parts: tuple[Coded, ...]) -> tuple[Coded, ...]:
        return tuple(map(self._cut, parts))

    def _cut(self, coded: Coded) -> Coded:
        head_dim = 2 * self.cis.shape[1]
        if coded.channels < head_dim * self.all_heads:
            return coded  # it was loaded without the other heads (`Selection.of_heads`)
        try:
            head_columns = coded.columns(*self.heads, self.all_heads)
        except ValueError:  # the format cannot be cut there
            decoded = self.cis.real.new_empty(len(coded.data), coded.channels)
            coded.into(decoded)
            begin, end = self.heads
            head_columns = Coded("model", decoded[:, begin * head_dim : end * head_dim])
        # For the kernel that reads them, a token's values lie side by side.
        return head_columns.map(Tensor.contiguous) if self.cis.is_cuda else head_columns


@dataclass(frozen=True, slots=True)
class _FixedShare:
    whole: TokenCache
    heads: _HeadsOfRank

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def entry(self) -> object:
        return self.whole.entry

    def source(self, block: int, part: str = "kv") -> KvSource:
        return self.heads.of(self.whole.source(block, part))


@dataclass(frozen=True, slots=True)
class _CachedShare:
    """`CachedTokens` of which a rank computes a share of the tokens and reads its heads of all
    tokens.
    """

    whole: CachedTokens
    token_slice: slice
    heads: _HeadsOfRank

    def __len__(self) -> int:
        return len(self.cis)

    @property
    def cis(self) -> Tensor:
        return self.whole.cis[self.token_slice]

    def tokens(self) -> Tensor:
        return self.whole.tokens()[self.token_slice]

    @property
    def entry(self) -> object:
        return self.whole.entry

    def source(self, block: int, part: str = "kv") -> KvSource:
        """Return `kv` for all tokens and the rank's heads, `h` for the rank's tokens."""
        source = self.whole.source(block, part)
        if part == "kv":
            return self.heads.of(source)
        if source.ids is not None:
            return replace(source, ids=source.ids[self.token_slice])
        return KvSource(tuple([coded.map(lambda t: t[self.token_slice]) for coded in source.parts]))


class RankShare:
    """One rank's part of a batch; it lives as long as the batch.

    Raises:
        ValueError: there are more ranks than heads, or some row has to be computed by one rank.
    """

    def __init__(self, whole: Packed, exchange: Exchange, heads: int) -> None:
        count = exchange.count
        if count > heads:
            raise ValueError(f"{count} ranks cannot share {heads} heads: use {heads} at most")
        if whole.residuals:
            raise ValueError("rows with a ControlNet take their steps on one device")
        if whole.pictures is not None:
            raise ValueError("rows with an IP-Adapter take their steps on one device")
        if any(row.pads for row in whole.rows):
            raise ValueError("rows whose picture is padded take their steps on one device")
        self.whole, self.exchange, self._all_heads = whole, exchange, heads
        self.heads = [share_of(heads, rank, count) for rank in range(count)]
        self.packed = Packed([self._part(row, heads) for row in whole.rows])
        narrow = whole.layout.narrow
        text, image, cached = narrow.text, narrow.image, narrow.cached
        images = list(zip(image, strict=True))
        will_do = not whole.primes
        routes = {
            "rows": _route(list(zip(text, image, strict=True)), count, one_will_do=will_do),
            "wide rows": _route(
                list(zip(text, image, cached, strict=True)), count, one_will_do=will_do
            ),
            "rest": _route(list(zip(cached, strict=True)), count, one_will_do=True),
            "image": _route(images, count, one_will_do=False),
            "wide image": _route(list(zip(image, cached, strict=True)), count, one_will_do=False),
        }
        device = whole.tokens.device
        self.routes: dict[str, RankRoute] = moved(routes, device)
        positions = [
            begin + np.arange(*share_of(length, exchange.rank, count))
            for (begin, _), length in zip(spans(image), image, strict=True)
        ]
        self._positions: Tensor = moved((torch.from_numpy(np.concatenate(positions)),), device)[0]

    @cached_property
    def alone(self) -> RankShare:
        return RankShare(self.whole.alone, self.exchange, self._all_heads)

    def _part(self, row: RowInput, heads: int) -> RowInput:
        rank, count = self.exchange.rank, self.exchange.count

        def of_length(length: int) -> slice:
            return slice(*share_of(length, rank, count))

        texts, heads_of = len(row.text), _HeadsOfRank(self.heads[rank], heads, row.cis)
        tokens, text = of_length(len(row.tokens)), of_length(texts)
        cached = [
            _CachedShare(cached_tokens, of_length(len(cached_tokens)), heads_of)
            for cached_tokens in row.cached
        ]
        end = len(row.cached[-1] if row.cached else row.tokens)
        last_tokens = of_length(end)
        fixed = tuple([_FixedShare(fixed_tokens, heads_of) for fixed_tokens in row.fixed])
        cis = torch.cat((row.cis[text], row.cis[texts:][tokens]))
        return replace(
            row,
            tokens=row.tokens[tokens],
            text=row.text[text],
            cis=cis,
            cached=tuple(cached),
            fixed=fixed,
            context=max(0, last_tokens.stop - max(last_tokens.start, end - row.context)),
            still=0,  # the whole row's velocity is moved, not a share of it
        )

    def refresh(self) -> None:
        self.packed.tokens = self.whole.tokens.index_select(0, self._positions)

    def to_heads(self, tensors: Sequence[Tensor], route: RankRoute) -> Tensor:
        """Exchange tokens for heads, before attention: [N, sum of P, rank's heads, head_dim] of all
        tokens, in the order of their packing, from tensors [n, P, heads, head_dim] of the rank's.
        """
        local_heads, head_dim = self.heads[self.exchange.rank], tensors[0].shape[-1]
        planes = sum(tensor.shape[1] for tensor in tensors)
        parts = [
            torch.cat([tensor[:, :, begin:end] for tensor in tensors], dim=1)
            for begin, end in self.heads
        ]
        token_numel = planes * (local_heads[1] - local_heads[0]) * head_dim
        received = self.exchange.all_to_all(parts, [n * token_numel for n in route.counts])
        by_rank = received.view(
            sum(route.counts), planes, local_heads[1] - local_heads[0], head_dim
        )
        return by_rank if route.ordered is None else by_rank.index_select(0, route.ordered)

    def to_tokens(self, source: Tensor, route: RankRoute) -> Tensor:
        """Exchange heads for tokens, after attention: [n, width] from [N, rank's heads ·
        head_dim].
        """
        local_heads = self.heads[self.exchange.rank]
        head_dim = source.shape[1] // (local_heads[1] - local_heads[0])
        if route.travelling is not None:
            source = source.index_select(0, route.travelling)
        n = route.counts[self.exchange.rank]
        widths = [(end - begin) * head_dim for begin, end in self.heads]
        received = self.exchange.all_to_all(
            source.split(route.counts), [n * width for width in widths]
        )
        parts = received.split([n * width for width in widths])
        return torch.cat([x.view(n, w) for x, w in zip(parts, widths, strict=True)], dim=1)

    def gather(self, x: Tensor, route: RankRoute) -> Tensor:
        """Return [N, c] of all tokens, in the order of their packing, from each rank's [n, c]."""
        wide = x.shape[1]
        received = self.exchange.all_to_all(
            [x] * self.exchange.count, [n * wide for n in route.counts]
        ).view(-1, wide)
        return received if route.ordered is None else received.index_select(0, route.ordered)


def forward_shared(model: Transformer, share: RankShare, kinds: Sequence[str] = ()) -> Tensor:
    """Run `forward` on several ranks; each rank calls this.

    Returns:
        [N, out_channels] of all rows, the same bytes on each rank.
    """
    share.refresh()
    state = _SharedState(model, share, kinds)
    state.run(0, model.block_count)
    local_output = model.last(state.computed_image(), state.stream)
    return share.gather(local_output, share.routes["image"])


class _SharedState(State):
    def __init__(self, model: Transformer, share: RankShare, kinds: Sequence[str]) -> None:
        self.share, self._share_behind = share.alone if model.alone else share, share
        super().__init__(model, share.packed, kinds)

    def _join_text(self) -> None:
        self.share = self._share_behind
        super()._join_text()

    @property
    def _of_all(self) -> Packing:
        layout = self.share.whole.layout
        return layout.wide if self._widened else layout.narrow

    @property
    def _widened(self) -> bool:
        return self.cached and self.wide

    def attend(
        self,
        qk: Tensor,
        v: Tensor,
        packing: Packing,
        fill: FillCached | None,
        capture: CaptureKeys | None,
    ) -> Tensor:
        """Attend with the rank's heads; `packing` holds the rank's tokens."""
        route = self.share.routes["wide rows" if self._widened else "rows"]
        qkv = self.share.to_heads((qk, v[:, None]), route)
        attended = super().attend(qkv[:, :2], qkv[:, 2], self._of_all, fill, capture)
        return self.share.to_tokens(attended, route)

    def room_for(self) -> None:
        """Return None: keys also come from other ranks."""

    def cached_keys(self, index: int) -> tuple[Tensor, Tensor]:
        """Project the rank's tokens, all heads, then exchange as for the computed tokens."""
        k, v = super().cached_keys(index)
        kv = self.share.to_heads((k[:, None], v[:, None]), self.share.routes["rest"])
        return kv[:, 0], kv[:, 1]

    def capture(self, index: int) -> CaptureKeys:
        """Record hidden states of all tokens, and keys and values of the rank's heads, on each
        rank.
        """
        image = self.packing.image_of(self.image) if self.joined else self.image
        route = self.share.routes["wide image" if self._widened else "image"]
        image = self.share.gather(image, route)
        for capture, (begin, end) in self._captured(self._of_all.image_stream.spans):
            capture.hidden(index, image[begin:end])
        return self.keys_to_captures(index, self._of_all)

    def _captured(self, of: Sequence[Span]) -> Iterator[tuple[Capture, Span]]:
        for capture, span in zip(self.packed.captures, of, strict=True):
            if capture is not None:
                yield capture, span
