"""The parts of a worker in one process, one after the other: what serving is held against."""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.facts import load_facts
from maskserve_core.postprocess import finish_edit
from maskserve_core.preprocess import PreparedEdit, prepare_edit
from maskserve_core.request import EditRequest
from maskserve_engine.decode import Decoder
from maskserve_engine.encode import Encoded, Encoder
from maskserve_engine.engine import Engine
from maskserve_engine.job import EditJob, EngineEvent, Failed, Final

Edit = tuple[bytes, bytes, str]
"""Encoded image, encoded mask, prompt."""


class Direct:
    """The parts of a worker in this process, called one after the other."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.facts = load_facts(config.model.path)
        self.encoder, self.decoder = Encoder.load(config), Decoder.load(config)
        self._status = tempfile.TemporaryDirectory()
        self.engine = Engine.load(replace(config, runtime_dir=self._status.name))
        self.engine.start()
        self.beside = beside_denoiser(config).model.torch_threads
        self.threads = config.model.torch_threads
        self.engine.ask(lambda: torch.set_num_threads(self.threads)).result()

    def edit(self, edit: Edit, settings: dict[str, Any]) -> bytes:
        image, mask, prompt = edit
        ready = prepare_edit(
            image, mask, prompt.encode(), json.dumps(settings).encode(), self.facts, self.config
        )
        # Each part has the threads that it has in a worker. OpenMP counts them per calling thread,
        # MKL per process, so the count is set before every part.
        torch.set_num_threads(self.beside)
        encoded = self._encode(ready)
        torch.set_num_threads(self.threads)
        final = self.denoise(job_of(ready.request, ready.edit_mask, encoded))
        torch.set_num_threads(self.beside)
        pixels = self.decoder.decode(final.latents)
        return finish_edit(pixels, ready.source, ready.paste, ready.request)

    def _encode(self, ready: PreparedEdit) -> Encoded:
        edit = ready.request
        return self.encoder.encode(
            ready.pixels, ready.edit_mask, edit.prompt, edit.settings.negative_prompt
        )

    def denoise(self, job: EditJob) -> Final:
        done, events = threading.Event(), list[EngineEvent]()

        def sink(event: EngineEvent) -> None:
            events.append(event)
            if isinstance(event, Final | Failed):
                done.set()

        self.engine.submit(job, sink)
        done.wait()
        last = events[-1]
        assert isinstance(last, Final), last
        return last

    def jobs(self, edits: list[Edit], settings: dict[str, Any]) -> list[EditJob]:
        made = []
        for image, mask, prompt in edits:
            raw = json.dumps(settings).encode()
            ready = prepare_edit(image, mask, prompt.encode(), raw, self.facts, self.config)
            encoded = self._encode(ready)
            made.append(job_of(ready.request, ready.edit_mask, encoded))
        return made


def job_of(request: EditRequest, edit_mask: NDArray[np.uint8], encoded: Encoded) -> EditJob:
    """What the denoiser makes of its inputs: a prepared edit and what the encoder gave for it."""
    return EditJob(
        request,
        edit_mask,
        encoded.moments,
        encoded.masked_moments,
        encoded.text,
        encoded.negative,
    )
