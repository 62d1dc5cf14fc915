"""Prompts of edits: embeddings are cached by all that they depend on.

A prompt's embeddings depend on its key alone, so cached ones equal new ones. They are equal bit for
bit if they were not computed in one call with others; `reproducible` edits have separate ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from maskserve_common.config import Config
from maskserve_common.contracts.keys import scope_of, template_id
from maskserve_common.contracts.request import EditRequest
from maskserve_common.lru_cache import LruCache
from maskserve_engine.adapters.ip_adapter import IpAdapterEncoder
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.base.job import Conditioning
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.spec.ip_adapters import KnownIpAdapter
from maskserve_engine.stages.encoded import TokensRead
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.run_encodings import RunEncodings

_log = logging.getLogger("maskserve")

_MOST_COUNTED: Final = 64
"""Prompts whose number of tokens is remembered."""


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


class IpPictureKey(NamedTuple):
    """Everything that the arrays depend on which an IP-Adapter adds to an edit's prompts."""

    file: KnownIpAdapter
    picture: str
    """Digest of the picture's pixels."""
    owner: str | None
    """As in `PromptKey`."""


class EncodedPrompts(NamedTuple):
    """Encoded prompts of an edit."""

    prompt: Conditioning
    negative: Conditioning | None
    from_cache: bool
    """Whether all came from the cache."""
    batch: int
    """Prompts in the call of the text encoders."""
    tokens: dict[str, dict[str, TokensRead]]
    """How much of each prompt is read. It is counted on the thread that encodes prompts: a
    tokenizer keeps the padding of a call as its state, so two threads would change each other's.
    """


SharedPrompts: TypeAlias = dict[PromptKey, tuple[Conditioning, int]]
"""Embeddings computed in one call of the text encoders, with the number of prompts in it."""


