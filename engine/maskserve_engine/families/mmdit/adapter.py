"""A flow-matching transformer behind the engine's adapter interface: its rows, made from prepared
jobs, and its steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from maskserve_common.config import Config, ConfigError, outside_noise
from maskserve_common.contracts.keys import Anchor, anchor_steps, cover
from maskserve_common.contracts.request import EditKind, model_steps, steps_run
from maskserve_engine.adapters.fuse import fuse_configured_loras
from maskserve_engine.base.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.padding import Sizes
from maskserve_engine.batch.picture_tokens import PICTURE_KEYS, PictureKeys, picture_keys_of
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.stepping import Stepping
from maskserve_engine.batch.transfer import moved
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.adapter import LoneLengths, work_of
from maskserve_engine.families.control import (
    NetBatch,
    NetRow,
    OpenedRows,
    RowControl,
    ServedControl,
)
from maskserve_engine.families.mmdit.batch import FlowBatch, FlowWeights
from maskserve_engine.families.mmdit.preparation import (
    FlowInputs,
    FlowPreparation,
    FlowPrompt,
    FlowTemplate,
    Grid,
    grid_of,
    reference_grids,
)
from maskserve_engine.families.mmdit.rows import (
    FlowPrimingRow,
    FlowRow,
    PromptPass,
    Row,
    SamplerState,
)
from maskserve_engine.families.mmdit.schedule import (
    check_sampler,
    linear_shift,
    load_sampler,
    make_schedule,
)
from maskserve_engine.families.mmdit.spans import (
    ExtrapolatedLatents,
    FixedWords,
    ImageSpans,
    MaskedTokens,
    References,
    SharedEntry,
    TokenSpan,
)
from maskserve_engine.layers.attention import bucket, plans_lengths
from maskserve_engine.layers.low_rank import Adapters, Factors, LowRankSet, Place, low_rank_set
from maskserve_engine.planning.flops import ModelWork, RowTokens, Totals
from maskserve_engine.planning.refresh_steps import REFRESH_RULE, RefreshRule
from maskserve_engine.spec.family import FamilyModule, family_work
from maskserve_engine.spec.model_spec import ModelSpec, refresh_rule
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import device_of, module_bytes
from maskserve_engine.stages.quantise import load_denoiser

W = TypeVar("W", bound=FlowWeights)


class FlowRowMaker(ABC):
    """Base of adapters: makes rows of edits and of templates. A family says here what the tokens of
    its prompts and pictures are.

    Args:
        preparation: prepares the rows' jobs.
    """

    spec: ModelSpec
    device: torch.device
    text_varies: ClassVar[bool] = False
    """Whether a prompt's length is that of its words."""

    def __init__(self, preparation: FlowPreparation) -> None:
        self._preparation = preparation
        self._positions = lru_cache(maxsize=64)(self.positions)
        self._shared_entries: WeakValueDictionary[Hashable, SharedEntry] = WeakValueDictionary()
        """Keys and values of references of the present rows, by the names of their pictures."""

    @abstractmethod
    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        """Return [T, width] text tokens at the first block, the same at every step, from a prompt's
        states [words, in]. They include `pads` for a picture of `grid` (rows, columns) tokens.
        """

    @property
    def timeless(self) -> bool:
        return False

    def pads(self, grid: tuple[int, int]) -> int:
        """Return the number of text tokens beside a picture of that grid (`RowInput.pads`)."""
        return 0

    @abstractmethod
    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        """Return [T + height · width + R, head_dim / 2] complex rotary factors of text, image
        tokens, and the R tokens of reference pictures of these grids.
        """

    def priming_positions(self, job: EditJob, cis: Tensor) -> Tensor:
        """Return the rotary factors of a priming prompt's text, given as for an edit's prompt."""
        return cis

    def words(
        self, job: EditJob, prompt: FlowPrompt, references: References | None
    ) -> FixedWords | None:
        """Return a prompt that no step computes; None: the prompt is `text`."""
        return None

    def references(self, job: EditJob, text: int) -> References | None:
        """Return the reference pictures of a model whose references do not depend on the row; None
        for others, and if there are none. `text` counts the text tokens before them.
        """
        grids = reference_grids(job, self.spec)
        if not (self.spec.semantics.exact and grids):
            return None
        height, width = grid_of(job)
        [tokens] = moved((self._preparation.references(job),), self.device)
        cis = self._positions(height, width, text, grids)[text + height * width :]
        return References(tokens, cis)

    def dense_row(self, job: EditJob) -> FlowRow:
        with torch.inference_mode():
            return self._row(job, moved(self._preparation.prepared(job).inputs, self.device))

    def cached_row(
        self, job: EditJob, noise_seed: int, schedule: RefreshSchedule | None = None
    ) -> FlowRow:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            whole = self._preparation.template(job, noise_seed)
            leaves_ring = schedule is not None and schedule.ring
            *ids, selection = self._preparation.split(job, leaves_ring=leaves_ring)
            active, ring, index = map(torch.from_numpy, (*ids, *selection.levels))
            outside = index[: len(whole.clean) - len(active) - len(ring)]
            with one_cpu_thread():
                begin = ready.inputs.start
                start, around, outside_inputs = (
                    begin.take(active),
                    begin.take(ring),
                    whole.take(outside),
                )
                clean = whole.clean.index_select(0, ring)
            host_tensors = (
                replace(ready.inputs, start=start),
                around,
                clean,
                outside_inputs,
                active,
                ring,
                index,
            )
            inputs, around, clean, template, active, ring, index = moved(host_tensors, self.device)
            selection.keep_ids([index])
            row = self._row(job, inputs)
            image, picture_tokens = row.image.masked.cis, self._preparation.picture_words(job)
            template = self._filled(template)
            cached_cis = torch.cat((image, row.prompt.cis[:picture_tokens]))[index]
            row.image.masked.ids, row.image.masked.cis = active, image[active]
            row.image.unmasked = TokenSpan(index, cached_cis, template, selection, picture_tokens)
            if leaves_ring:
                ring_latents = ExtrapolatedLatents.begin(around, clean, predicted=len(ring))
                row.image.ring = TokenSpan(ring, image[ring], ring_latents)
            row.begin_step_caches(schedule)
            return row

    def refreshing_row(self, job: EditJob, schedule: RefreshSchedule) -> FlowRow:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            inner, ring, selection = self._preparation.split(job, leaves_ring=schedule.ring)
            [ids] = selection.levels  # the step cache keeps all of its text
            ids = np.concatenate((ring, ids[: len(ids) - self._preparation.picture_words(job)]))
            active, index = map(torch.from_numpy, (inner, ids))
            start = ready.inputs.start
            outside_ids = index[: len(start.latents) - len(active)]
            with one_cpu_thread():
                active_start, outside_start = start.take(active), start.take(outside_ids)
                clean = self._preparation.clean(job).index_select(0, outside_ids)
            host_tensors = (
                replace(ready.inputs, start=active_start),
                outside_start,
                clean,
                start.context,
                active,
                index,
            )
            inputs, outside_start, clean, context, active, index = moved(host_tensors, self.device)
            row = self._row(job, inputs)
            image = row.image.masked.cis
            latents = ExtrapolatedLatents.begin(outside_start, clean, context, predicted=len(ring))
            row.image.masked.ids, row.image.masked.cis = active, image[active]
            row.image.unmasked = TokenSpan(index, image[index], latents, selection)
            row.begin_step_caches(schedule)
            return row

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: Conditioning,
        noise_seed: int,
        kinds: Sequence[frozenset[str]],
        format: str,
    ) -> FlowPrimingRow:
        with torch.inference_mode():
            sigmas = torch.tensor([anchor.sigma for anchor in anchors])
            flow_template, picture_tokens = (
                self._preparation.template(job, noise_seed),
                self._preparation.picture_words(job),
            )
            if self.spec.encoder_picture and not self.spec.primed_by_prompt:
                prompt = {"prompt_embeds": job.conditioning["prompt_embeds"][:picture_tokens]}
            host_tensors = (flow_template, self._preparation.prompt(prompt), sigmas)
            template, inputs, sigmas = moved(host_tensors, self.device)
            prompt_pass = self._prompt_pass(job, inputs)
            prompt_pass.cis = self.priming_positions(job, prompt_pass.cis)
            text = len(prompt_pass.text)
            return FlowPrimingRow(
                request_id=job.request.request_id,
                template=self._filled(template),
                anchors=tuple(anchors),
                sigmas=sigmas,
                prompt=prompt_pass,
                embeds=inputs.embeds,
                cis=self._image_positions(job, text),
                kinds=kinds,
                format=format,
                references=self.references(job, text),
                picture_words=picture_tokens,
            )

    def _prompt_pass(self, job: EditJob, prompt: FlowPrompt) -> PromptPass:
        grid = grid_of(job)
        text = self.text(prompt.embeds, grid)  # the same at every step, so embedded once
        return PromptPass(
            text,
            self._positions(*grid, len(text), reference_grids(job, self.spec))[: len(text)],
            prompt.pooled,
            job.request.settings.guidance_scale if self.spec.guidance == "embedded" else None,
            self.pads(grid),
            self.timeless,
            varies=self.text_varies,
            picture=self._picture(job, prompt.picture),
        )

    def _picture(self, job: EditJob, packed: Tensor | None) -> PictureKeys:
        """Return the keys and values of an IP-Adapter's picture, if the prompt has one."""
        setting, takes = job.request.settings.ip_adapter, self.spec.ip_adapters
        if packed is None or setting is None:
            return ()
        assert takes is not None, "the front refuses IP-Adapters"
        return picture_keys_of(packed, takes.widths, setting.scale)

    def _image_positions(self, job: EditJob, text: int) -> Tensor:
        """Return the rotary factors of the image tokens, and of references that are packed with
        them; `text` counts the text tokens before them.
        """
        height, width = grid_of(job)
        whole = self._positions(height, width, text, reference_grids(job, self.spec))[text:]
        return whole[: height * width] if self.spec.semantics.exact else whole

    def _share(self, references: References | None, job: EditJob) -> None:
        """Let a new row share its references' keys and values with rows of the same pictures. A
        reproducible one has its own, since rounding depends on the rows that computed them.
        """
        request = job.request
        names = (request.pixels_id, *(reference.pixels_id for reference in request.references))
        if references is None or request.settings.reproducible or not all(names):
            return
        for number, one in enumerate(references.all):
            one.shared = self._shared_entries.setdefault((*names, number), SharedEntry())

    def _row(self, job: EditJob, inputs: FlowInputs) -> FlowRow:
        start, prompt = inputs.start, self._prompt_pass(job, inputs.prompt)
        text = len(prompt.text)
        references = self.references(job, text)
        self._share(references, job)
        prompt.words = self.words(job, inputs.prompt, references)
        negative = self._negative(job, inputs.negative, references)
        return FlowRow(
            request_id=job.request.request_id,
            schedule=inputs.schedule,
            passes=(prompt,) if negative is None else (prompt, negative),
            image=ImageSpans(
                grid_of(job),
                MaskedTokens(
                    None,
                    self._image_positions(job, text),
                    start.latents,
                    start.condition,
                    start.blend,
                    start.context,
                ),
            ),
            references=references,
            recorded=self._preparation.recorded(job),
        )

    def _filled(self, template: FlowTemplate) -> FlowTemplate:
        masked = self.spec.semantics.masked_picture
        return template.filled(self.spec.vae_scale_factor) if masked else template

    def _negative(
        self, job: EditJob, inputs: FlowPrompt | None, references: References | None
    ) -> PromptPass | None:
        if inputs is None:
            return None
        settings = job.request.settings
        cfg = self.spec.guidance == "cfg"
        scale = settings.guidance_scale if cfg else settings.true_cfg_scale
        assert scale is not None, "a negative prompt comes with its scale (validation)"
        prompt = self._prompt_pass(job, inputs)
        prompt.words, prompt.scale = self.words(job, inputs, references), scale
        return prompt


