"""The models `encoder` and `decoder`, of a worker or of a stage service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_common.config import Config, sharing_the_device
from maskserve_common.contracts.meta import with_timing
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.postprocess_context import NOTHING
from maskserve_common.contracts.request import EditRequest
from maskserve_common.files.stages import PRIMING_PROMPT_FILE
from maskserve_common.files.values import ENCODING, MAKE, RUN, Values
from maskserve_common.tracing import make_tracer
from maskserve_engine.families.registry import load_decoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages.encoded import (
    NO_CONTROLS,
    NO_MOMENTS,
    pack_conditioning,
    pack_references,
)
from maskserve_engine.stages.revision import stages_revision
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_triton.batched_requests import BatchedRequests, view_item
from maskserve_triton.decoder import EditDecoder, ToDecode
from maskserve_triton.encoder import EditEncoder
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.run_encodings import RunEncodings
from maskserve_triton.stage_requests import NO_PIXELS, PRIMING_PROMPT, check_revision
from maskserve_triton.tensor_io import Outputs, failed_event, read_bytes


class EncoderStage:
    """Makes VAE moments of the source and embeddings of the prompt.

    Raises:
        ConfigError: a part cannot be loaded.
    """

    def __init__(self, api: Any, config: Config) -> None:
        hide_unused_libraries(config)
        self._api, self._config = api, config
        self._tracer = make_tracer(config, "encoder")
        self._revision = cache(lambda: stages_revision(config))
        encodings = RunEncodings(Values(config.values), self._revision)
        self._encoder = EditEncoder.load(sharing_the_device(config, "encoder"), encodings)
        self._requests = BatchedRequests(api, self._tracer, "encode", self._read, self._encode)

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def close(self) -> None:
        self._encoder.close()
        self._tracer.close()

    def _read(self, request: Any) -> EncoderInput | None:
        """Read a request's edit; None: it requests the priming prompt."""
        check_revision(request, self._revision)
        edit = read_bytes(self._api, request, "REQUEST")
        if edit == PRIMING_PROMPT:
            return None
        request_parameters = parameters(request)
        return EncoderInput(
            EditRequest.from_json(edit),
            view_item(self._api, request, "PIXELS", np.uint8, ndim=3),
            view_item(self._api, request, "EDIT_MASK", np.uint8, ndim=2),
            view_item(self._api, request, "CONTROLS", np.uint8, ndim=4),
            str(request_parameters.get(RUN, "")) if ENCODING in request_parameters else "",
            request_parameters.get(ENCODING) == MAKE,
            view_item(self._api, request, "REFERENCES", np.uint8, ndim=1),
        )

    def _encode(self, requests: Sequence[EncoderInput | None]) -> Iterator[Outputs | Exception]:
        encoded = self._encoder.encode_all([edit for edit in requests if edit is not None])
        for edit in requests:
            outcome = self._priming_prompt() if edit is None else next(encoded)
            if isinstance(outcome, dict | Exception):
                yield outcome
                continue
            encoding, report = outcome
            yield {
                "MOMENTS": encoding.moments,
                "MASKED_MOMENTS": encoding.masked_moments,
                "REFERENCE_MOMENTS": pack_references(encoding.references),
                "CONTROL_MOMENTS": encoding.control_moments,
                "CONDITIONING": pack_conditioning(encoding.conditioning, encoding.negative),
                "ENCODED": report.to_json(),
            }

    def _priming_prompt(self) -> Outputs:
        file = Path(self._config.runtime_dir) / PRIMING_PROMPT_FILE
        return {
            "MOMENTS": NO_MOMENTS,
            "MASKED_MOMENTS": NO_MOMENTS,
            "REFERENCE_MOMENTS": pack_references(()),
            "CONTROL_MOMENTS": NO_CONTROLS,
            "CONDITIONING": np.frombuffer(file.read_bytes(), np.uint8),
            "ENCODED": b"{}",
        }


class DecoderStage:
    """Decodes latents to pixels; events without latents pass through.

    Raises:
        ConfigError: a part cannot be loaded.
    """

    def __init__(self, api: Any, config: Config) -> None:
        hide_unused_libraries(config, text=False)
        config = sharing_the_device(config, "decoder")
        spec = load_spec(config.model.path, config.model.native_resolution)
        self._api = api
        self._decoder = EditDecoder(load_decoder(config), spec, config)
        self._tracer = make_tracer(config, "decoder")
        self._revision = cache(lambda: stages_revision(config))
        self._requests = BatchedRequests(
            api, self._tracer, "decode", self._read, self._decode, self._failed, output="PIXELS"
        )

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def close(self) -> None:
        self._tracer.close()

    def _read(self, request: Any) -> ToDecode:
        check_revision(request, self._revision)
        return ToDecode(
            view_item(self._api, request, "LATENTS", np.float32, ndim=3),
            read_bytes(self._api, request, "META"),
            view_item(self._api, request, "CONTEXT", np.uint8, ndim=1),
        )

    def _decode(self, events: Sequence[ToDecode]) -> Iterator[Outputs | Exception]:
        decoded = self._decoder.decode_all([event for event in events if event.latents.size])
        for event in events:
            start = time.perf_counter()
            outcome = next(decoded) if event.latents.size else (NO_PIXELS, event.meta)
            if isinstance(outcome, Exception):
                yield outcome
                continue
            pixels, meta = outcome
            taken_ms = (time.perf_counter() - start) * 1e3
            yield {
                "PIXELS": pixels,
                "META": with_timing(meta, "decode", taken_ms),
                "CONTEXT": event.context,
            }

    def _failed(self, request: Any, error: Exception) -> Outputs:
        meta = failed_event(read_bytes(self._api, request, "META"), error)
        return {"PIXELS": NO_PIXELS, "META": meta, "CONTEXT": NOTHING}
