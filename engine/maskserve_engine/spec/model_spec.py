"""The model spec: sizes, capabilities and defaults of a served model, for any family.

Preprocess, the router and the planner need these, not weights. Each family's module reads them from
a model folder's JSON; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.reuse_levels import (
    EXPECTED_STRIDE,
    RefreshStrides,
    refresh_count,
)
from maskserve_common.contracts.semantics import NO_DENSE_STEPS, DenseSteps, Semantics
from maskserve_common.imaging.whole import SizeRule
from maskserve_engine.planning.refresh_steps import REFRESH_RULE, RefreshRule, count_with_controls
from maskserve_engine.planning.regions import RegionRule
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.latents import LatentSpace, latent_space


def dense_steps(configured: int, needed: DenseSteps) -> DenseSteps:
    return needed if configured < 0 else DenseSteps(configured)


Guidance = Literal["embedded", "cfg", "none"]
"""`embedded`: an input of the model; `cfg`: classifier-free, each step above 1 runs the model a
second time with the negative prompt; `none`: the model has no guidance.
"""

INPAINT_ONLY: frozenset[EditKind] = frozenset({"inpaint"})
SOURCE_KINDS: frozenset[EditKind] = frozenset({"inpaint", "edit"})
ALL_KINDS: frozenset[EditKind] = frozenset({"inpaint", "edit", "generate"})

ALL_STEPS = 1000
"""A stride that is longer than any schedule."""
_NOISY_STEPS = 16
"""Least steps of an edit whose errors place its refresh steps, where the picture round the mask is
as noisy as the rest (docs/adr/0090)."""
_FIDELITY = 40.0
"""dB that first edits promise where places are neither known nor configured (docs/adr/0090)."""


@dataclass(frozen=True, slots=True)
class EditDefaults:
    """Settings of an edit where neither it nor the worker's configuration sets them."""

    num_inference_steps: int
    guidance_scale: float
    """0 where the model has none."""


@dataclass(frozen=True, slots=True)
class ControlNetSpec:
    """ControlNets that fit a family's models."""

    net: str
    """Their class in diffusers."""
    latents: bool
    """Whether they take the VAE's latents of a control picture; otherwise its pixels."""
    equal: tuple[str, ...]
    """Keys of config.json that must have the same values as the model's own, unless they are null:
    the net lacks the input of which the key is a size."""
    without: tuple[str, ...] = ()
    """Keys of config.json that must be absent, null or 0: nets with further inputs."""
    mask: str = ""
    """Key of config.json that counts a token's numbers of a mask, in nets that fill one: they see
    the control picture black there (`fills`). Empty: no such net is taken."""
    patched: bool = True
    """Whether `in_channels` of config.json counts a patch of latents, otherwise one latent."""
    guided: bool = False
    """Whether nets also run with the negative prompt; otherwise its pass adds what they make of the
    prompt."""
    stride: float = REFRESH_RULE.stride
    """Share of an edit's steps between two refresh steps beside a template, unless `[cache]
    own_anchors` sets another.
    """

    def fills(self, config: Mapping[str, Any]) -> bool:
        """Return whether a net of this config.json fills a mask."""
        return bool(self.mask and config.get(self.mask))


IpLayout = Literal["h94", "xlabs"]
"""Publisher whose names and forms a file of an IP-Adapter has (`ip_adapters.LAYOUTS`)."""


