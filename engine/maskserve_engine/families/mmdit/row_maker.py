"""How rows of a flow-matching transformer are made, from prepared jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.picture_tokens import PictureKeys, picture_keys_of
from maskserve_engine.batch.skipping import FirstBlockCache
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.transfer import moved
from maskserve_engine.families.mmdit.preparation import (
    FlowInputs,
    FlowPreparation,
    FlowPrompt,
    FlowTemplate,
    Grid,
    grid_of,
    reference_grids,
)
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow, PromptPass
from maskserve_engine.families.mmdit.spans import (
    ExtrapolatedLatents,
    FixedWords,
    ImageSpans,
    MaskedTokens,
    References,
    SharedEntry,
    TokenSpan,
)
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import one_cpu_thread


class FlowRowMaker(ABC):
    """Base of adapters: makes rows of edits and of templates. A family says here what the tokens of
    its prompts and pictures are.

    Args:
        preparation: prepares the rows' jobs.
    """

    spec: ModelSpec
    device: torch.device

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
            selection.sent([index])
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

    def anchored_row(self, job: EditJob, plan: RefreshSchedule) -> FlowRow:
        with torch.inference_mode():
            ready = self._preparation.prepared(job)
            inner, ring, selection = self._preparation.split(job, leaves_ring=plan.ring)
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
            row.begin_step_caches(plan)
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
        threshold = job.request.settings.first_block_threshold
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
            first_block=FirstBlockCache(threshold) if threshold else None,
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
