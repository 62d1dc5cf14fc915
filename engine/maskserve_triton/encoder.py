"""The encoder model: it encodes the prompts and pictures of edits, those of one call together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_common.contracts.request import EditRequest
from maskserve_engine.cache.priming_prompt import write_priming_prompt
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.stages.encoded import Encoded, EncodeReport, Origin
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.picture_encoder import EncodedPictures, PictureEncoder
from maskserve_triton.prompt_encoder import EncodedPrompts, PromptEncoder, SharedPrompts
from maskserve_triton.run_encodings import RunEncodings

R = TypeVar("R")

_ORIGINS: dict[bool | None, Origin | None] = {True: "kept", False: "made", None: None}


class EditEncoder:
    """The encoder of a worker. One thread encodes at a time; on a GPU a second one encodes prompts,
    on a stream of its own, beside the VAE.

    Args:
        encoder: encoder of the served model.
        config: configuration of the worker.
        texts_aside: whether a second thread encodes prompts; None: on a GPU.
        run_encodings: encodings of workflow runs; None: there are none.
    """

    def __init__(
        self,
        encoder: Encoder,
        config: Config,
        *,
        texts_aside: bool | None = None,
        run_encodings: RunEncodings | None = None,
    ) -> None:
        self.prompts = PromptEncoder(encoder, config, run_encodings)
        self.pictures = PictureEncoder(encoder, config, run_encodings)
        device = encoder.vae.device
        aside = device.type == "cuda" if texts_aside is None else texts_aside
        self._text_thread = _TextThread(device) if aside else None

    @classmethod
    def load(cls, config: Config, run_encodings: RunEncodings | None = None) -> EditEncoder:
        """Load the encoder of the folder in `[model] path`. Write the embedding of an empty prompt
        for the denoiser, which has no text encoders and primes with it.

        Args:
            config: configuration of the worker.
            run_encodings: encodings of workflow runs; None: there are none.

        Raises:
            ConfigError: a part cannot be loaded.
        """
        encoder = load_encoder(config)
        loaded = cls(encoder, config, run_encodings=run_encodings)
        priming_prompt = encoder.priming_prompt()
        if priming_prompt:
            loaded.prompts.keep_priming_prompt(priming_prompt)
        write_priming_prompt(priming_prompt, config.runtime_dir)
        return loaded

    def close(self) -> None:
        if self._text_thread is not None:
            self._text_thread.close()
        self.prompts.close()

    def encode(
        self,
        edit: EditRequest,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        controls: NDArray[np.uint8] | None = None,
    ) -> tuple[Encoded, EncodeReport]:
        """Encode one edit alone: `encode_all` of it, with its error raised."""
        [result] = self.encode_all([EncoderInput(edit, pixels, edit_mask, controls)])
        if isinstance(result, Exception):
            raise result
        return result

    def encode_all(
        self, edits: Sequence[EncoderInput]
    ) -> Iterator[tuple[Encoded, EncodeReport] | Exception]:
        """Encode the edits of one call; yield each as soon as it is done, in this order.

        Prompts that are not cached are computed in one call of the text encoders, and pictures of
        one size, masked ones and their sources, in one call of the VAE if that pays. Rounding
        depends on what shares a call, so `reproducible` edits share none. A failed edit yields its
        error:

            InvalidRequest: a LoRA's file does not fit.
            Overloaded: a LoRA's file has left the host since the edit was accepted.
        """
        begin = time.perf_counter()
        shared: SharedPrompts = {}
        share = self._aside(partial(self.prompts.share, edits, shared))
        texts = [self._aside(partial(self.prompts.encode, edit, shared)) for edit in edits]
        whole = self.pictures.whole_pictures(edits)
        share()
        shared_s = time.perf_counter() - begin
        for number, edit in enumerate(edits):
            begin = time.perf_counter()
            result: tuple[Encoded, EncodeReport] | Exception
            try:
                pictures = self.pictures.encode(number, edit, whole)
                controls = self.pictures.control_moments(edit.controls)
                text = texts[number]()
                prompt, negative = self.prompts.with_ip_picture(edit, text)
                encoded = Encoded(
                    pictures.moments,
                    pictures.masked,
                    prompt,
                    negative,
                    controls,
                    pictures.references,
                )
                ms = 1e3 * (shared_s + time.perf_counter() - begin)
                result = encoded, _report(ms, text, pictures)
            except Exception as error:
                result = error
            yield result

    def _aside(self, work: Callable[[], R]) -> Callable[[], R]:
        """Run `work` beside the VAE where the device has room for both, else when its result is
        requested.
        """
        return work if self._text_thread is None else self._text_thread.begin(work)


def _report(ms: float, text: EncodedPrompts, pictures: EncodedPictures) -> EncodeReport:
    return EncodeReport(
        ms=ms,
        prompt="kept" if text.from_cache else "made",
        template=_ORIGINS[pictures.from_cache],
        references=_ORIGINS[pictures.references_from_cache],
        masked="whole" if pictures.whole else "pieces",
        batch=max(text.batch, pictures.batch),
        tokens=text.tokens,
    )


class _TextThread:
    """A thread with its own stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "prompts")

    def begin(self, work: Callable[[], R]) -> Callable[[], R]:
        return self._thread.submit(self._run, work).result

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, work: Callable[[], R]) -> R:
        with torch.cuda.stream(self._stream):
            return work()