@dataclass(frozen=True, slots=True)
class IpAdapterSpec:
    """IP-Adapters that fit a family's models."""

    layout: IpLayout
    text: int
    """Width of the prompt's tokens, and so of the picture's."""
    layers: tuple[tuple[int, int], ...]
    """Number in a file and width of each attention that reads the picture, in the order they
    run."""

    @property
    def widths(self) -> list[int]:
        return [width for _, width in self.layers]

    @property
    def numbers(self) -> int:
        """How many numbers the weights of these layers of a file have."""
        return 2 * sum(self.widths) * self.text


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """How edits of a family refresh (docs/decisions/refresh-steps.md)."""

    stride: float | None = None
    """Share of an edit's steps between two refresh steps, unless `[cache] own_anchors` sets one; 0:
    edits have none unless it does. None: the family has no refresh steps.
    """
    by_error: bool = False
    """Whether first edits place them by their errors, though `stride` is known: errors keep more of
    edits unlike those that it was fitted to."""
    growth: float = 1.0
    """Ratio of the distance between two refresh steps to that of the two before
    (`refresh_steps`).
    """
    leaves_text: bool = True
    """Whether steps between refresh steps may leave the text out, as `[cache] own_text` sets it."""
    ring: int | None = None
    """Least width of the ring, in tokens, that steps without the text also leave out; None: rows
    compute their edit's ring at every step. Beside a template it is computed with the text.
    """
    evenly_over: float = 1.5
    """Power of sigma over which refresh steps are evenly spaced (`refresh_steps`) and, with
    lookahead, interpolated.
    """
    second_order: bool = False
    """Whether extrapolation is of second order, through three refresh steps (`RefreshSchedule`)."""
    over_template: bool = False
    """Whether an edit that may have refresh steps reads no template, since its step cache keeps
    more of it (docs/decisions/refresh-steps.md).
    """


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and capabilities of one served model."""

    family: str
    """Key of the engine's adapter registry."""
    semantics: Semantics
    """Use of source and mask by the model."""
    latents: LatentSpace
    """Latent space of the VAE."""
    patch: int
    """Latents per token, along one side."""
    native_resolution: int
    """Side of the square whose area bounds the model's input, in pixels."""
    size_multiple: int
    """Sides of the model's input are multiples of it, in pixels."""
    guidance: Guidance
    """Meaning of `guidance_scale`."""
    defaults: EditDefaults
    """Defaults of the pipeline whose semantics are served."""
    stride: int
    """Steps of the priming schedule that may share an anchor (docs/decisions/templates.md)."""
    true_cfg: bool
    """Whether `true_cfg_scale` is served: a second pass, beside embedded guidance."""
    denoiser: dict[str, Any]
    """The transformer's or UNet's config.json, for FLOP counting."""
    control: ControlNetSpec | None
    """ControlNets that fit the model; None: it takes none."""
    ip_adapters: IpAdapterSpec | None = None
    """IP-Adapters that fit the model; None: it takes none."""
    edit_kinds: frozenset[EditKind] = INPAINT_ONLY
    """Kinds of edits that pipelines of the model's family make with its weights."""
    refresh: RefreshSpec = RefreshSpec()
    """Refresh steps of the family's edits."""
    region: RegionRule | None = None
    """How edits without a mask find the region that they change; None: they compute all tokens."""
    corrects_residuals: bool = False
    """Whether the residual correction found by a cached edit's dense first step is added to the
    entries that its other steps read.
    """
    negative_prompts: bool = True
    """Whether an edit may have a negative prompt; otherwise the negative prompt is empty."""
    guides_above: float = 1.0
    """Where guidance is classifier-free, the `guidance_scale` above which a step has two passes."""
    padded_to: int = 0
    """Multiple to which the model pads pictures and prompts (1: no padding), if the positions of a
    picture's tokens do not depend on the prompt's length. 0: positions, and so entries, depend on
    it, or all prompts are equally long."""
    caches: bool = True
    """Whether entries hold all that blocks read of other tokens; otherwise edits compute all
    tokens, and caching must be off.
    """
    edit_size: SizeRule = "bounded"
    """How the pipeline of its edits without a mask chooses their size."""
    most_pictures: int = 1
    """Most pictures in IMAGE: the source, and references beside it."""
    reference_size: SizeRule = "cut"
    """How the pipeline chooses the size of each of several pictures."""
    mask_latents: int = 1
    """Latents along a side for which its pipeline samples the mask once, where it blends."""
    predicts_steps: bool = True
    """Whether `step_interval` is served."""
    elastic: bool = False
    """Whether `reuse: elastic` is served: reuse levels were measured."""
    dense_sides: bool = False
    """Whether an edit that computes a whole side of the picture computes all of it
    (docs/decisions/masks.md), since caching it would cost too much quality.
    """
    dense_steps: DenseSteps = NO_DENSE_STEPS
    """First steps of cached edits that compute all tokens (docs/decisions/templates.md)."""
    keeps_placed: bool = False
    """Whether a batch keeps keys and values placed from step to step (`[cache] placed_bytes`)."""
    strength_rounds_up: bool = True
    """Whether the part of a step that `strength` leaves is run, as in the pipeline."""
    zeros_for_empty_prompt: bool = False
    """Whether an empty negative prompt is zeros instead of its encoding (SDXL)."""
    tokenizer_length: int | None = None
    """Tokens that a prompt always has, where the tokenizer says so (UNets: 77)."""
    text_besides: int = 0
    """Tokens of every prompt beside those that the configuration limits."""
    t5: bool = False
    """Whether a T5 is among its text encoders, by far the largest (`[model] t5_weights`)."""
    recorded_text: str = ""
    """Folder of the text encoder whose calls are CUDA graphs; empty: there is none."""
    text_layers: int = 0
    """Layers of this text encoder whose states it keeps, of a decoder; 0: it is a T5."""
    template_tokens: int = 0
    """Tokens that its prompts, of any length, have beside those that the configuration limits; 0:
    all have one length."""
    encoder_picture: EncoderPicture | None = None
    """Part of the source that its text encoder sees, if any; each prompt is then
    about a picture.
    """
    least_steps: int = 1
    """Least number of steps: at one step the sampler's stretch to `shift_terminal`
    divides 0 by 0.
    """
    sigmas: tuple[float, ...] = ()
    """Schedule of a distilled model before its sampler shifts it: its edits have as many steps.
    Empty: edits choose their number of steps.
    """

    def references(self, kind: EditKind) -> int:
        """Return the number of reference pictures that the model sees in an edit of this kind."""
        return int(self.semantics.reference and kind != "generate")

    @property
    def primed_by_prompt(self) -> bool:
        """Whether entries serve only the prompt that they were made with. References that see the
        prompt follow it: with entries made from an empty prompt, edits keep 11 dB (docs/adr/0048).
        """
        return self.semantics.context

    def text_tokens(self, configured: int) -> int:
        """Return the text tokens of a prompt, given `[model] max_sequence_length`."""
        return (self.tokenizer_length or configured) + self.text_besides

    def encoder_picture_tokens(self, height: int, width: int) -> int:
        """Return the number of first prompt tokens that come from the source, equal for all
        prompts, by the size of its latents.
        """
        if self.encoder_picture is None:
            return 0
        return self.encoder_picture.tokens(
            height * self.vae_scale_factor, width * self.vae_scale_factor
        )

    def key_text(self, words: int, tokens: int) -> int:
        """Return the number of prompt tokens that the entries of a picture with `tokens` tokens
        depend on: 0 where padding keeps entries independent of the prompt's length.
        """
        if not self.padded_to:
            return words
        return 0 if tokens % self.padded_to == 0 else words + -words % self.padded_to

    def guidance_default(self, configured: float) -> float:
        """Return the scale of an edit that names none, given `[model] guidance_scale`."""
        return configured or self.defaults.guidance_scale

    def steps_default(self, configured: int) -> int:
        """Return the steps of an edit that names none, given `[model] num_inference_steps`."""
        return configured or self.defaults.num_inference_steps

    @property
    def measured_levels(self) -> str:
        """Name of the semantics whose reuse levels edits may have; empty: they have none."""
        return self.semantics.name if self.elastic else ""

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent, along one side."""
        return self.latents.pixels

    @property
    def latent_channels(self) -> int:
        return self.latents.channels

    @property
    def two_passes(self) -> bool:
        """Whether an edit may run the model twice a step, with a negative prompt."""
        return self.guidance == "cfg" or self.true_cfg

    @property
    def token_pixels(self) -> int:
        """Pixels per token along one side, at the finest level."""
        return self.vae_scale_factor * self.patch

    @property
    def micro_conditioning(self) -> bool:
        """Whether the model takes sizes and a pooled prompt beside the prompt (SDXL)."""
        return self.denoiser.get("addition_embed_type") == "text_time"


def one_scale(folder: Path) -> LatentSpace:
    """Return the latent space of a folder whose pipeline has one scale for all channels.

    Raises:
        ConfigError: its VAE has a mean and deviation of each channel. Diffusers' inpaint pipelines
            apply these when they decode but not when they encode.
    """
    space = latent_space(read_json(folder / "vae" / "config.json"))
    if not space.one_scale:
        raise ConfigError(f"[model] path: {folder}/vae: latents_mean and latents_std: not served")
    return space


def check_served(*requirements: tuple[str, Any, Any]) -> None:
    """Refuse a folder whose values are not served.

    Args:
        requirements: triples of name, value in the folder, and served value.

    Raises:
        ConfigError: a folder's value differs from the served one.
    """
    for name, value, served in requirements:
        if value != served:
            raise ConfigError(
                f"[model] path: {name}: {value} is not served for such models; served: {served}"
            )


def least_steps(sampler: Mapping[str, Any]) -> int:
    """Return `ModelSpec.least_steps` of a sampler's scheduler_config.json."""
    return 2 if sampler.get("shift_terminal") else 1


