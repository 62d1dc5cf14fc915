"""The encoder model: it reuses cached embeddings and moments, and encodes the edits of one call
together.

A prompt's embeddings and a template's moments depend on their keys alone, so cached ones equal new
ones. They are equal bit for bit if they were not computed in one call with others; `reproducible`
edits have separate ones. A Fill model's masked picture differs from its template
under the mask only; if the template is kept, it is encoded in pieces around the mask, nearly as if
whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_common.contracts.keys import scope_of, template_id
from maskserve_common.contracts.request import EditRequest
from maskserve_common.lru_cache import LruCache
from maskserve_engine.adapters.ip_adapter import IpAdapterEncoder
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.base.job import Conditioning
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT, write_priming_prompt
from maskserve_engine.families.encoder import Encoder, TemplateEncoding
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.fitting.memory import device_memory, encoded_at_once
from maskserve_engine.spec.ip_adapters import KnownIpAdapter
from maskserve_engine.stages.encoded import (
    NO_CONTROLS,
    NO_MOMENTS,
    Encoded,
    EncodeReport,
    Origin,
    TokensRead,
)
from maskserve_engine.stages.moments_folder import MomentsFolder
from maskserve_engine.stages.vae_batches import FULL, shares_calls, vae_batches
from maskserve_engine.stages.vae_pieces import Pieces, PixelBox
from maskserve_triton.run_encodings import RunEncodings, RunScope

log = logging.getLogger("maskserve")

R = TypeVar("R")

_COUNTED = 64
"""Prompts whose number of tokens is remembered."""
_ORIGINS: dict[bool | None, Origin | None] = {True: "kept", False: "made", None: None}
_WHOLE_FROM = 0.5
"""Share of a picture from which its pieces cost as much as the whole."""


class ToEncode(NamedTuple):
    """An edit and its pictures."""

    edit: EditRequest
    pixels: NDArray[np.uint8]
    """[H, W, 3] source at model resolution; [0, 0, 3] without one."""
    edit_mask: NDArray[np.uint8]
    """[H, W], above 127 = edit."""
    controls: NDArray[np.uint8] | None = None
    """[pictures, H, W, 3] control pictures; None: there are none."""
    run: str = ""
    """Workflow run that has its encoding, or will keep it; empty: none."""
    makes: bool = False
    """Whether the run keeps its encoding, and the edit ends with it."""
    references: NDArray[np.uint8] | None = None
    """Pixels of the further references, one after the other; None: there are none."""

    @property
    def run_scope(self) -> RunScope:
        return RunScope(scope_of(self.edit.request_id), self.run)

    @property
    def pixels_ids(self) -> list[str]:
        """Names of the encodings of the source and of the further references."""
        names = (self.edit.pixels_id, *(named.pixels_id for named in self.edit.references))
        return list(dict.fromkeys(filter(None, names)))

    @property
    def ip_picture(self) -> NDArray[np.uint8]:
        """RGB [side, side, 3] of the IP-Adapter's picture, behind the references."""
        named = self.edit.ip_picture
        assert named is not None
        assert self.references is not None, "REQUEST names a picture that is missing"
        height, width = named.size
        return self.references[-3 * height * width :].reshape(height, width, 3)

    @property
    def pictures(self) -> list[NDArray[np.uint8]]:
        """RGB [h, w, 3] of the source and of the further references; none without a source."""
        pictures = [self.pixels] if self.pixels.size else []
        begin = 0
        for height, width in self.edit.reference_sizes:
            assert self.references is not None, "REQUEST names references that are missing"
            end = begin + 3 * height * width
            pictures.append(self.references[begin:end].reshape(height, width, 3))
            begin = end
        return pictures


