"""A transformer of true width with random weights, and synthetic rows and entries for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.published_models import (
    KLEIN_4B,
    KLEIN_9B,
    QWEN_21,
    QWEN_2511,
    QWEN_EDIT_SHOWN,
    QWEN_IMAGE,
    QWEN_PLUS_SHOWN,
    Z_IMAGE,
)
from maskserve_benchmarks.steps.replay import WithoutLookahead, in_memory
from maskserve_common.config import CacheConfig
from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import StepCache, StepCacheReader
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.cache.loader import Selection
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.flux2.adapter import ids_of
from maskserve_engine.families.flux2.weights import places_of as flux2_places
from maskserve_engine.families.flux2.weights import weights_of as flux2_weights
from maskserve_engine.families.mmdit.batch import FlowBatch
from maskserve_engine.families.mmdit.blocks import LEAST_PRECOMPUTED_STEPS, FluxStep
from maskserve_engine.families.mmdit.preparation import FlowTemplate
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow, PromptPass
from maskserve_engine.families.mmdit.schedule import Schedule, Walk
from maskserve_engine.families.mmdit.spans import (
    ExtrapolatedLatents,
    ImageSpans,
    MaskedTokens,
    References,
    TokenSpan,
)
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.mmdit.weights import places_of as flux_places
from maskserve_engine.families.qwen_image.adapter import QwenImageBatch
from maskserve_engine.families.qwen_image.weights import places_of as qwen_places
from maskserve_engine.families.qwen_image.weights import weights_of as qwen_weights
from maskserve_engine.families.qwen_image21.adapter import QwenImage21Batch, places_at
from maskserve_engine.families.qwen_image21.adapter import rotary as qwen21_rotary
from maskserve_engine.families.qwen_image21.weights import places_of as qwen21_places
from maskserve_engine.families.qwen_image21.weights import weights_of as qwen21_weights
from maskserve_engine.families.specs import FAMILIES as SPECS
from maskserve_engine.families.z_image.adapter import ZImageBatch, positions_of, rotary
from maskserve_engine.families.z_image.blocks import ZImageStep
from maskserve_engine.families.z_image.weights import ZImageWeights
from maskserve_engine.families.z_image.weights import places_of as z_image_places
from maskserve_engine.layers.low_rank import Factors, LowRankSet, Place, low_rank_set
from maskserve_engine.spec.family import StepPicture


def _angles(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the complex factors of FLUX's positions, [N, head_dim / 2]."""
    cos, sin = model.pos_embed(ids)
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def _flux_cis(model: Any, pictures: int, height: int, width: int, text: int) -> torch.Tensor:
    ids = torch.zeros(text + pictures * height * width, 3)
    ids[text:] = torch.cartesian_prod(*map(torch.arange, (pictures, height, width)))
    return _angles(model, ids.to(model.device))


def _flux2_cis(model: Any, pictures: int, height: int, width: int, text: int) -> torch.Tensor:
    return _angles(model, ids_of([(height, width)] * pictures, text).to(model.device))


def _qwen_cis(model: Any, pictures: int, height: int, width: int, text: int) -> torch.Tensor:
    size = [(1, height, width)] * pictures
    image, words = model.pos_embed([size], device=model.device, max_txt_seq_len=text)
    return torch.cat((words, image))


def _z_image_cis(model: Any, pictures: int, height: int, width: int, text: int) -> torch.Tensor:
    return rotary(model, positions_of(height, width, text, 0), model.device)


def _qwen21_cis(model: Any, pictures: int, height: int, width: int, text: int) -> torch.Tensor:
    starts = (0, -max(height, width))
    places = torch.cat([places_at(height, width, start) for start in starts])
    return qwen21_rotary(model, places).to(model.device)


