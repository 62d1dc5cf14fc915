"""Ways to keep and use entries, and the cost of each at 1024x1024: on FLUX.1-dev, or on FLUX.2
klein 4B where the model sees the source as reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from maskserve_benchmarks.published_models import FLUX_DEV, KLEIN_4B
from maskserve_common.config import Config
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.planning.entry_bytes import FORMATS, entry_bytes
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import ALL_STEPS, ModelSpec, anchor_stride

FLUX_STEPS = 28
FLUX_TEXT = 512
_INTERVALS = (2, 3, 4, 5, 8)
THIN_KEPT = 0.3
"""Approximate share of cached tokens that a thinned context keeps on FLUX's grid: a quarter of
them, and the tokens beside the mask."""


@dataclass(frozen=True)
class CacheChoice:
    """One way to store entries and to use them."""

    kind: str = "kv"
    """`kv` or `h`."""
    format: str = "int8"
    stride: int = 7
    ring: int = 0
    """Width in tokens of the computed ring around the mask."""
    dense_steps: int = 0
    """Number of first steps that compute every token."""
    step_interval: int = 1
    """Interval of the steps in which the model runs (`EditSettings.step_interval`)."""
    thin: int = 0
    """If above 0, attention reads only the tokens near the mask and every fourth of the others;
    each of those counts as `thin` tokens. 0: attention reads all tokens."""
    references_alone: bool = False
    """Whether the cached tokens are those of the reference alone, without those of the picture
    outside the mask."""
    references_computed: bool = False
    """Whether to also compute the reference's tokens under the mask."""

    @property
    def name(self) -> str:
        if self.dense:
            return "all_dense" if self.step_interval == 1 else f"dense-interval{self.step_interval}"
        stride = "one" if self.stride >= ALL_STEPS else f"stride{self.stride}"
        parts = [f"{self.kind}-{self.format}-{stride}-ring{self.ring}"]
        if self.dense_steps:
            parts.append(f"dense{self.dense_steps}")
        if self.thin:
            parts.append(f"thin{self.thin}")
        if self.references_alone:
            parts.append("references")
        if self.references_computed:
            parts.append("renewed")
        if self.step_interval > 1:
            parts.append(f"interval{self.step_interval}")
        return "-".join(parts)

    @property
    def dense(self) -> bool:
        """Return whether nothing is cached: all steps compute every token."""
        return self.dense_steps >= FLUX_STEPS

    @property
    def block_kind(self) -> str:
        """Return a plan's word for a block that reads such entries."""
        return "kv" if self.kind == "kv" else "project"

    def flux_bytes(self, steps: int, work: ModelWork | None = None) -> float:
        """Return the bytes of one template with the anchors of a schedule of `steps` steps.

        Args:
            steps: number of steps of the schedule that has the anchors.
            work: work of a published model at 1024x1024; None: FLUX.1-dev.
        """
        form, work = FORMATS["bfloat16" if self.format == "model" else self.format], work or flux()
        anchors = 0 if self.dense else math.ceil(steps / self.stride)
        token_share = THIN_KEPT if self.thin else 1.0
        if self.references_alone:
            token_share = work.context / work.tokens[0]
        return token_share * anchors * entry_bytes(work, self.kind, form)

    def flux_flops(
        self, mask_ratio: float = 0.11, predicted: float = 0.0, work: ModelWork | None = None
    ) -> float:
        """Return the counted FLOPs per step of an edit with a square mask.

        Args:
            mask_ratio: share of the tokens under the mask.
            predicted: share of the steps in which the model does not run.
            work: work of a published model at 1024x1024; None: FLUX.1-dev.
        """
        work = work or flux()
        grid = math.isqrt(work.tokens[0] - work.context)
        side = round(math.sqrt(mask_ratio) * grid)
        whole = RowTokens((float(work.tokens[0]),), FLUX_TEXT)
        active, read_work = float(min(grid, side + 2 * self.ring) ** 2), work
        if self.thin:  # attention reads fewer keys
            keys = active + THIN_KEPT * (work.tokens[0] - active)
            read_work = replace(work, tokens=(round(keys),))
        if self.references_alone:
            read_work = replace(work, tokens=(round(active) + work.context,))
        if self.references_computed:
            active *= 2
        share = min(1.0, self.dense_steps / FLUX_STEPS)
        mean = share * work.step_flops([whole], "dense")
        cached = RowTokens((active,), FLUX_TEXT)
        mean += (1 - share) * read_work.step_flops([cached], self.block_kind)
        return mean * (1 - predicted)


