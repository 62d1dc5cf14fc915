"""Spans of a row's tokens: what its steps compute, and what they read in place of computing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.packing import TokenCache
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.mmdit.preparation import (
    FlowBlend,
    FlowStart,
    FlowTemplate,
    model_inputs,
    unpack_latents,
)
from maskserve_engine.layers.scatter_kv import KvSource


@dataclass(slots=True)
class MaskedTokens:
    """The image tokens that each step of a row computes; in a dense row all of them."""

    ids: Tensor | None
    """[n]; None: all tokens, in order."""
    cis: Tensor
    """[n, head_dim / 2] rotary factors; in a dense row with those of the context."""
    latents: Tensor
    """[n, 4C]; once packed, a view of the batch."""
    condition: Tensor | None
    """[n, extra channels]"""
    blend: FlowBlend | None
    context: Tensor | None = None
    """[R, 4C] reference pictures of a dense row."""

    def __len__(self) -> int:
        return len(self.latents)


@dataclass(slots=True)
class TokenSpan:
    """Image tokens that only some steps of a row compute. The other steps read their keys and
    values: from the template's entries, or from the step cache.
    """

    ids: Tensor
    """[m + R + words]: image, context, then text tokens that entries have."""
    cis: Tensor
    """[m + R + words, head_dim / 2] rotary factors."""
    latents: FlowTemplate | ExtrapolatedLatents
    """Latents of the m + R tokens, for steps that compute them and for the result."""
    selection: Selection | None = None
    """The same ids, for loading entries."""
    words: int = 0
    """Number of text tokens that entries have. They come first in the row's text, and steps that
    read entries leave them out."""

    def __len__(self) -> int:
        """Return the number of tokens that a step can compute."""
        return len(self.ids) - self.words

    @property
    def refreshes(self) -> bool:
        """Whether refresh steps fill the row's step cache with the span; otherwise a template has
        it.
        """
        return isinstance(self.latents, ExtrapolatedLatents)


@dataclass(slots=True)
class ImageSpans:
    """The image tokens of a row, by the steps that compute them."""

    grid: tuple[int, int]
    masked: MaskedTokens
    ring: TokenSpan | None = None
    """The ring round the mask of a row with a template. Steps that leave the text out read text and
    ring from the step cache. None: all steps compute the ring, or the row reads no template."""
    unmasked: TokenSpan | None = None
    """Cached tokens; None: the row is dense."""

    @property
    def refreshes(self) -> bool:
        """Whether the row has refresh steps and reads no template."""
        return self.unmasked is not None and self.unmasked.refreshes

    @property
    def ring_tokens(self) -> int:
        return 0 if self.ring is None else len(self.ring)

    @property
    def left_out(self) -> ExtrapolatedLatents | None:
        """Tokens that only some steps compute and whose latents the row keeps."""
        span = self.unmasked if self.ring is None else self.ring
        latents = None if span is None else span.latents
        return latents if isinstance(latents, ExtrapolatedLatents) else None

    def count(self, computed: ComputedSpans) -> int:
        """Return the number of tokens that a step computes."""
        count, unmasked = len(self.masked) + computed.ring * self.ring_tokens, self.unmasked
        return count if unmasked is None else count + computed.unmasked * len(unmasked)

    def spans(self, computed: ComputedSpans) -> list[TokenSpan]:
        """Return the spans that a step computes behind the masked tokens, in order."""
        pairs = (self.ring, computed.ring), (self.unmasked, computed.unmasked)
        return [span for span, is_computed in pairs if span is not None and is_computed]

    def narrowed(self, region: Tensor) -> ImageSpans:
        """Return the spans of an edit without a mask whose next steps compute these tokens [n], and
        refresh steps all others.
        """
        masked, unmasked = self.masked, self.unmasked
        latents, cis, context = masked.latents, masked.cis, masked.context
        if unmasked is not None:
            assert isinstance(unmasked.latents, ExtrapolatedLatents)
            latents = self._in_order(latents, unmasked.latents.latents_now)
            cis, context = self._in_order(cis, unmasked.cis), unmasked.latents.context
        assert context is not None, "the source is the first reference"
        is_outside = torch.ones(len(cis), dtype=torch.bool, device=cis.device)
        is_outside[region] = False
        ids = is_outside.nonzero()[:, 0]
        outside = ids[: len(latents) - len(region)]
        span = ExtrapolatedLatents(
            latents[outside], None, None, context[outside], context, predicted=len(outside)
        )
        inside = MaskedTokens(region, cis[region], latents[region], None, None)
        return replace(self, masked=inside, unmasked=TokenSpan(ids, cis[ids], span))

    def change(self, computed: Tensor, sigma: Tensor) -> Tensor:
        """Return [N] changes from the source to the predicted clean picture, of an edit without a
        mask: root mean squares over each token's channels.

        Args:
            computed: [n, 4C] predicted clean latents of the masked tokens.
            sigma: sigma of the next step.
        """
        unmasked, context = self.unmasked, self.masked.context
        if unmasked is not None:
            assert isinstance(unmasked.latents, ExtrapolatedLatents)
            computed = self._in_order(computed, unmasked.latents.clean_estimate(sigma))
            context = unmasked.latents.context
        assert context is not None, "the source is the first reference"
        return (computed - context[: len(computed)]).square().mean(dim=1).sqrt()

    def _in_order(self, masked: Tensor, unmasked: Tensor) -> Tensor:
        """Return rows of masked and unmasked tokens in the order of the picture and its context."""
        assert self.unmasked is not None
        assert self.masked.ids is not None
        whole = masked.new_empty(len(masked) + len(unmasked), *masked.shape[1:])
        whole[self.masked.ids], whole[self.unmasked.ids[: len(unmasked)]] = masked, unmasked
        return whole

    def whole(self, computed: Tensor, *, ended: bool) -> HostCopy:
        """Return [C, h, w] latents of the picture: the masked tokens' are `computed`, [n, 4C]; the
        others' those of the edit's result if it has `ended`, else the source's.
        """
        tokens, ids = computed, self.masked.ids
        if ids is not None:
            tokens = computed.new_empty(self.grid[0] * self.grid[1], computed.shape[1])
            tokens[ids] = computed
        for span in (self.unmasked, self.ring):
            if span is not None:
                latents = span.latents.result if ended else span.latents.clean
                tokens[span.ids[: len(latents)]] = latents.to(computed.dtype)
        return HostCopy(unpack_latents(tokens, self.grid).float())


class ComputedSpans(NamedTuple):
    """The tokens that a step computes beside the masked ones. It reads the others."""

    text: bool = True
    ring: bool = True
    unmasked: bool = True


@dataclass(slots=True)
class ExtrapolatedLatents:
    """The cached tokens of a row with refresh steps. Between refresh steps they move by the
    extrapolated velocity; if the pipeline blends, they are the noised source.
    """

    latents: Tensor
    """[m, 4C] latents after the last refresh step; before the first one the initial latents."""
    condition: Tensor | None
    """[m, extra channels]"""
    blend: FlowBlend | None
    clean: Tensor
    """[m, 4C] latents of the source."""
    context: Tensor | None = None
    """[R, 4C] context tokens: reference pictures, if the model takes any."""
    predicted: int = 0
    """Number of first tokens whose result is the row's prediction: those of the ring, or all if
    there is no mask. Others keep the source."""
    velocity: tuple[Tensor, ...] = ()
    """[m, 4C] velocity at the last refresh step, and at the one before."""
    times: tuple[float, float] = (0.0, 0.0)
    """Change of sigma that each velocity has been applied for since then."""

    @classmethod
    def begin(
        cls, start: FlowStart, clean: Tensor, context: Tensor | None = None, *, predicted: int = 0
    ) -> ExtrapolatedLatents:
        """Return the tokens of a row before its first step."""
        return cls(start.latents, start.condition, start.blend, clean, context, predicted)

    @property
    def result(self) -> Tensor:
        """[m, 4C] latents in the edit's result: the source, except for the `predicted` tokens."""
        if not self.predicted:
            return self.clean
        around = self.latents_now if self.blend is None else self.blend.clean
        return torch.cat((around[: self.predicted], self.clean[self.predicted :]))

    def clean_estimate(self, sigma: Tensor) -> Tensor:
        """Return [m, 4C] float32 latents towards which the tokens move, by the velocity of the last
        refresh step; `sigma` is the present one.
        """
        return self.latents_now.float() - sigma * self.velocity[0].float()

    def at(self, sigma: Tensor, change: float = 0.0) -> Tensor:
        """Return [m + R, in_channels] model inputs at `sigma`, which is `change` away from the
        present sigma.
        """
        if self.blend is not None:
            latents = self.blend.source(sigma)
        else:
            latents = self.latents_now + change * self.velocity[0] if change else self.latents_now
        return model_inputs(latents, self.condition, self.context)

    @property
    def latents_now(self) -> Tensor:
        """[m, 4C] extrapolated latents, if the pipeline does not blend."""
        latents = self.latents
        for velocity, times in zip(self.velocity, self.times, strict=False):
            latents = latents + times * velocity
        return latents

    def restarted(self, latents: Tensor) -> ExtrapolatedLatents:
        """Return the same tokens with latents [m, 4C], before any refresh step."""
        return replace(self, latents=latents, velocity=(), times=(0.0, 0.0))

    def record_refresh(self, move: Tensor, change: float) -> None:
        """Record the velocity of a refresh step, from the `move` of the latents."""
        if self.blend is None:
            self.velocity, self.times = (move / change, *self.velocity[:1]), (0.0, 0.0)

    def record_lookahead(self, velocity: Tensor) -> None:
        """Record the [m, 4C] velocity of a refresh step computed ahead, and keep the present
        latents.
        """
        if self.blend is None:
            self.latents, self.times = self.latents_now, (0.0, 0.0)
            self.velocity = (velocity, *self.velocity[:1])

    def move(self, change: float, weight: float) -> None:
        """Move the tokens by the sigma `change` of a step between refresh steps."""
        last, previous = self.times
        self.times = (last + change * (1.0 + weight), previous - change * weight)