class PromptEncoder:
    """Encodes prompts with the text encoders of a model. One thread calls `share` and `encode`.

    Args:
        encoder: encoder of the served model.
        config: configuration of the worker.
        run_encodings: encodings of workflow runs; None: there are none.
    """

    def __init__(
        self, encoder: Encoder, config: Config, run_encodings: RunEncodings | None
    ) -> None:
        self._run_encodings = run_encodings
        self._encoder, self._model = encoder, config.model
        self._adapters = TextAdapters(config, encoder.text_models)
        budget = config.stages.prompt_bytes
        self._cache: LruCache[PromptKey, Conditioning] = LruCache(budget, _nbytes)
        self._ip_pictures: LruCache[IpPictureKey, tuple[Conditioning, Conditioning]] = LruCache(
            budget, lambda arrays: sum(map(_nbytes, arrays))
        )
        served = config.ip_adapters.folder and encoder.spec.ip_adapters
        self._ip_adapters = IpAdapterEncoder(config, encoder.spec) if served else None
        self._tokens_read = lru_cache(_MOST_COUNTED)(self._count_tokens)

    def close(self) -> None:
        self._adapters.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the cached embeddings."""
        return self._cache.nbytes

    def share(self, edits: Sequence[EncoderInput], shared: SharedPrompts) -> None:
        """Compute the prompts of several edits that are not cached in one call of the text
        encoders, and put them into `shared`.

        A lone edit's prompt and negative prompt go one by one, as in diffusers' pipelines: then the
        bits do not depend on the load.
        """
        for edit_input in edits:
            self._read_run(edit_input)
        if len(edits) < 2 or self._encoder.spec.encoder_picture:
            return
        missing = dict.fromkeys(
            key
            for edit_input in edits
            for key in self._keys(edit_input)
            if not key.loras and not key.alone and key not in self._cache
        )
        texts = list(dict.fromkeys(key.text for key in missing))
        if len(texts) < 2:
            return
        try:
            encoded = dict(zip(texts, self._encoder.encode_prompts(texts), strict=True))
        except Exception:
            _log.exception("%d prompts were not encoded together; each goes alone", len(texts))
            return
        for key in missing:
            shared[key] = self._keep(key, encoded[key.text]), len(texts)

    def encode(self, edit_input: EncoderInput, shared: SharedPrompts) -> EncodedPrompts:
        """Return an edit's prompts: shared, cached, or computed now."""
        edit, keys = edit_input.edit, self._keys(edit_input)
        new = {key: shared[key][0] for key in keys if key in shared}
        batch = max((shared[key][1] for key in new), default=1)
        cached = {key: embeds for key in keys if (embeds := self._cache.get(key)) is not None}
        if missing := [key for key in keys if key not in cached and key not in new]:
            pictures = edit_input.pictures
            with self._adapters.applied(edit.loras):
                for key in missing:
                    new[key] = self._keep(key, self._encoder.encode_prompt(key.text, pictures))
        embeddings = cached | new
        self._write_run(edit_input, embeddings)
        negative = embeddings[keys[1]] if len(keys) == 2 else None
        return EncodedPrompts(embeddings[keys[0]], negative, not new, batch, self._tokens(edit))

    def with_ip_picture(
        self, edit_input: EncoderInput, text: EncodedPrompts
    ) -> tuple[Conditioning, Conditioning | None]:
        """Return an edit's prompts, with the arrays that its IP-Adapter adds."""
        edit = edit_input.edit
        adapter, picture = edit.ip_adapter, edit.ip_picture
        if adapter is None or picture is None or not adapter.scale:
            return text.prompt, text.negative
        assert self._ip_adapters is not None, "the front refuses IP-Adapters"
        owner = scope_of(edit.request_id) if edit.settings.private_prompt else None
        key = IpPictureKey(self._ip_adapters.find(adapter), picture.pixels_id, owner)
        arrays = self._ip_pictures.get(key)
        if arrays is None:
            arrays = self._ip_adapters.encode(key.file, edit_input.ip_picture)
            self._ip_pictures.put(key, arrays)
        negative = None if text.negative is None else text.negative | arrays[1]
        return text.prompt | arrays[0], negative

    def keep_priming_prompt(self, embeddings: Conditioning) -> None:
        self._keep(self._key(PRIMING_PROMPT), embeddings)

    def _keep(self, key: PromptKey, embeddings: Conditioning) -> Conditioning:
        if key.negative:
            embeddings = self._encoder.as_negative(key.text, embeddings)
        self._cache.put(key, embeddings)
        return embeddings

    def _keys(self, edit_input: EncoderInput) -> list[PromptKey]:
        """Return the keys of the prompt and, where there is one, of the negative prompt."""
        edit, settings, picture = edit_input.edit, edit_input.edit.settings, ""
        if self._encoder.spec.encoder_picture and edit_input.pixels.size:
            source = edit.pixels_id or template_id(edit_input.pixels)
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

    def _read_run(self, edit_input: EncoderInput) -> None:
        """Bring what the edit's run has of its prompts into the cache."""
        if self._run_encodings is None or not edit_input.run:
            return
        for key in self._keys(edit_input):
            if key not in self._cache:
                embeddings = self._run_encodings.prompt(key, edit_input.run_scope)
                if embeddings is not None:
                    self._cache.put(key, embeddings)

    def _write_run(
        self, edit_input: EncoderInput, embeddings: Mapping[PromptKey, Conditioning]
    ) -> None:
        """Keep an edit's prompts for its run, if the edit makes them."""
        if self._run_encodings is not None and edit_input.makes:
            for key, encoded in embeddings.items():
                self._run_encodings.keep_prompt(key, encoded, edit_input.run_scope)

    def _tokens(self, edit: EditRequest) -> dict[str, dict[str, TokensRead]]:
        texts = {"prompt": edit.prompt, "negative_prompt": edit.settings.negative_prompt}
        return {name: self._tokens_read(text) for name, text in texts.items() if text is not None}

    def _count_tokens(self, text: str) -> dict[str, TokensRead]:
        encoders = self._encoder.text_encoders.items()
        return {name: encoder.read_of(text) for name, encoder in encoders}


def _nbytes(encoded: Conditioning) -> int:
    return sum(array.nbytes for array in encoded.values())