def flux() -> ModelWork:
    """Return the work of FLUX.1-dev at 1024x1024."""
    return flux_work(FLUX_DEV, 128, 128)


def published(spec: ModelSpec) -> ModelWork:
    """Return the work of the published model at 1024x1024 that corresponds to this model."""
    if not spec.semantics.context:
        return flux()
    return flux2.count(KLEIN_4B, StepPicture(128, 128, references=1))


def schedule(spec: ModelSpec, steps: int) -> int:
    """Return the number of steps of the schedule that has a template's anchors, for edits of
    `steps` steps. A distilled model takes its anchors from its own few steps.
    """
    few_steps = spec.semantics.reference and spec.stride == 1
    return spec.defaults.num_inference_steps if few_steps else steps


def default(spec: ModelSpec, steps: int) -> CacheChoice:
    """Return the choice of `[cache]` and `[model] mask_ring`, with as many anchors as 28 steps
    would have.
    """
    config = Config()
    cache, stride = config.cache, anchor_stride(config.cache.stride, spec)
    stride = of_schedule(stride, steps) if schedule(spec, steps) == steps else stride
    return CacheChoice(cache.entry_kind, cache.entry_format, stride, config.model.mask_ring)


def of_schedule(stride: int, steps: int) -> int:
    """Return the stride that gives `steps` steps as many anchors as `stride` gives 28."""
    return stride if stride >= FLUX_STEPS else max(1, round(stride * steps / FLUX_STEPS))


def default_choices(chosen: CacheChoice, spec: ModelSpec, steps: int) -> list[CacheChoice]:
    """Return the default, and the few alternatives that are compared on all classes."""
    denser = replace(chosen, dense_steps=1)
    if spec.semantics.masked_picture:
        return [chosen, denser, replace(chosen, stride=-(-steps // 2)), CacheChoice()]
    if spec.semantics.context:
        anchors = [replace(chosen, stride=stride) for stride in (chosen.stride, 2, ALL_STEPS)]
        choices = [
            way
            for anchor_choice in anchors
            for way in (
                anchor_choice,
                replace(anchor_choice, references_alone=True),
                replace(anchor_choice, dense_steps=1),
            )
        ]
        choices += [replace(anchors[-1], dense_steps=2), replace(chosen, ring=2)]
        choices += [
            replace(anchor_choice, references_computed=True)
            for anchor_choice in (anchors[0], anchors[-1])
        ]
        choices += [replace(chosen, format=form) for form in ("int8", "model")]
        return list(dict.fromkeys(choices))
    choices = [
        chosen,
        replace(chosen, ring=2),
        replace(chosen, stride=of_schedule(4, steps)),
        replace(chosen, stride=of_schedule(7, steps)),
        denser,
        replace(denser, stride=of_schedule(7, steps)),
        replace(denser, ring=2),
        *(replace(chosen, dense_steps=dense) for dense in (2, 4, 8)),
    ]
    return list(dict.fromkeys(choices))


def frontier(chosen: CacheChoice, steps: int) -> list[CacheChoice]:
    """Return the default and its alternatives, for edits of `steps` steps."""
    choices = [chosen]
    for ring in (0, 1, 2):
        choices += [
            CacheChoice(kind, form, of_schedule(stride, steps), ring)
            for kind, form, stride in (
                ("kv", "int8", 7),
                ("kv", "int4", 7),
                ("kv", "int4", 14),
                ("kv", "int4", ALL_STEPS),
                ("h", "int4", ALL_STEPS),
            )
        ]
    choices.append(CacheChoice("kv", "model", 1, 1))
    choices += [replace(chosen, dense_steps=dense) for dense in (1, 2)]
    two_anchors = replace(chosen, stride=of_schedule(14, steps))
    choices += [replace(way, thin=weight) for way in (chosen, two_anchors) for weight in (1, 4)]
    choices.append(replace(two_anchors, step_interval=2))
    # Choices that an elastic edit could step down to.
    choices += [
        replace(chosen, ring=ring, thin=thin, step_interval=interval)
        for ring, thin in ((0, 0), (1, 0), (2, 0), (3, 0), (1, 4))
        for interval in _INTERVALS
    ]
    dense_choice = replace(chosen, dense_steps=FLUX_STEPS)
    choices += [replace(dense_choice, step_interval=interval) for interval in _INTERVALS]
    return list(dict.fromkeys(choices))
