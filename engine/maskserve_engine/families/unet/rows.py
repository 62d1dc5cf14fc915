"""UNet rows: an edit, or a template being primed, with its state between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.batch.packing import Residuals
from maskserve_engine.batch.picture_tokens import PictureKeys
from maskserve_engine.batch.step_cache import Entry, RefreshSchedule
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.control import RowControl, ServedControl
from maskserve_engine.families.unet.captures import UnetRecorder, UnetStepCache
from maskserve_engine.families.unet.conditioning import UnetBlend, UnetTemplate
from maskserve_engine.families.unet.control import UnetNetInput
from maskserve_engine.families.unet.extrapolation import Extrapolated, StepCacheSurroundings
from maskserve_engine.families.unet.forward import PassInput
from maskserve_engine.families.unet.sampler import TRAINED_STEPS, NoiseLevels, UnetSchedule
from maskserve_engine.families.unet.stack import StackCapture
from maskserve_engine.families.unet.surroundings import Surroundings, TemplateSurroundings
from maskserve_engine.families.unet.tile import Ids, Tile
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.layers.scatter_kv import KvSource
from maskserve_engine.planning.flops import FeatureMap
from maskserve_engine.stages.latents import joins


@dataclass(frozen=True, slots=True)
class UnetPrompt:
    text: Tensor
    added: Tensor | None
    """[embedding width] of SDXL's micro-conditioning (`forward.added_embedding`)."""
    micro: Tensor | None = None
    """Input of that embedding (`forward.micro_conditioning`)."""
    picture: PictureKeys = ()
    """Keys and values of the IP-Adapter's picture; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: each step also runs the model with the negative prompt."""

    negative: UnetPrompt
    scale: float
    """guidance_scale, above 1."""