def refresh_strides(config: Config, spec: ModelSpec) -> RefreshStrides:
    """Return the strides of a worker's edits."""
    return RefreshStrides(
        refresh_stride(config, spec),
        EXPECTED_STRIDE if promised_fidelity(config, spec, promise=1.0) else 0.0,
        refreshes_by_error(config, spec),
        _NOISY_STEPS if spec.semantics.noisy_around else 0,
    )


def refresh_stride(config: Config, spec: ModelSpec) -> float:
    """Return `RefreshStrides.plain` of a worker's edits."""
    return EXPECTED_STRIDE if refreshes_by_error(config, spec) else known_stride(config, spec)


def known_stride(config: Config, spec: ModelSpec) -> float:
    """Return the stride between refresh steps that no error places; 0: edits have none."""
    if spec.refresh.stride is None:
        return 0.0
    configured = config.cache.own_anchors
    return configured if configured >= 0 else spec.refresh.stride


def refreshes_by_error(config: Config, spec: ModelSpec) -> bool:
    """Whether refresh steps are placed by the errors of lookaheads (`RefreshControl`), also of
    edits that do not ask for it.
    """
    return promised_fidelity(config, spec) > 0


def promised_fidelity(config: Config, spec: ModelSpec, promise: float = 0.0) -> float:
    """Return the fidelity, in dB against dense edits, that an edit's errors keep as they place its
    refresh steps; 0: they place none. So it is if places are configured or, without
    `RefreshSpec.by_error`, known for the model, and the edit asks for none. Devices that share a
    step would have to agree on places.
    """
    engine, cache, refresh = config.engine, config.cache, spec.refresh
    is_alone = engine.devices == 1 or engine.policy == "spread"
    if not is_alone or refresh.stride is None or not cache.own_anchors:
        return 0.0
    if promise:
        return promise
    if cache.own_anchors > 0 or (refresh.stride and not refresh.by_error):
        return 0.0
    return cache.fidelity if cache.fidelity >= 0 else _FIDELITY


