"""The model's inputs in a row's next step: the tokens that each pass computes, and the caches from
which it reads the others; the same for a lookahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskserve_engine.batch.packing import CachedTokens, RowInput
from maskserve_engine.batch.step_cache import RefreshedTokens, StepCache
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.mmdit.preparation import model_inputs
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow, PromptPass, Row
from maskserve_engine.families.mmdit.spans import ComputedSpans, TokenSpan
from maskserve_engine.layers.scatter_kv import KvSource


def pass_inputs(row: Row) -> list[RowInput]:
    """Return the inputs of a row's next step, one for each pass."""
    if isinstance(row, FlowPrimingRow):
        return [row.model_input()]
    computed = row.computes
    inputs = [_input(row, prompt, row.step, computed) for prompt in row.passes]
    if not row.fills_step_cache:
        return inputs
    passes = zip(row.passes, inputs, strict=True)
    return [_captured(row, prompt, row_input, row.step) for prompt, row_input in passes]


def lookahead_inputs(row: Row) -> list[RowInput]:
    """Return the inputs of the lookahead's passes; empty if the next step has no lookahead."""
    step = None if isinstance(row, FlowPrimingRow) else row.lookahead_step
    if isinstance(row, FlowPrimingRow) or step is None:
        return []
    computed = ComputedSpans(unmasked=row.image.refreshes)
    inputs = [
        _captured(row, prompt, _input(row, prompt, step, computed), step) for prompt in row.passes
    ]
    if row.residuals is None:
        return inputs
    residuals = row.residuals.for_lookahead
    return [replace(row_input, residuals=residuals) for row_input in inputs]


def all_tokens(row: FlowRow, lookahead: int | None = None) -> RowInput:
    """Return the input of all tokens, the masked ones first: at the next step, or as predicted for
    the later step `lookahead`.
    """
    step = row.step if lookahead is None else lookahead
    return _input(row, replace(row.prompt, words=None), step, ComputedSpans())


def _input(row: FlowRow, prompt: PromptPass, step: int, computed: ComputedSpans) -> RowInput:
    """Return the input of one pass: masked tokens, and at their end the computed spans."""
    masked, unmasked, spans = row.image.masked, row.image.unmasked, row.image.spans(computed)
    sigma, change = row.schedule.sigmas[step], row.change_to(step)
    # Entries have the keys and values of these first text tokens, and hide the context.
    words = 0 if unmasked is None or computed.unmasked else unmasked.words
    context = masked.context if unmasked is None else unmasked.latents.context
    text, text_cis = prompt.text[words:], prompt.cis[words:]
    latents = masked.latents if step == row.step else row.moved_to(step)
    tokens = [
        model_inputs(latents, masked.condition, masked.context),
        *[span.latents.at(sigma, change) for span in spans],
    ]
    cis = [masked.cis, *[span.cis[: len(span)] for span in spans]]
    contexts = (masked.context, *[span.latents.context for span in spans])
    fixed = () if row.references is None else row.references.whole
    return RowInput(
        tokens[0] if len(tokens) == 1 else torch.cat(tokens),
        text if computed.text else text[:0],
        prompt.pooled,
        prompt.guidance,
        torch.cat((text_cis, *cis) if computed.text else cis),
        cached=_cached(row, prompt.cache, text_cis, step, computed),
        residuals=row.residuals,
        context=0 if context is None or words else len(context),
        still=sum(len(tokens) for tokens in contexts if tokens is not None),
        timeless=prompt.timeless,
        fixed=fixed if prompt.words is None else (*fixed, prompt.words),
        back=None if prompt.words is None else prompt.words.back,
        pads=prompt.pads,
        picture=prompt.picture,
    )


def _cached(
    row: FlowRow, cache: StepCache | None, text_cis: Tensor, step: int, computed: ComputedSpans
) -> tuple[CachedTokens, ...]:
    """Return the tokens of one pass that are not computed, by the cache that has them."""
    ring, unmasked = row.image.ring, row.image.unmasked
    if unmasked is None or computed.unmasked:
        return ()
    cached: list[CachedTokens] = []
    if not computed.ring:
        assert cache is not None, "without a step cache the ring is computed"
        cis = [] if computed.text else [text_cis]
        cis += [] if ring is None else [ring.cis]
        cis += [unmasked.cis] if unmasked.refreshes else []
        cached.append(RefreshedTokens(cache, row.walk_sigma, torch.cat(cis)))
    if not unmasked.refreshes:
        lifts = cache is not None and cache.plan.corrects_residuals
        at = None if step == row.step else step
        cached.append(EntryTokens(row, unmasked, cache if lifts else None, at))
    return tuple(cached)


def _captured(row: FlowRow, prompt: PromptPass, row_input: RowInput, step: int) -> RowInput:
    """Let the pass's step cache capture the pass `row_input` at `step`."""
    cache = prompt.cache
    assert cache is not None, "both passes fill a step cache"
    sigma, ahead, masked = row.schedule.walk[step].sigma, step != row.step, len(row.image.masked)
    if row.image.refreshes:
        cache.anchor(row.step, sigma, masked, len(row_input.tokens), reads=ahead)
    else:
        end = masked + row.image.ring_tokens
        cached_count = len(row_input.tokens) - end if row.entry is None else 0
        text, ring = len(row_input.text), slice(masked, end)
        cache.begin_with_template(row.step, text, ring, cached_count, sigma, reads=ahead)
    return replace(row_input, capture=cache)


@dataclass(frozen=True, slots=True)
class EntryTokens:
    """`packing.CachedTokens` that a row reads from its template, at the row's present step."""

    row: FlowRow
    span: TokenSpan
    step_cache: StepCache | None = None
    """Step cache of the pass, if it adds a residual correction to the entries."""
    lookahead: int | None = None
    """Refresh step of a lookahead pass; None: the pass belongs to the row's next step."""

    def __len__(self) -> int:
        return len(self.span.cis)

    @property
    def cis(self) -> Tensor:
        return self.span.cis

    def tokens(self) -> Tensor:
        assert not self.span.words, "of text tokens there are keys and values alone"
        assert self.lookahead is None, "a lookahead pass reads only keys and values"
        return self.span.latents.at(self.row.sigma)

    def source(self, block: int, part: str = "kv") -> KvSource:
        entry = self.row.entry
        assert isinstance(entry, Handle), "packed for a step that reads no entry"
        kv_source = KvSource(*entry.wait_whole(block, part))
        if self.step_cache is None or part != "kv":
            return kv_source
        return self.step_cache.correction.added_to(block, kv_source, self._sigma)

    @property
    def entry(self) -> object:
        """A different object at each step if entries get a residual correction."""
        is_corrected = self.step_cache is not None and len(self.step_cache.correction) > 0
        return self._sigma if is_corrected else self.row.entry

    @property
    def _sigma(self) -> float:
        row = self.row
        return row.schedule.walk[row.step if self.lookahead is None else self.lookahead].sigma