@dataclass(frozen=True, slots=True)
class UnetInactive:
    """The cached tokens of a row, and its computed tokens' ids."""

    active: Mapping[int, Ids]
    """Level → [n] ids of the computed tokens, in host memory, where batches are packed."""
    mask: Tensor
    """[1, h, w] bool: computed at level 0."""
    template: UnetTemplate
    selection: Selection
    """Ids of the cached tokens, per level; with two halves, both halves' ids."""
    halves: int = 1
    """2: the second pass reads the entries' second half."""
    tile: Tile | None = None
    """Tile on which convolutions run; None: the whole picture."""
    maps: range = range(0)
    """Numbers of the feature maps among an entry's blocks; read only with a tile."""
    feature_maps: tuple[FeatureMap, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """`stack.InactivePassTokens` of one pass of a row, at the row's present step."""

    row: UnetRow
    half: int
    """Half of the entries: 0, or 1 for a second pass with its own."""
    _selections: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Cache of `_selected_ids`: (all ids, requested positions, selected ids) per level."""

    def source(self, block: int, part: str, positions: Tensor | None = None) -> KvSource:
        entry, inactive = self.row.entry, self.row.inactive
        assert isinstance(entry, Handle), "packed for a step that reads no entry"
        assert inactive is not None
        parts, ids = entry.wait_whole(block, part)
        count = len(parts[0].data if ids is None else ids) // inactive.halves
        half_slice = slice(self.half * count, (self.half + 1) * count)
        if ids is not None:
            return KvSource(
                parts,
                ids[half_slice]
                if positions is None
                else self._selected_ids(ids, half_slice, positions),
            )
        return KvSource(
            tuple([coded.map(lambda tokens: tokens[half_slice]) for coded in parts]), positions
        )

    def _selected_ids(self, ids: Tensor, part: slice, positions: Tensor) -> Tensor:
        """Return [m] ids at `positions` in a half; the same at every step."""
        for all_ids, known_ids, selected_ids in self._selections:
            if all_ids is ids and known_ids is positions:
                return selected_ids
        self._selections.append((ids, positions, ids[part].index_select(0, positions)))
        return self._selections[-1][-1]


@dataclass(frozen=True, slots=True)
class StepCacheTokens:
    """`stack.InactivePassTokens` of a pass between refresh steps."""

    row: UnetRow
    cache: UnetStepCache

    def source(self, block: int, part: str, positions: Tensor | None = None) -> KvSource:
        source = self.cache.source(block, self.row.sigma, part)
        changes = tuple([change._replace(ids=positions) for change in source.changes])
        return replace(source, ids=positions, changes=changes)


@dataclass(slots=True)
class UnetRow:
    request_id: str
    schedule: UnetSchedule
    noise_levels: NoiseLevels
    prompt: UnetPrompt
    guidance: Guidance | None
    state: Tensor
    """[K, C, h, w] float32: latents and the sampler's memory. Outside a cached row's computed
    tokens nothing reads them."""
    condition: Tensor | None
    blend: UnetBlend | None
    control: RowControl[UnetNetInput] | ServedControl | None = None
    """None: no ControlNet."""
    adapters: Adapters = ()
    inactive: UnetInactive | None = None
    refresh_schedule: RefreshSchedule | None = None
    leaves_out_text: bool = False
    """See `FlowRow`; a UNet's text has the same keys and values at each step."""
    entry: Entry | None = None
    """Entry that the next step reads; None: it computes all tokens."""
    surroundings: Surroundings | None = field(init=False, default=None)
    step: int = 0
    answer: Tensor | None = None
    """[C, h, w] guided answer of the model in the last step."""
    step_caches: tuple[UnetStepCache, ...] = field(init=False, default=())
    """Step cache of each pass, if the row has a schedule."""
    extrapolated: Extrapolated | None = field(init=False, default=None)
    """[C, h, w] model answers at refresh steps, if other steps compute a tile only."""
    lookahead: int | None = field(init=False, default=None)
    """Refresh step computed ahead by the last step or the step in progress."""
    _input: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inactive is None:
            return
        if self.refresh_schedule is not None:
            self._begin_step_caches(self.refresh_schedule, self.inactive)
        elif self.inactive.tile is not None:
            self.surroundings = TemplateSurroundings(
                self.inactive.tile,
                self.inactive.maps,
                self.inactive.feature_maps,
                self.inactive.template.clean.dtype,
                lambda: self.entry,
            )

    def begin_anew(self) -> None:
        """Forget all step caches: they belong to another rank, or to other LoRAs."""
        if self.step_caches and self.inactive is not None:
            self._begin_step_caches(self.step_caches[0].schedule, self.inactive)

    def _begin_step_caches(self, schedule: RefreshSchedule, inactive: UnetInactive) -> None:
        passes, around = 1 if self.guidance is None else 2, None
        if inactive.tile is not None:
            dtype = inactive.template.clean.dtype
            around = StepCacheSurroundings(
                inactive.tile, inactive.feature_maps, passes, dtype, schedule.power, self._now
            )
            self.surroundings, self.extrapolated = around, Extrapolated(schedule.power)
        self.step_caches = tuple(
            [
                UnetStepCache(schedule, number, inactive.selection, inactive.halves, around)
                for number in range(passes)
            ]
        )

    def _now(self) -> tuple[int, float]:
        return self.step, self.sigma

    @property
    def captures(self) -> list[StackCapture]:
        if self.entry is not None:
            return []
        return [step_cache.at(self.step, self.sigma) for step_cache in self.step_caches]

    @property
    def lookahead_step(self) -> int | None:
        """Refresh step that the next step computes ahead: the first one after it, once the row has
        arrived at the last one in its step cache. None: there is none.
        """
        if not self.step_caches or self.entry is None:
            return None
        step_cache = self.step_caches[0]
        schedule = step_cache.schedule
        if schedule.control is not None and self.step in schedule.refresh_steps:
            return None  # the next place depends on this step's error
        return schedule.next_refresh(self.step) if step_cache.last_sigma >= self.sigma else None

    @property
    def steps(self) -> int:
        return len(self.schedule.timesteps)

    @property
    def latents(self) -> Tensor:
        """[C, h, w]."""
        return self.state[0]

    @property
    def timestep(self) -> float:
        return self.schedule.timesteps[self.step]

    @property
    def sigma(self) -> float:
        """Share of all noise at the next step."""
        return self.sigma_at(self.step)

    def sigma_at(self, step: int) -> float:
        return self.schedule.timesteps[step] / TRAINED_STEPS

    @property
    def precomputed_timesteps(self) -> Sequence[float]:
        return self.schedule.timesteps[self.step :]

    @property
    def selection(self) -> Selection | None:
        return None if self.inactive is None else self.inactive.selection

    @property
    def active(self) -> Mapping[int, Ids] | None:
        """Level → ids of the tokens that the next step computes, in host memory; None: all."""
        inactive = self.inactive
        return None if inactive is None or self.entry is None else inactive.active

    def change_prompts(self, change: Callable[[UnetPrompt], UnetPrompt]) -> None:
        self.prompt = change(self.prompt)
        if self.guidance is not None:
            self.guidance = replace(self.guidance, negative=change(self.guidance.negative))

    @property
    def prompts(self) -> list[UnetPrompt]:
        return [self.prompt, *([] if self.guidance is None else [self.guidance.negative])]

    def passes(self) -> list[PassInput]:
        """Return the passes of the next step: the prompt's, then the negative one's."""
        prompts = self.prompts
        residuals: Sequence[Residuals | None] = (None, None)
        if self.control is not None:
            residuals = self.control.passes
        prompt_residuals = list(zip(prompts, residuals, strict=False))
        inactive = self.inactive
        if inactive is None or self.active is None:
            return [
                PassInput(
                    prompt.text, prompt.added, residuals=pass_residuals, picture=prompt.picture
                )
                for prompt, pass_residuals in prompt_residuals
            ]
        return [
            PassInput(
                prompt.text,
                prompt.added,
                self.active,
                StepCacheTokens(self, self.step_caches[number])
                if self.step_caches
                else TemplateTokens(self, min(number, inactive.halves - 1)),
                self.surroundings,
                pass_residuals,
                number,
                prompt.picture,
            )
            for number, (prompt, pass_residuals) in enumerate(prompt_residuals)
        ]

    def advance(self, state: Tensor, model_input: Tensor, answer: Tensor) -> None:
        """Record a completed step; all tensors are kept. `answer` is guided."""
        self.state, self._input, self.answer = state, model_input, answer
        if self.step_caches and self.step in self.step_caches[0].schedule.refresh_steps:
            self.step_caches[0].errors.arrive(
                self.step, self._computed(model_input, answer, self.step)
            )
        refresh_step = self.step if self.entry is None else self.lookahead
        if refresh_step == self.step:
            self.keep_surroundings(refresh_step, answer)
        if refresh_step is not None:
            for step_cache in self.step_caches:
                step_cache.complete_refresh(self.sigma_at(refresh_step))
        self.step += 1

    def expect(self, refresh_step: int, model_input: Tensor, answer: Tensor) -> None:
        """Keep a lookahead's guided answer, to compare with the model's at the refresh step."""
        self.step_caches[0].errors.expect(
            refresh_step, self._computed(model_input, answer, refresh_step)
        )

    def _computed(self, model_input: Tensor, answer: Tensor, step: int) -> Tensor:
        """Return [C, h, w] velocity of a step, with zeros outside of the computed tokens."""
        assert self.inactive is not None, "a dense row has no refresh steps"
        timestep = self.schedule.timesteps[step]
        return self.noise_levels.velocity(model_input, answer, timestep) * self.inactive.mask

    def keep_surroundings(self, refresh_step: int, answer: Tensor) -> None:
        """Keep what a refresh step computed outside the tile: feature maps, and the guided
        `answer`; nothing without a tile.
        """
        if isinstance(self.surroundings, StepCacheSurroundings) and self.extrapolated is not None:
            self.surroundings.complete_refresh(self.sigma_at(refresh_step))
            self.extrapolated.set(answer, self.sigma_at(refresh_step))

    def latents_ahead(self, step: int) -> Tensor:
        """Return [C, h, w] the model's input at a later step, extrapolated by its last answer."""
        assert self._input is not None, "no step was taken yet"
        assert self.answer is not None
        last = self._input.float(), self.answer.float(), self.schedule.timesteps[self.step - 1]
        levels, target_timestep = self.noise_levels, self.schedule.timesteps[step]
        latents = levels.mixed(levels.estimate(*last), levels.noise_in(*last), target_timestep)
        if self.refresh_schedule is None and self.inactive is not None:
            template = self.inactive.template.latents_at(target_timestep)
            latents = torch.where(self.inactive.mask, latents, template.float())
        if (blend := self.blend) is not None:
            inside = blend.mask >= joins(step, self.steps) if blend.soft else blend.mask > 0
            latents = torch.where(
                inside, latents, levels.mixed(blend.clean, blend.noise, target_timestep)
            )
        return latents.to(self._input.dtype)

    def with_surroundings(self, answer: Tensor) -> Tensor:
        """Return [C, h, w] the guided answer, with extrapolated values outside the tile."""
        inactive = self.inactive
        if self.extrapolated is None or self.entry is None or inactive is None:
            return answer
        assert inactive.tile is not None
        box, out = inactive.tile[0].box, self.extrapolated.at(self.sigma).clone()
        box.cut(out).copy_(box.cut(answer))
        return out

    def estimate(self) -> HostCopy:
        """Return [C, h, w] final latents expected by the last answer."""
        assert self._input is not None, "no step was taken yet"
        assert self.answer is not None
        timestep = self.schedule.timesteps[self.step - 1]
        return self._image(self.noise_levels.estimate(self._input, self.answer, timestep))

    def result(self) -> HostCopy:
        """Return [C, h, w] latents."""
        return self._image(self.latents)

    def _image(self, latents: Tensor) -> HostCopy:
        if self.inactive is not None:
            latents = torch.where(self.inactive.mask, latents, self.inactive.template.clean)
        return HostCopy(latents.float())


@dataclass(slots=True)
class UnetLookahead:
    """A refresh step that an edit's next step computes ahead: all tokens at that step."""

    row: UnetRow
    refresh_step: int
    request_id: str = field(init=False)
    adapters: Adapters = field(init=False)
    step: int = field(init=False)
    entry: Entry | None = field(init=False, default=None)
    """Always None: it computes all tokens."""
    _latents: Tensor | None = field(init=False, default=None)
    """[C, h, w] latents of its last `sample`."""

    def __post_init__(self) -> None:
        row = self.row
        self.request_id, self.adapters, self.step = row.request_id, row.adapters, row.step

    @property
    def step_caches(self) -> tuple[UnetStepCache, ...]:
        return self.row.step_caches

    @property
    def steps(self) -> int:
        return self.row.steps

    @property
    def precomputed_timesteps(self) -> Sequence[float]:
        return [self.row.schedule.timesteps[self.refresh_step]]

    @property
    def captures(self) -> list[StackCapture]:
        sigma = self.row.sigma_at(self.refresh_step)
        return [step_cache.at(self.step, sigma, reads=True) for step_cache in self.step_caches]

    def passes(self) -> list[PassInput]:
        control = self.row.control
        residuals: Sequence[Residuals | None] = (None, None)
        if control is not None:
            residuals = control.for_lookahead.passes
        prompt_residuals = zip(self.row.prompts, residuals, strict=False)
        return [
            PassInput(prompt.text, prompt.added, residuals=pass_residuals, picture=prompt.picture)
            for prompt, pass_residuals in prompt_residuals
        ]

    def sample(self) -> Tensor:
        """Return [in_channels, h, w]."""
        latents, condition = self.row.latents_ahead(self.refresh_step), self.row.condition
        self._latents = latents
        return latents if condition is None else torch.cat((latents, condition))

    def advance(self, answers: Tensor) -> None:
        """Give the answer to the edit's row; no latents move."""
        guidance, (answer, *negative_answers) = self.row.guidance, answers
        if guidance is not None:
            [away] = negative_answers
            answer = away + guidance.scale * (answer.float() - away)
        assert self._latents is not None, "its sample made the answers"
        self.row.keep_surroundings(self.refresh_step, answer)
        self.row.expect(self.refresh_step, self._latents, answer)


@dataclass(slots=True)
class UnetPrimingRow:
    """A template being primed, one anchor per step."""

    request_id: str
    template: UnetTemplate
    anchors: tuple[Anchor, ...]
    prompts: tuple[UnetPrompt, ...]
    """Prompt of each pass: the priming prompt, and an empty one if entries have two halves."""
    kinds: Sequence[frozenset[str]]
    """Parts to keep per block: "h", "kv"."""
    format: str
    maps: int = 0
    """Number of feature maps to keep: all of the model's, or 0."""
    entry: Entry | None = None
    """Always None: it computes all tokens."""
    adapters: Adapters = ()
    step: int = 0
    capture: UnetRecorder = field(init=False)
    _done: list[AnchorEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.capture = UnetRecorder(self.kinds, self.format, self.maps)

    def change_prompts(self, change: Callable[[UnetPrompt], UnetPrompt]) -> None:
        self.prompts = tuple(map(change, self.prompts))

    @property
    def steps(self) -> int:
        return len(self.anchors)

    @property
    def timestep(self) -> float:
        return self.anchors[self.step].timestep

    @property
    def precomputed_timesteps(self) -> list[float]:
        """Timesteps of the next anchor and later ones."""
        return [anchor.timestep for anchor in self.anchors[self.step :]]

    def passes(self) -> list[PassInput]:
        return [PassInput(prompt.text, prompt.added) for prompt in self.prompts]

    def sample(self) -> Tensor:
        """Return [in_channels, h, w] of the template, noised to the next anchor."""
        self.capture = UnetRecorder(self.kinds, self.format, self.maps)
        return self.template.at(self.timestep)

    def advance(self, answers: Tensor) -> None:
        self._done.append(self.capture.entry(self.anchors[self.step]))
        self.step += 1

    def take_entry(self) -> AnchorEntry:
        """Return the entry of the last step; once per step."""
        return self._done.pop()