class PromptKey(NamedTuple):
    """Everything that a prompt's embeddings depend on."""

    model: str
    length: int
    """Tokens of a prompt: `[model] max_sequence_length`."""
    text: str
    negative: bool
    """Whether it is a negative prompt: an empty one may be zeros."""
    loras: tuple[tuple[str, float], ...]
    """File and scale of the LoRAs that change the text encoders, in the order of their addition."""
    picture: str = ""
    """Digests of the pixels of source and references, if the text encoder sees them."""
    owner: str | None = None
    """Scope of the API key with separately cached prompts; None: they are shared."""
    alone: bool = False
    """Whether it must be computed by itself: a `reproducible` edit's."""


class PictureKey(NamedTuple):
    """Everything that the arrays depend on which an IP-Adapter adds to an edit's prompts."""

    file: KnownIpAdapter
    picture: str
    """Digest of the picture's pixels."""
    owner: str | None
    """As in `PromptKey`."""


class _Prompts(NamedTuple):
    """Encoded prompts of an edit."""

    prompt: Conditioning
    negative: Conditioning | None
    from_cache: bool
    """Whether all came from the cache."""
    batch: int
    """Prompts in the call of the text encoders."""
    tokens: dict[str, dict[str, TokensRead]]
    """Return how much of each prompt is read. It is counted on the thread that encodes prompts: a
    tokenizer keeps the padding of a call as its state, so two threads would change each other's.
    """