class Family(NamedTuple):
    """The parts of a bench that depend on the model's family."""

    model: str
    """Its class name in diffusers."""
    weights: Callable[[Any], Any]
    batch: type[FlowBatch[Any]]
    step: type
    places: Callable[[Any], Mapping[str, Place]]
    cis: Callable[[Any, int, int, int, int], torch.Tensor]
    """Makes the factors [T + pictures · height · width, head_dim / 2] from a model, pictures,
    height, width and text."""
    blocks: tuple[str, ...] = ("num_layers", "num_single_layers")
    """Keys of its config.json that hold the number of blocks of each kind."""
    leaves_text: bool = True
    """Whether steps between a row's refresh steps may leave out the text."""
    text_varies: bool = False
    """Whether a prompt's length is that of its words (`RowInput.varies`)."""


FAMILIES = {
    "flux": Family(
        "FluxTransformer2DModel", FluxWeights.of, FluxBatch, FluxStep, flux_places, _flux_cis
    ),
    "flux2": Family(
        "Flux2Transformer2DModel", flux2_weights, FluxBatch, FluxStep, flux2_places, _flux2_cis
    ),
    "qwen_image": Family(
        "QwenImageTransformer2DModel", qwen_weights, QwenImageBatch, FluxStep, qwen_places,
        _qwen_cis, ("num_layers",), text_varies=True,
    ),
    "qwen_image21": Family(
        "QwenImage21Transformer2DModel", qwen21_weights, QwenImage21Batch, FluxStep,
        qwen21_places, _qwen21_cis, ("num_layers",), leaves_text=False,
    ),
    "z_image": Family(
        "ZImageTransformer2DModel", ZImageWeights.of, ZImageBatch, ZImageStep, z_image_places,
        _z_image_cis, ("n_refiner_layers", "n_layers"), leaves_text=False, text_varies=True,
    ),
}  # fmt: skip

_KLEIN: dict[str, Any] = {"grid": (64, 64), "text": 512, "references": 1, "family": "flux2"}
_QWEN: dict[str, Any] = {"grid": (64, 64), "text": 64, "family": "qwen_image"}
PRESETS: dict[str, dict[str, Any]] = {
    "flux-1024": {"grid": (64, 64), "text": 512},
    "flux-512": {"grid": (32, 32), "text": 512},
    "flux-256": {"grid": (16, 16), "text": 64},
    "demo": {"grid": (16, 16), "text": 16},
    "demo-narrow": {"grid": (4, 4), "text": 2},
    "small": {"grid": (24, 24), "text": 32},
    "medium": {"grid": (24, 24), "text": 32},
    "kontext-1024": {"grid": (64, 64), "text": 512, "references": 1},
    "klein-4b-1024": {**_KLEIN, "config": KLEIN_4B},
    "klein-9b-1024": {**_KLEIN, "config": KLEIN_9B},
    "klein-9b-kv-1024": {**_KLEIN, "config": KLEIN_9B, "exact": True},
    "qwen-image-1024": {**_QWEN, "config": QWEN_IMAGE},
    "qwen-edit-1024": {**_QWEN, "config": QWEN_IMAGE, "references": 1, "shown": QWEN_EDIT_SHOWN},
    "qwen-2511-1024": {**_QWEN, "config": QWEN_2511, "references": 1, "shown": QWEN_PLUS_SHOWN},
    # The prompt's tokens are fixed: about 64 of a step's 8,200 keys.
    "qwen-2.1-1024": {
        "grid": (64, 64),
        "text": 0,
        "references": 1,
        "exact": True,
        "family": "qwen_image21",
        "config": QWEN_21,
    },
    "z-image-1024": {"grid": (64, 64), "text": 64, "family": "z_image", "config": Z_IMAGE},
}

NO_TEXT = "no-text"
"""Stands for a kind: `kv` between the rows' refresh steps, without the text if the family allows
that."""
SMALL = {
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
    "guidance_embeds": True,
}
"""A FLUX whose step is short on a CPU: many narrow blocks, as pipelining needs."""
NARROW = {"attention_head_dim": 8, "num_attention_heads": 1, "axes_dims_rope": (4, 2, 2)}
"""Overrides of the demo model with almost nothing to compute, so that the time is that of launching
operations."""
MEDIUM = {**SMALL, "num_attention_heads": 8}
"""A FLUX whose dense step takes over half a second on one core of a CPU."""