@dataclass(slots=True, weakref_slot=True)
class SharedEntry:
    """Keys and values of references that rows of the same pictures share."""

    entry: AnchorEntry | None = None
    """None until a row has computed them."""


@dataclass(slots=True)
class References:
    """Reference pictures that do not depend on the row (`RowInput.fixed`)."""

    tokens: Tensor
    """[R, 4C] tokens of the pictures."""
    cis: Tensor
    entry: AnchorEntry | Handle | None = None
    """Keys and values, computed by the row or read from the template; None until then."""
    computed: bool = False
    """Whether the row's last step computed these keys and values, or those of `before`."""
    before: FixedWords | None = None
    """Prompt tokens before the references, which they attend to."""
    earlier: References | None = None
    """References before these prompt tokens, which they attend to."""
    shared: SharedEntry | None = None
    """Where rows of the same pictures find the keys and values; None: they are the row's own."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sees(self) -> tuple[TokenCache, ...]:
        """The tokens before it, in order."""
        visible = () if self.earlier is None else self.earlier.whole
        return visible if self.before is None else (*visible, self.before)

    @property
    def whole(self) -> tuple[TokenCache, ...]:
        """The tokens before it, and its own."""
        return (*self.sees, self)

    @property
    def all(self) -> tuple[References, ...]:
        """The earlier ones, and these."""
        return (self,) if self.earlier is None else (*self.earlier.all, self)

    def next_missing(self) -> References | None:
        """Take keys and values that another row has computed, and return the first of all
        references that still has none.
        """
        for references in self.all:
            if references.entry is None and references.shared is not None:
                references.entry = references.shared.entry
            if references.entry is None:
                return references
        return None

    def record(self, entry: AnchorEntry) -> None:
        """Keep keys and values that the row has computed."""
        self.entry = entry
        if self.shared is not None:
            self.shared.entry = entry

    def reset(self) -> None:
        """Forget computed keys and values: with adapters of the row they are its own."""
        if not isinstance(self.entry, Handle):
            self.entry, self.shared = None, None

    def source(self, block: int, part: str = "kv") -> KvSource:
        if isinstance(self.entry, AnchorEntry):
            return KvSource(self.entry.blocks[block].part(part))
        assert self.entry is not None, "packed before they were made"
        return KvSource(*self.entry.wait_whole(block, part))


@dataclass(slots=True)
class FixedWords:
    """Prompt tokens that depend only on the tokens before them, not on the row
    (`RowInput.fixed`).
    """

    embeds: Tensor
    """[T, in] states of the prompt."""
    cis: Tensor
    pictures: tuple[TokenCache, ...] = ()
    back: Tensor | None = None
    """`RowInput.back` of the tokens that attend to the prompt."""
    entry: AnchorEntry | None = None
    """Keys and values; None until they are computed."""

    def __len__(self) -> int:
        return len(self.embeds)

    def source(self, block: int, part: str = "kv") -> KvSource:
        assert self.entry is not None, "packed before they were made"
        return KvSource(self.entry.blocks[block].part(part))