class _Pictures(NamedTuple):
    """Encoded pictures of an edit."""

    moments: NDArray[np.float32]
    masked: NDArray[np.float32]
    from_cache: bool | None
    """Whether the template's moments came from the cache; None: there is no template."""
    whole: bool
    """Whether the masked picture was encoded whole."""
    batch: int
    """Masked pictures in the call of the VAE."""
    references: tuple[NDArray[np.float32], ...] = ()
    """Moments of the further references."""
    references_from_cache: bool | None = None
    """Whether all of these came from the cache; None: there are none."""


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
        self._run_encodings = run_encodings
        self._encoder, self._model = encoder, config.model
        device = encoder.vae.device
        self._device = device.type
        self._shares_calls = shares_calls(config.stages, self._device)
        self._most_pixels = FULL
        if self._shares_calls:
            total, _ = device_memory(device)
            pictures = encoded_at_once(config, encoder.spec, device.type, total)
            self._most_pixels = max(FULL, pictures * encoder.spec.native_resolution**2)
        aside = device.type == "cuda" if texts_aside is None else texts_aside
        self._texts = _Aside(device) if aside else None
        self._adapters = TextAdapters(config, encoder.text_models)
        self._stages = stages = config.stages
        self._prompts: LruCache[PromptKey, Conditioning] = LruCache(stages.prompt_bytes, _nbytes)
        self._ip_pictures: LruCache[PictureKey, tuple[Conditioning, Conditioning]] = LruCache(
            stages.prompt_bytes, lambda arrays: sum(map(_nbytes, arrays))
        )
        served = config.ip_adapters.folder and encoder.spec.ip_adapters
        self._ip_adapters = IpAdapterEncoder(config, encoder.spec) if served else None
        self._templates: LruCache[str, TemplateEncoding] = LruCache(
            stages.template_bytes,
            lambda encoding: encoding.nbytes,
            on_evict=lambda pixels_id, encoding: self._for_decoder.drop(pixels_id),
        )
        self._read = lru_cache(_COUNTED)(self._read_of)
        self._for_decoder = MomentsFolder(config.runtime_dir)
        self._for_decoder.clear()

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
        loaded = cls(load_encoder(config), config, run_encodings=run_encodings)
        empty = loaded._encoder.priming_prompt()
        if empty:
            loaded._keep(loaded._key(PRIMING_PROMPT), empty)
        write_priming_prompt(empty, config.runtime_dir)
        return loaded

    def close(self) -> None:
        if self._texts is not None:
            self._texts.close()
        self._adapters.close()

    def encode(
        self,
        edit: EditRequest,
        pixels: NDArray[np.uint8],
        edit_mask: NDArray[np.uint8],
        controls: NDArray[np.uint8] | None = None,
    ) -> tuple[Encoded, EncodeReport]:
        """Encode one edit alone: `encode_all` of it, with its error raised."""
        [result] = self.encode_all([ToEncode(edit, pixels, edit_mask, controls)])
        if isinstance(result, Exception):
            raise result
        return result

    def encode_all(
        self, edits: Sequence[ToEncode]
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
        for edit_input in edits:
            self._take_from_run(edit_input)
        shared: dict[PromptKey, tuple[Conditioning, int]] = {}
        share = self._aside(lambda: self._share_prompts(edits, shared))
        prompts = [
            self._aside(partial(self._prompts_of, edit_input, shared)) for edit_input in edits
        ]
        whole = _WholePictures(self._encoder, edits, self._sharing(edits), self._most_pixels)
        share()
        shared_s = time.perf_counter() - begin
        for number, edit_input in enumerate(edits):
            begin = time.perf_counter()
            result: tuple[Encoded, EncodeReport] | Exception
            try:
                pictures = self._pictures(number, edit_input, whole)
                controls = self._control_moments(edit_input.controls)
                text = prompts[number]()
                prompt, negative = self._with_picture(edit_input, text)
                encoded = Encoded(
                    pictures.moments,
                    pictures.masked,
                    prompt,
                    negative,
                    controls,
                    pictures.references,
                )
                report = EncodeReport(
                    ms=1e3 * (shared_s + time.perf_counter() - begin),
                    prompt="kept" if text.from_cache else "made",
                    template=_ORIGINS[pictures.from_cache],
                    references=_ORIGINS[pictures.references_from_cache],
                    masked="whole" if pictures.whole else "pieces",
                    batch=max(text.batch, pictures.batch),
                    tokens=text.tokens,
                )
                result = encoded, report
                self._keep_for_run(edit_input)
            except Exception as error:
                result = error
            yield result

    def _read_of(self, text: str) -> dict[str, TokensRead]:
        encoders = self._encoder.text_encoders.items()
        return {name: encoder.read_of(text) for name, encoder in encoders}

    # Encodings of workflow runs

    def _take_from_run(self, request: ToEncode) -> None:
        """Bring what the edit's run has of its encoding into the caches."""
        encodings, run = self._run_encodings, request.run_scope
        if encodings is None or not request.run:
            return
        for key in self._keys(request):
            if key in self._prompts:
                continue
            if (embeddings := encodings.prompt(key, run)) is not None:
                self._prompts.put(key, embeddings)
        for name in request.pixels_ids:
            if self._templates.get(name) is None:
                template = encodings.template(name, run)
                if template is not None:
                    self._keep_template(name, template)

    def _keep_for_run(self, request: ToEncode) -> None:
        """Keep the edit's encoding for its run, if it is to make it."""
        encodings, run = self._run_encodings, request.run_scope
        if encodings is None or not request.makes:
            return
        for key in self._keys(request):
            if (embeddings := self._prompts.get(key)) is not None:
                encodings.keep_prompt(key, embeddings, run)
        for name in request.pixels_ids:
            if (template := self._templates.get(name)) is not None:
                encodings.keep_template(name, template, run)

    # Prompts. On a GPU, all in a thread of their own.

    def _aside(self, work: Callable[[], R]) -> Callable[[], R]:
        """Run `work` beside the VAE where the device has room for both, else when its result is
        requested.
        """
        return work if self._texts is None else self._texts.begin(work)

    def _tokens(self, edit: EditRequest) -> dict[str, dict[str, TokensRead]]:
        texts = {"prompt": edit.prompt, "negative_prompt": edit.settings.negative_prompt}
        return {name: self._read(text) for name, text in texts.items() if text is not None}

    def _keys(self, request: ToEncode) -> list[PromptKey]:
        """Return the keys of the prompt and, where there is one, of the negative prompt."""
        edit, settings, picture = request.edit, request.edit.settings, ""
        if self._encoder.spec.encoder_picture and request.pixels.size:
            source = edit.pixels_id or template_id(request.pixels)
            picture = " ".join((source, *(reference.pixels_id for reference in edit.references)))
        loras = tuple((lora.version, lora.scale) for lora in edit.loras if lora.text and lora.scale)
        keys = [self._key(edit.prompt, loras)]
        if settings.negative_prompt is not None:
            keys.append(self._key(settings.negative_prompt, loras, negative=True))
        owner = scope_of(edit.request_id) if settings.private_prompt else None
        return [
            key._replace(picture=picture, owner=owner, alone=settings.reproducible) for key in keys
        ]

    def _key(
        self, text: str, loras: tuple[tuple[str, float], ...] = (), *, negative: bool = False
    ) -> PromptKey:
        return PromptKey(self._model.path, self._model.max_sequence_length, text, negative, loras)

    def _share_prompts(
        self, edits: Sequence[ToEncode], shared: dict[PromptKey, tuple[Conditioning, int]]
    ) -> None:
        """Compute what several edits want of the text encoders in one call, and put it into
        `shared`, with the number of prompts in it. A lone edit's prompt and negative prompt go one
        by one, as in diffusers' pipelines: then the bits do not depend on the load.
        """
        if len(edits) < 2 or self._encoder.spec.encoder_picture:
            return
        required_keys = dict.fromkeys(
            key
            for edit_input in edits
            for key in self._keys(edit_input)
            if not key.loras and not key.alone and key not in self._prompts
        )
        texts = list(dict.fromkeys(key.text for key in required_keys))
        if len(texts) < 2:
            return
        try:
            encoded = dict(zip(texts, self._encoder.encode_prompts(texts), strict=True))
        except Exception:
            log.exception("%d prompts were not encoded together; each goes alone", len(texts))
            return
        for key in required_keys:
            shared[key] = self._keep(key, encoded[key.text]), len(texts)

    def _prompts_of(
        self, request: ToEncode, shared: dict[PromptKey, tuple[Conditioning, int]]
    ) -> _Prompts:
        edit, keys = request.edit, self._keys(request)
        embeddings = {key: shared[key][0] for key in keys if key in shared}
        batch = max((shared[key][1] for key in embeddings), default=1)
        cached = {
            key: embedding for key in keys if (embedding := self._prompts.get(key)) is not None
        }
        missing = [key for key in keys if key not in cached and key not in embeddings]
        is_computed = bool(missing or embeddings)
        if missing:
            pictures = request.pictures
            with self._adapters.applied(edit.loras):
                embeddings |= {key: self._embeddings(key, pictures) for key in missing}
        embeddings = cached | embeddings
        negative = embeddings[keys[1]] if len(keys) == 2 else None
        return _Prompts(embeddings[keys[0]], negative, not is_computed, batch, self._tokens(edit))

    def _embeddings(self, key: PromptKey, pictures: Sequence[NDArray[np.uint8]]) -> Conditioning:
        """Compute a prompt's embeddings by itself. The caller applies the key's LoRAs."""
        return self._keep(key, self._encoder.encode_prompt(key.text, pictures))

    def _keep(self, key: PromptKey, encoded: Conditioning) -> Conditioning:
        if key.negative:
            encoded = self._encoder.as_negative(key.text, encoded)
        self._prompts.put(key, encoded)
        return encoded

    def _with_picture(
        self, request: ToEncode, text: _Prompts
    ) -> tuple[Conditioning, Conditioning | None]:
        """Return an edit's prompts, with the arrays that its IP-Adapter adds."""
        edit = request.edit
        adapter, picture = edit.ip_adapter, edit.ip_picture
        if adapter is None or picture is None or not adapter.scale:
            return text.prompt, text.negative
        assert self._ip_adapters is not None, "the front refuses IP-Adapters"
        owner = scope_of(edit.request_id) if edit.settings.private_prompt else None
        key = PictureKey(self._ip_adapters.find(adapter), picture.pixels_id, owner)
        arrays = self._ip_pictures.get(key)
        if arrays is None:
            arrays = self._ip_adapters.encode(key.file, request.ip_picture)
            self._ip_pictures.put(key, arrays)
        negative = None if text.negative is None else text.negative | arrays[1]
        return text.prompt | arrays[0], negative

    # Pictures

    def _pictures(self, number: int, request: ToEncode, whole: _WholePictures) -> _Pictures:
        if request.edit.kind == "generate":
            return _Pictures(self._encoder.no_moments(request.edit_mask), NO_MOMENTS, None, True, 1)
        template, is_cached = self._template(
            request.edit.pixels_id,
            partial(whole.source, number),
            alone=request.edit.settings.reproducible,
        )
        if not self._encoder.spec.semantics.masked_picture:
            further = zip(request.edit.references, request.pictures[1:], strict=True)
            encoded = [
                self._template(named.pixels_id, partial(self._encoder.template, pixels))
                for named, pixels in further
            ]
            references = tuple([encoding.moments for encoding, _ in encoded])
            are_cached = all(from_cache for _, from_cache in encoded) if encoded else None
            return _Pictures(
                template.moments, NO_MOMENTS, is_cached, True, 1, references, are_cached
            )
        if not request.edit_mask.any():  # a template that is primed
            return _Pictures(template.moments, template.moments, is_cached, True, 1)
        pieces = self._pieces(request.edit, template) if is_cached and number not in whole else None
        if pieces is None:
            moments, batch = whole.masked(number)
            return _Pictures(template.moments, moments, is_cached, True, batch)
        moments = self._encoder.masked_pieces(request.pixels, request.edit_mask, pieces, template)
        return _Pictures(template.moments, moments, is_cached, False, 1)

    def _sharing(self, edits: Sequence[ToEncode]) -> dict[int, bool]:
        """Return the edits whose masked pictures may share a call, since none is known to go in
        pieces, and whether their sources do, too: those that are not cached, once each.
        """
        if not self._shares_calls or not self._encoder.spec.semantics.masked_picture:
            return {}
        sharing: dict[int, bool] = {}
        sources = set[str]()
        for number, request in enumerate(edits):
            edit, edit_mask = request.edit, request.edit_mask
            template = self._templates.get(edit.pixels_id) if edit.pixels_id else None
            in_pieces = template is not None and self._pieces(edit, template) is not None
            if edit_mask.any() and not in_pieces and not edit.settings.reproducible:
                # What a run shares is encoded as by any other worker of the host.
                has_new = template is None and not request.run and edit.pixels_id not in sources
                sharing[number] = has_new
                sources.add(edit.pixels_id)
        return sharing

    def _template(
        self, pixels_id: str, encode: Callable[[], TemplateEncoding], *, alone: bool = False
    ) -> tuple[TemplateEncoding, bool]:
        """Return a picture's encoding, and whether it came from the cache.

        Args:
            pixels_id: names the encoding; empty: it is not cached.
            encode: encodes the picture.
            alone: whether its call must have no other picture.
        """
        cached = self._templates.get(pixels_id) if pixels_id else None
        if cached is not None and (cached.alone or not alone):
            return cached, True
        encoding = encode()
        if pixels_id:
            self._keep_template(pixels_id, encoding)
        return encoding, False

    def _keep_template(self, pixels_id: str, encoding: TemplateEncoding) -> None:
        self._for_decoder.write(pixels_id, encoding.moments)
        self._templates.put(pixels_id, encoding)

    def _pieces(self, edit: EditRequest, template: TemplateEncoding) -> Pieces | None:
        """Return the pieces in which to encode the masked picture; None: encode it whole."""
        exact = edit.settings.reproducible or edit.settings.cache == "off"
        halo = self._stages.encode_halo
        if exact or not halo or not edit.edit_boxes or template.sums is None:
            return None
        factor = self._encoder.spec.vae_scale_factor
        boxes = [PixelBox(*box).shrunk(factor) for box in edit.edit_boxes]
        _, height, width = template.moments.shape
        pieces = self._encoder.pieces(boxes, (height, width), halo)
        return pieces if pieces.pay(_WHOLE_FROM, factor, self._device) else None

    def _control_moments(self, controls: NDArray[np.uint8] | None) -> NDArray[np.float32]:
        """Encode control pictures, [pictures, 2C, h, w], for ControlNets that read latents."""
        takes = self._encoder.spec.control
        if takes is None or not takes.latents or controls is None or not len(controls):
            return NO_CONTROLS
        return np.stack([self._encoder.moments(picture) for picture in controls])


class _Picture(NamedTuple):
    number: int
    """Number of the edit."""
    masked: bool
    """Whether it is the masked picture, not the source."""


class _WholePictures:
    """Sources and masked pictures that are encoded as a whole; those that share a call are encoded
    when the first is requested.

    Args:
        encoder: encoder of the model.
        edits: edits of one call.
        sharing: edits whose masked pictures may share a call of the VAE, and whether their sources
            do, too.
        most: maximum pixels of a call.
    """

    def __init__(
        self,
        encoder: Encoder,
        edits: Sequence[ToEncode],
        sharing: Mapping[int, bool],
        most: int,
    ) -> None:
        self._encoder, self._edits = encoder, edits
        sizes: dict[_Picture, tuple[int, int]] = {}
        for number, has_source in sharing.items():
            height, width = edits[number].edit_mask.shape
            names = [_Picture(number, False)] * has_source + [_Picture(number, True)]
            sizes |= dict.fromkeys(names, (height, width))
        self._batches = vae_batches(sizes, most)
        self._sources: dict[int, TemplateEncoding] = {}
        self._masked: dict[int, tuple[NDArray[np.float32], int]] = {}

    def __contains__(self, number: int) -> bool:
        return _Picture(number, True) in self._batches

    def source(self, number: int) -> TemplateEncoding:
        if number not in self._sources:
            self._encode(_Picture(number, False))
        return self._sources.pop(number)

    def masked(self, number: int) -> tuple[NDArray[np.float32], int]:
        """Return an edit's moments, and the number of masked pictures in the same call."""
        if number not in self._masked:
            self._encode(_Picture(number, True))
        return self._masked.pop(number)

    def _encode(self, picture: _Picture) -> None:
        """Encode a picture, with those of its call or, if that fails, alone."""
        batch = self._batches.get(picture, (picture,))
        if len(batch) > 1:
            try:
                self._encode_together(batch)
            except Exception:
                log.exception("%d pictures were not encoded together; each goes alone", len(batch))
                self._batches |= {member: (member,) for member in batch}
            else:
                return
        edit = self._edits[picture.number]
        if picture.masked:
            [moments] = self._encoder.all_masked_moments([(edit.pixels, edit.edit_mask)])
            self._masked[picture.number] = moments, 1
        else:
            self._sources[picture.number] = self._encoder.template(edit.pixels)

    def _encode_together(self, batch: Sequence[_Picture]) -> None:
        sources = [member.number for member in batch if not member.masked]
        masked = [member.number for member in batch if member.masked]
        templates, moments = self._encoder.encode_pictures(
            [self._edits[number].pixels for number in sources],
            [(self._edits[number].pixels, self._edits[number].edit_mask) for number in masked],
        )
        self._sources |= zip(sources, templates, strict=True)
        self._masked |= {
            number: (m, len(masked)) for number, m in zip(masked, moments, strict=True)
        }


class _Aside:
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


def _nbytes(encoded: Conditioning) -> int:
    return sum(array.nbytes for array in encoded.values())