class Bench:
    """A transformer and synthetic rows of it.

    Args:
        preset: a key of PRESETS.
        blocks: (double, single) blocks to keep; None keeps all.
        dtype: dtype of weights, activations and entries in model format.
        device: device that runs it.
        format: storage format of entries.
        model: a model of `preset` and `blocks`; None: make one.
        steps: number of steps of each row, after which it starts again. Part of a step's work is
            done once for LEAST_PRECOMPUTED_STEPS steps or more.
    """

    def __init__(
        self,
        preset: str,
        blocks: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
        model: Any = None,
        steps: int = LEAST_PRECOMPUTED_STEPS,
    ) -> None:
        preset_options = PRESETS[preset]
        self.grid, self.text, name = (
            preset_options["grid"],
            preset_options["text"],
            preset_options.get("family", "flux"),
        )
        self.shown_tokens: int = preset_options.get("shown", 0)
        """Number of shown tokens; cached rows read them."""
        self.family = FAMILIES[name]
        self.references: int = preset_options.get("references", 0)
        self.exact: bool = preset_options.get("exact", False)
        self.device, self.dtype, self.format, self.steps = device, dtype, format, steps
        self.model = model or build_model(preset, blocks, dtype, device)
        self.config = dict(self.model.config)
        room = CacheConfig().placed_on(device.type)
        self.weights = replace(self.family.weights(self.model), placed_bytes=room)
        self.blocks = len(self.weights.blocks)
        as_flux: Any = getattr(SPECS[name], "as_flux", dict)
        picture = StepPicture(
            2 * self.grid[0], 2 * self.grid[1], references=self.references, exact=self.exact
        )
        self.work = SPECS[name].count(as_flux(self.config), picture)
        if self.shown_tokens:
            self.work = self.work.with_context(self.shown_tokens)
        self.entry = AnchorEntry(Anchor(0.5, 500.0), ())
        self._still: dict[str, AnchorEntry] = {}
        self.batch: FlowBatch[Any] | None = None

    def fill_entry(self, kind: str) -> None:
        """Fill in random entries of one template for all blocks: `kv`, `project` (hidden) or
        `both`.
        """
        self.entry = self._random_entry(Anchor(0.5, 500.0), kind, self.work.tokens[0], self.format)

    def _random_entry(self, anchor: Anchor, kind: str, tokens: int, format: str) -> AnchorEntry:
        def coded() -> Any:
            return encode(self._random(tokens, self.weights.width), format)

        blocks = []
        for _ in range(self.blocks):
            hidden = coded() if kind in ("project", "both") else None
            keys, values = (coded(), coded()) if kind in ("kv", "both") else (None, None)
            blocks.append(BlockEntry(hidden, keys, values))
        return AnchorEntry(anchor, tuple(blocks))

    def _references(self, format: str) -> References | None:
        """Return references that see nothing of a row, with keys and values in this format."""
        if not self.exact:
            return None
        count, entries = self.work.still, self._still
        if format not in entries:
            entries[format] = self._random_entry(STILL, "kv", count, format)
        tokens = self._random(count, self._channels[0])
        return References(tokens, self._cis[-count:], entries[format])

    def row(self, mask_ratio: float | None, seed: int) -> FlowRow:
        """Return a dense row (None), or a cached one with random computed tokens."""
        tokens, (channels, out) = self.grid[0] * self.grid[1], self._channels
        words, reference_tokens = (
            self.shown_tokens + self.text,
            self.work.context - self.shown_tokens,
        )
        cis = self._cis[: words + tokens + reference_tokens]
        extra = channels - out
        condition = self._random(tokens, extra) if extra else None
        context = self._random(reference_tokens, out) if reference_tokens else None
        row = FlowRow(
            request_id=str(seed),
            schedule=Schedule(
                torch.linspace(0.5, 0.45, self.steps + 1, device=self.device),
                (Walk(500.0, 0.5, -0.05 / self.steps),) * self.steps,
            ),
            passes=(
                PromptPass(
                    self._random(words, self.weights.width),
                    cis[:words],
                    self._pooled(),
                    3.5 if self.config.get("guidance_embeds") else None,
                    timeless=bool(self.config.get("zero_cond_t")),
                    varies=self.family.text_varies,
                ),
            ),
            image=ImageSpans(
                self.grid,
                MaskedTokens(
                    None, cis[words:], self._random(tokens, out), condition, None, context
                ),
            ),
            # A dense row keeps references in the format of diffusers' own cache.
            references=self._references("model" if mask_ratio is None else self.format),
        )
        if mask_ratio is None:
            return row
        order = np.random.default_rng(seed).permutation(tokens)
        count = max(1, round(mask_ratio * tokens))
        active = torch.from_numpy(np.sort(order[:count])).to(self.device)
        cached_ids = np.sort(order[count:])
        read_ids = np.concatenate(
            (cached_ids, np.arange(tokens, tokens + reference_tokens + self.shown_tokens))
        )
        image, index = (torch.from_numpy(ids).to(self.device) for ids in (cached_ids, read_ids))
        template = FlowTemplate(row.latents, self._random(tokens, out), condition, context)
        selection = Selection([read_ids])
        places = torch.cat((cis[words:], cis[: self.shown_tokens]))[index]
        row.image.unmasked = TokenSpan(
            index, places, template.take(image), selection, self.shown_tokens
        )
        row.entry = in_memory(self.entry, selection, whole=self.device.type == "cuda")
        row.image.masked = MaskedTokens(
            active,
            row.image.masked.cis[active],
            row.latents[active],
            None if condition is None else condition[active],
            None,
        )
        return row

    def refreshing_row(self, ratio: float, seed: int) -> FlowRow:
        """Return a row that has taken two refresh steps and the step after them."""
        row = self.row(ratio, seed)
        assert row.image.unmasked is not None
        template: Any = row.image.unmasked.latents
        latents = ExtrapolatedLatents(
            template.clean, template.condition, None, template.clean, template.context
        )
        count = len(row.image.unmasked)
        row.image.unmasked = replace(
            row.image.unmasked,
            ids=row.image.unmasked.ids[:count],
            cis=row.image.unmasked.cis[:count],
            latents=latents,
            words=0,
        )
        sigmas = torch.linspace(1.0, 0.0, self.steps + 1)
        walk = [Walk(1000.0 * s, s, -1.0 / self.steps) for s in sigmas.tolist()[:-1]]
        row.schedule = Schedule(sigmas.to(self.device), tuple(walk))
        row.prompt.cache = StepCache(
            WithoutLookahead(frozenset({0, 2}), self.format, self.family.leaves_text)
        )
        for step in (0, 2):
            self.refresh_step(row, step)
        row.entry = StepCacheReader(row, self.blocks).entry_at(3)
        self.between([row], 3)
        return row

    def refresh_step(self, row: FlowRow, step: int) -> None:
        """Take a refresh step of such a row."""
        row.entry, row.step = None, step
        self.step([row], "kv")

    def between(self, rows: Sequence[FlowRow], step: int) -> None:
        """Take a step of such rows that is not a refresh step: the step `step`, behind both refresh
        steps.
        """
        for row in rows:
            row.step = step
        self.step(rows, "kv")

    def lora(self, rank: int) -> LowRankSet:
        """Return a random LoRA on every linear layer of the blocks."""
        factors = {
            name: Factors(self._random(rank, place.shape[1]), self._random(place.shape[0], rank))
            for name, place in self.family.places(self.model).items()
            if "transformer_blocks" in name
        }
        return low_rank_set(factors, self.family.places(self.model), self.device, self.dtype)

    def guided(self, row: FlowRow) -> FlowRow:
        """Return the row with a negative prompt, so it takes a second pass."""
        text = self._random(self.shown_tokens + self.text, self.weights.width)
        negative = replace(row.prompt, text=text, pooled=self._pooled(), cache=None, scale=3.0)
        row.passes = (row.prompt, negative)
        return row

    def priming_row(self) -> FlowPrimingRow:
        """Return a row that primes a template at one anchor; it records keys, values and hidden
        states.
        """
        row, text_tokens = self.row(None, 0), self.shown_tokens or self.text
        prompt = row.prompt
        return FlowPrimingRow(
            request_id="prime",
            template=FlowTemplate(
                row.latents,
                torch.empty_like(row.latents),
                row.image.masked.condition,
                row.image.masked.context,
            ),
            anchors=(self.entry.anchor,),
            sigmas=torch.tensor([self.entry.anchor.sigma], device=self.device),
            prompt=replace(prompt, text=prompt.text[:text_tokens], cis=prompt.cis[:text_tokens]),
            embeds=prompt.text,
            cis=row.image.masked.cis,
            kinds=(frozenset({"kv"} if self.shown_tokens else {"h", "kv"}),) * self.blocks,
            format=self.format,
            references=row.references,
            picture_words=self.shown_tokens,
        )

    def step(
        self,
        rows: Sequence[FlowRow | FlowPrimingRow],
        kind: str | Sequence[str],
        *,
        exchange: Exchange | None = None,
    ) -> None:
        """Take one step of a batch as the engine does; `kind` holds for all blocks or is one per
        block.
        """
        kinds = (kind,) * self.blocks if isinstance(kind, str) else kind
        with torch.inference_mode():
            for row in rows:
                row.step %= row.steps
            self.batch = self.family.batch.of(rows, self.batch)
            self.batch.step(self.weights, kinds, exchange)

    def walk(self, rows: Sequence[FlowRow], kind: str) -> None:
        """Take all steps of rows of this bench."""
        for _ in range(self.steps):
            self.step(rows, kind)

    def limit(self, ratios: Sequence[float], kind: str) -> float:
        """Return dense FLOPs over cached FLOPs of a batch with these mask ratios."""
        return self.flops(ratios, "dense") / self.flops(ratios, kind)

    def flops(self, ratios: Sequence[float], kind: str) -> float:
        """Return the FLOPs of a step of a batch with these mask ratios."""
        rows = [self.work.row_at(m, self.text) for m in ratios]
        if kind == NO_TEXT:
            rows = [replace(row, text=0.0, text_read=row.text) for row in rows]
            kind = "kv"
        return self.work.step_flops(rows, kind)

    def _pooled(self) -> torch.Tensor | None:
        width = self.config.get("pooled_projection_dim")
        return None if width is None else self._random(width)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @cached_property
    def _cis(self) -> torch.Tensor:
        height, width = self.grid
        words = self.shown_tokens + self.text
        return self.family.cis(self.model, 1 + self.references, height, width, words)

    @property
    def _channels(self) -> tuple[int, int]:
        """Return the channels of a token at the model's input and output."""
        out = self.weights.proj_out.out_features
        extra = self.config["in_channels"] - out if self.family is FAMILIES["flux"] else 0
        return out + extra, out


def build_model(
    preset: str, blocks: tuple[int, int] | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return the preset's transformer with random weights."""
    import diffusers

    family = FAMILIES[PRESETS[preset].get("family", "flux")]
    cls: Any = getattr(diffusers, family.model)
    if preset in ("demo", "demo-narrow"):
        config = cls.load_config(DEMO_MODEL / "transformer")
        config = {**config, **(NARROW if preset == "demo-narrow" else {})}
    elif preset in ("small", "medium"):
        config = {"small": SMALL, "medium": MEDIUM}[preset]
    else:  # FLUX.1-dev is the default configuration of the class
        config = PRESETS[preset].get("config", {"guidance_embeds": True})
    if blocks is not None:
        config = {**config, **dict(zip(family.blocks, blocks, strict=False))}
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls.from_config(config)
    finally:
        torch.set_default_dtype(previous_dtype)
    return model.eval().requires_grad_(False)
