"""The parts of a worker in one process, called one after the other: the reference for serving."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.config import Config, sharing_the_device
from maskserve_common.contracts.edit_kinds import edit_kind
from maskserve_common.contracts.keys import template_id
from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_engine.base.job import EditJob, EngineEvent, Failed, FinalEvent, ProgressEvent
from maskserve_engine.cache.priming_prompt import write_priming_prompt
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.scheduling.step_scheduler import MakePolicy
from maskserve_engine.start.assembly import load_engine
from maskserve_lora.store import AdapterStore
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import PreparedEdit, prepare_edit

Edit = tuple[bytes, bytes, str]
"""Encoded image, encoded mask, prompt. Image and mask are empty if there is none."""


class Direct:
    """The parts of a worker in this process, called one after the other.

    This class encodes and decodes whole pictures. A worker splits cached edits into pieces where
    that is faster. The bytes of cached edits are therefore equal only if `[stages] encode_halo` and
    `decode_halo` are 0. The bytes of dense edits are always equal.

    Args:
        config: configuration of the worker.
        policy: makes the policy of `load_engine`; None: its default.
    """

    def __init__(self, config: Config, policy: MakePolicy | None = None) -> None:
        self.config = config
        self.spec = load_spec(config.model.path, config.model.native_resolution)
        stage_config = sharing_the_device(config, "encoder")
        self.encoder, self.decoder = load_encoder(stage_config), load_decoder(stage_config)
        self._status = tempfile.TemporaryDirectory()
        config = structs.replace(config, runtime_dir=self._status.name)
        write_priming_prompt(self.encoder.priming_prompt(), config.runtime_dir)
        self._catalogue = None
        if config.adapters.store:
            self._catalogue = AdapterStore(config).catalogue
            self._catalogue.scan(at_once=True)
        self.engine = load_engine(config, policy=policy)
        self.engine.start()

    def edit(self, edit: Edit, settings: dict[str, Any]) -> bytes:
        ready = self._prepare(edit, settings)
        job = job_of(self.encoder, ready.request, ready.pixels, ready.edit_mask)
        final = self.denoise(job)
        pixels = self.decoder.decode(final.latents)
        return finish_edit(pixels, ready.context)

    def denoise(self, job: EditJob) -> FinalEvent:
        finished_event, events = threading.Event(), list[EngineEvent]()

        def sink(event: EngineEvent) -> None:
            events.append(event)
            if isinstance(event, FinalEvent | Failed):
                finished_event.set()

        self.engine.submit(job, sink)
        finished_event.wait()
        last = events[-1]
        assert isinstance(last, FinalEvent), last
        return last

    def run(
        self, jobs: Sequence[EditJob], clock: Callable[[], float] = time.perf_counter
    ) -> list[list[float]]:
        """Run jobs together. Return for each job when its steps ended, if it asks for progress, and
        then when the job ended: seconds after all jobs were handed over.

        Args:
            jobs: the edits, all handed over at once.
            clock: measures the seconds.

        Raises:
            RuntimeError: an edit failed.
        """
        finished_jobs, failed = threading.Semaphore(0), list[Failed]()
        begin = clock()

        def submit(job: EditJob) -> list[float]:
            times: list[float] = []

            def sink(event: EngineEvent) -> None:
                if isinstance(event, ProgressEvent | FinalEvent):
                    times.append(clock() - begin)
                if isinstance(event, Failed):
                    failed.append(event)
                if isinstance(event, Failed | FinalEvent):
                    finished_jobs.release()

            self.engine.submit(job, sink)
            return times

        end_times = [submit(job) for job in jobs]
        for _ in jobs:
            finished_jobs.acquire()
        if failed:
            raise RuntimeError(str(failed[0].error))
        return end_times

    def jobs(self, edits: list[Edit], settings: dict[str, Any]) -> list[EditJob]:
        edit_jobs = []
        for edit in edits:
            ready = self._prepare(edit, settings)
            edit_jobs.append(job_of(self.encoder, ready.request, ready.pixels, ready.edit_mask))
        return edit_jobs

    def _prepare(self, edit: Edit, settings: dict[str, Any]) -> PreparedEdit:
        image, mask, prompt = edit
        edit_settings = parse_settings(json.dumps(settings).encode())
        kind = edit_kind(edit_settings, image=bool(image), mask=bool(mask))
        accepted = accept_edit(
            edit_settings, prompt.encode(), self.spec, self.config, self._catalogue, kind=kind
        )
        return prepare_edit(image, mask, accepted, self.spec, self.config)


def job_of(
    encoder: Encoder,
    request: EditRequest,
    pixels: NDArray[np.uint8],
    edit_mask: NDArray[np.uint8],
    references: Sequence[NDArray[np.uint8]] = (),
) -> EditJob:
    """Return the denoiser's job for a prepared edit, with the encoder's results for it."""
    negative = request.settings.negative_prompt
    encoded = encoder.encode(pixels, edit_mask, request.prompt, negative, references)
    return EditJob(
        request,
        edit_mask,
        encoded.moments,
        encoded.masked_moments,
        encoded.conditioning,
        encoded.negative,
        references=encoded.references,
    )


def request_of(
    pixels: NDArray[np.uint8], prompt: str, settings: EditSettings, seed: int, request_id: str
) -> EditRequest:
    """Return the checked request for a picture that already has the model's size."""
    digest = template_id(pixels)
    size = (pixels.shape[0], pixels.shape[1])
    return EditRequest(
        request_id=request_id,
        prompt=prompt,
        settings=settings,
        seed=seed,
        template_id=digest,
        source_size=size,
        model_size=size,
        accepted_ns=time.time_ns(),
        pixels_id=digest,
    )