class FlowAdapter(Stepping[Row, W], FlowRowMaker, OpenedRows, Generic[W]):
    """Steps rows of edits over one transformer. A family provides the class variables here, the
    abstract methods here and of `FlowRowMaker`, and a `FlowBatch`.

    Args:
        spec: describes the model folder.
        model: the family's `transformer`, in eval mode.
        sampler: computes schedules; it steps no row.
        placed_bytes: `[cache] placed_bytes`.
        outside_noise: `[model] outside_noise`.
        recorded_rows: number of dense rows whose tokens the longest recorded step has (`[engine]
            cuda_graphs`); keys and values are then placed again at each step. 0: no step is
            recorded.
        refresh_rule: how rows fill their step caches.
    """

    family: ClassVar[FamilyModule]
    transformer: ClassVar[str]
    """Name of its model's class in diffusers."""
    batches: ClassVar[type[FlowBatch[Any]]]
    text_places: ClassVar[tuple[str, ...]]
    """Prefixes of the weights' places that `text` reads."""
    passes_sigmas: ClassVar[bool] = True
    """Whether the family's pipeline passes sigmas to its sampler (`shift`)."""
    flow_sigmas: ClassVar[frozenset[EditKind]] = frozenset()
    """Kinds of edits whose pipelines let a sampler with `use_flow_sigmas` choose its sigmas."""
    sampler_shift: ClassVar[float | None] = None
    """Shift of the sampler that the family's pipeline makes by itself; None: folders have one."""
    preparation: ClassVar[type[FlowPreparation]] = FlowPreparation
    """Draws random numbers in the order of the family's pipeline."""
    anchor_tolerance = 1.0
    """Any anchor serves any step (docs/decisions/templates.md); `stride` decides how near it is."""
    entry_halves = 1

    def __init__(
        self,
        spec: ModelSpec,
        model: Any,
        sampler: Any,
        *,
        placed_bytes: int = 0,
        outside_noise: str = "auto",
        recorded_rows: float = 0,
        refresh_rule: RefreshRule = REFRESH_RULE,
    ) -> None:
        check_sampler(sampler)
        self.spec, self.model, self.sampler = spec, model, sampler
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.weight_bytes = module_bytes(model)
        recorder = None
        if recorded_rows:
            recorder = Graphs.on(model.device, model.dtype, recorded_rows)
        room = placed_bytes if recorder is None else 0
        self.weights = self.weights_of(model, room, recorder)
        Stepping.__init__(self, self.batches, self.weights)
        self.blocks = self.entry_blocks = len(self.weights.blocks)
        preparation = self.preparation(
            spec,
            sampler,
            dtype=self.dtype,
            outside_noise=outside_noise,
            shift=self.shift,
            flow_sigmas=self.flow_sigmas,
            buckets=recorder is not None,
        )
        FlowRowMaker.__init__(self, preparation)
        self._refresh_rule = refresh_rule
        self.places = self.places_of(model)
        self.work = lru_cache(maxsize=64)(self._make_work)
        self.anchors = lru_cache(maxsize=64)(self._make_anchors)

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Self:
        """Load a model folder.

        Raises:
            ConfigError: a part is missing or unreadable, or its entries could not be used.
        """
        import diffusers

        if spec.encoder_picture is not None and config.cache.entry_kind != "kv":
            raise ConfigError(
                f"[cache] entry_kind: {config.cache.entry_kind} is not served with models whose "
                "prompts are about a picture; use kv"
            )
        fuse_weights = partial(fuse_configured_loras, config, part="denoiser")
        return cls(
            spec,
            load_denoiser(config, "transformer", getattr(diffusers, cls.transformer), fuse_weights),
            load_sampler(config, passes_sigmas=cls.passes_sigmas, shift=cls.sampler_shift),
            placed_bytes=config.cache.placed_on(device_of(config).type),
            outside_noise=outside_noise(config),
            recorded_rows=cls.family.recorded_rows(spec, config),
            refresh_rule=refresh_rule(config, spec, device_of(config).type),
        )

    @staticmethod
    def shift(config: Mapping[str, Any], tokens: int, steps: int) -> float | None:
        """Return the shift of the pipeline's schedule (`schedule.Shift`)."""
        return linear_shift(config, tokens, steps)

    @abstractmethod
    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> W:
        """Return the model's weights as its batches use them."""

    @staticmethod
    @abstractmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        """Return the places in the weights of the layers that a LoRA may change."""

    def blank_prompt(self, tokens: int) -> Conditioning:
        width = self.spec.denoiser["joint_attention_dim"]
        return {"prompt_embeds": np.zeros((tokens, width), np.float32)}

    def lone_lengths(self, job: EditJob, words: int, usual: tuple[float, float]) -> LoneLengths:
        """Return a length of each size to which recorded steps are padded, if prompts have any
        length; otherwise each bucket, if attention is planned.
        """
        grid, total = grid_of(job), self.tokens(job).total
        least, most = (int(share * total) for share in usual)
        buckets = sorted({bucket(count, total) for count in range(least, most + 1)})
        if not self.text_varies:
            return LoneLengths(buckets, [words]) if plans_lengths(self.device) else LoneLengths()
        if self.weights.graphs is None:
            return LoneLengths()
        passes = 1 if job.negative is None else 2

        def sizes(text: int, image: int) -> Sizes:
            return Sizes.of((text,) * passes, (image,) * passes, 0)

        of_image = {sizes(0, count).image: count for count in buckets}
        of_text = {
            sizes(self.text_tokens(count, grid), 0).text: count for count in range(1, words + 1)
        }
        return LoneLengths([*of_image.values()], [*of_text.values()])

    def text_tokens(self, words: int, grid: tuple[int, int]) -> int:
        return words

    def steps(self, job: EditJob) -> int:
        settings = job.request.settings
        assert settings.num_inference_steps is not None
        scheduled = steps_run(settings.num_inference_steps, settings.strength)
        return len(model_steps(scheduled, settings.step_interval or 1))

    def tokens(self, job: EditJob) -> TokenCounts:
        return self._preparation.tokens(job).counts

    def _make_work(
        self, height: int, width: int, *, kind: EditKind = "inpaint", further: int = 0
    ) -> ModelWork:
        recorded = self.weights.graphs is not None
        work = family_work(self.family, self.spec, height, width, recorded=recorded, kind=kind)
        return work.with_references(further, exact=self.spec.semantics.exact) if further else work

    def totals(
        self, job: EditJob, schedule: RefreshSchedule | None = None, *, refresh: bool = False
    ) -> Totals:
        text, tokens = schedule is None or refresh or not schedule.text, self.tokens(job)
        prompts = [
            conditioning
            for conditioning in (job.conditioning, job.negative)
            if conditioning is not None
        ]
        computed = tokens.active
        if schedule is not None and schedule.ring:
            computed = tokens.inner + tokens.ring * refresh
        active, grid = (float(computed),), grid_of(job)
        prompt_pictures = self._preparation.picture_words(job)  # the work has them as context
        lengths = [
            float(self.text_tokens(len(p["prompt_embeds"]), grid)) - prompt_pictures
            for p in prompts
        ]
        return work_of(self, job).totals(
            [RowTokens(active, text * n, text_read=(not text) * n) for n in lengths]
        )

    def batch_key(self, job: EditJob) -> Hashable:
        return None  # rows are packed without padding: any may share a step

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        schedule = self._preparation.schedule(job)
        return [(step.sigma, step.timestep) for step in schedule.walk]

    def _make_anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Choose the middle one of every `stride` timesteps, and more until every possible step is
        within tolerance of one.
        """
        shift, model_sigmas = self.shift, self.spec.sigmas
        walk = make_schedule(
            self.sampler,
            steps,
            tokens,
            shift=shift,
            sigmas=model_sigmas,
            flow_sigmas="inpaint" in self.flow_sigmas,
        ).walk
        chosen = anchor_steps([step.sigma for step in walk], stride)
        anchors = (Anchor(walk[i].sigma, walk[i].timestep) for i in chosen)
        return cover(tuple(anchors), self.anchor_tolerance)

    def prepare(self, job: EditJob) -> EditJob:
        with torch.inference_mode():
            return replace(job, prepared=self._preparation.prepared(job))

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            template = self._preparation.template(job, noise_seed)
            return replace(job, prepared=replace(ready, template=template))

    def with_settings(self, job: EditJob, **changes: int) -> EditJob:
        return self._preparation.with_settings(job, **changes)

    def refreshing_row_bytes(self, job: EditJob) -> int:
        return 0

    def most_ranks(self, job: EditJob) -> int:
        """Return the number of attention heads; for rows that ranks cannot share, one rank for each
        pass (`batch.cfg_parallel`).
        """
        request = job.request
        if request.loras or job.controls or PICTURE_KEYS in job.conditioning:
            return 1 if job.negative is None else 2
        return self.weights.width // self.weights.head_dim

    def carried(self, row: Row) -> tuple[Any, ...] | None:
        """Return [n, 4C] latents of the computed tokens, the sampler's memory, and for a row with
        refresh steps [m, 4C] latents of the cached tokens; nothing for a priming row.
        """
        if not isinstance(row, FlowRow):
            return ()
        unmasked = None if row.image.unmasked is None else row.image.unmasked.latents
        cached = (unmasked.latents_now,) if isinstance(unmasked, ExtrapolatedLatents) else ()
        return (row.image.masked.latents, row.sampler.memory, *cached)

    def follow(self, row: Row, carried: tuple[Any, ...], steps: int) -> None:
        self.release()  # the batch was packed for the row's earlier step
        row.step = steps
        if isinstance(row, FlowRow):
            row.image.masked.latents, memory, *cached = carried
            row.sampler = SamplerState(memory=memory)
            unmasked = None if row.image.unmasked is None else row.image.unmasked.latents
            if row.image.unmasked is not None and isinstance(unmasked, ExtrapolatedLatents):
                row.image.unmasked.latents = unmasked.restarted(*cached)
            if row.step_cache is not None:
                row.begin_step_caches(row.step_cache.schedule)  # those before belong to other steps

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRankSet:
        with torch.inference_mode():
            return low_rank_set(factors, self.places, self.device, self.dtype)

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        changed_adapters, row.adapters = (*row.adapters, *adapters), adapters
        step_cache = row.step_cache if isinstance(row, FlowRow) else None
        if step_cache is not None and step_cache.schedule.refresh_steps:
            row.begin_step_caches(step_cache.schedule)  # those before were computed without them
        for references in () if row.references is None else row.references.all:
            references.reset()  # made without them
        changed = {place for adapter, _ in changed_adapters for place in adapter.updates}
        if not any(place.startswith(self.text_places) for place in changed):
            return  # its prompt's tokens have not changed
        grid = grid_of(job)
        with torch.inference_mode():
            if isinstance(row, FlowPrimingRow):
                row.prompt.text = self.text(row.embeds, grid, adapters)
                return
            inputs = moved(self._preparation.prepared(job).inputs, self.device)
            row.prompt.text = self.text(inputs.prompt.embeds, grid, adapters)
            if row.negative is not None:
                assert inputs.negative is not None
                row.negative.text = self.text(inputs.negative.embeds, grid, adapters)

    def control_net(self, model: Any) -> Any:
        """Raise ValueError: families without ControlNets do not override this."""
        raise ValueError("is a ControlNet, and this model takes none")

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        return None

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        raise ValueError("this model takes no ControlNets")

    def net_batch(self) -> NetBatch:
        raise ValueError("this model takes no ControlNets")

    def _nets_schedule(self, row: FlowRow, job: EditJob) -> RefreshSchedule:
        """Return the schedule of the row's ControlNets. In a row without a template they compute
        all tokens when the base does.
        """
        if row.step_cache is not None and row.image.refreshes:
            return replace(row.step_cache.schedule, refresh_steps=frozenset())
        return self.net_schedule(job, job.controls)

    def set_control(self, row: Any, control: RowControl[Any]) -> None:
        row.residuals = control

    def serve_control(self, row: Any, served: ServedRow) -> None:
        row.residuals = ServedControl.of(served, len(self._net_passes(row)))

    def _net_passes(self, row: FlowRow) -> tuple[PromptPass, ...]:
        """Return the passes with whose prompts the row's ControlNets run."""
        control_spec = self.spec.control
        assert control_spec is not None, "this model takes no ControlNets"
        return row.passes if control_spec.guided else row.passes[:1]