def refresh_rule(config: Config, spec: ModelSpec, device: str = "cuda") -> RefreshRule:
    """Return the rule by which rows and ControlNets fill their step caches
    (docs/decisions/refresh-steps.md).
    `device` is the type of the worker's device.
    """
    cache, control = config.cache, spec.control
    text = cache.own_text == "frozen" and spec.refresh.leaves_text
    ring, fmt = text and spec.refresh.ring is not None, cache.refresh_format_on(device)
    stride = REFRESH_RULE.stride if control is None else control.stride
    if cache.own_anchors > 0:
        stride = cache.own_anchors
    return RefreshRule(stride, fmt, text, ring)


class TextShares(NamedTuple):
    """Shares of a row's reading steps that compute its text."""

    template: float
    refresh: float
    """Share of the steps between its own refresh steps."""
    lookahead: float = 0.0
    """Lookahead's part, as in `RingShares`."""


ALL_TEXT = TextShares(1.0, 1.0)


class NetShares(NamedTuple):
    """Shares of a cached row's steps in which a ControlNet beside a template computes tokens."""

    whole: float
    """Share of the steps that compute all tokens, of their own or by lookahead."""
    computed: float
    """Share of the steps that compute the base's computed tokens."""


ALL_NET_TOKENS = NetShares(1.0, 0.0)


def net_shares(config: Config, spec: ModelSpec, steps: int) -> NetShares:
    """Return the shares of the steps of an edit whose ControlNets act in all of them."""
    count = count_with_controls(steps, refresh_rule(config, spec).stride)
    return NetShares(count / steps, 1.0 - 1.0 / steps)


def text_shares(config: Config, spec: ModelSpec, steps: int, *, shared: bool) -> TextShares:
    """Return the mean text shares of a worker's rows.

    Args:
        config: configuration of the worker.
        spec: spec of the model.
        steps: steps of an edit.
        shared: whether several devices may take a step together; rows that read a template then
            compute their text.
    """
    if (
        not refresh_count(steps, refresh_stride(config, spec))
        or not refresh_rule(config, spec).text
    ):
        return ALL_TEXT
    anchors = refresh_count(steps, known_stride(config, spec))
    if shared or not anchors or spec.encoder_picture is not None:  # the template has most of it
        return TextShares(1.0, 0.0)
    return TextShares(anchors / steps, 0.0, (anchors - 1) / steps)


def anchor_stride(configured: int, spec: ModelSpec) -> int:
    """Return the steps that share an anchor (docs/decisions/templates.md). `configured` is
    `[cache] stride`; 0: the model's own.
    """
    return configured or spec.stride
