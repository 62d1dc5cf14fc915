"""FLUX rows: one edit or one template being primed, with all the state between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, Recorder
from maskserve_engine.families.flux.conditioning import Blend, TemplateInputs
from maskserve_engine.families.flux.forward import RowInput
from maskserve_engine.families.flux.latents import unpack_latents
from maskserve_engine.families.flux.schedule import Schedule, Walk


@dataclass(slots=True)
class Inactive:
    """A cached row's tokens outside the mask: what stands in for computing them."""

    active: Tensor
    """[n] ids of the computed tokens."""
    index: Tensor
    """[m] ids of the others."""
    template: TemplateInputs
    """Of the tokens at `index`."""
    cis: Tensor
    """[m, head_dim / 2]"""
    entries: tuple[AnchorEntry | None, ...]
    """Per step of the row's schedule; None where no anchor is near enough."""
    loaded: AnchorEntry | None = None
    blocks: tuple[BlockEntry, ...] = ()
    """The tokens at `index` of `loaded`."""
    loaded_bytes: int = 0

    def load(self, step: int) -> None:
        """Gather what `step` reads; consecutive steps of one anchor share it."""
        entry = self.entries[step]
        if entry is not None and entry is not self.loaded:
            self.blocks, self.loaded = entry.take(self.index), entry
            self.loaded_bytes += sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class CachedRest:
    """`forward.Rest` of one row, at whatever step it is."""

    row: FluxRow
    inactive: Inactive

    @property
    def cis(self) -> Tensor:
        return self.inactive.cis

    def tokens(self) -> Tensor:
        return self.inactive.template.at(self.row.sigma)

    def hidden(self, block: int, out: Tensor) -> None:
        coded = self.inactive.blocks[block].hidden
        assert coded is not None, f"no hidden states kept for block {block}"
        coded.into(out)

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        entry = self.inactive.blocks[block]
        assert entry.keys is not None, f"no keys kept for block {block}"
        assert entry.values is not None
        entry.keys.into(keys.flatten(1))
        entry.values.into(values.flatten(1))


@dataclass(frozen=True, slots=True)
class Negative:
    """A negative prompt: each step also runs the model with it, and is led away from its answer
    (diffusers' true classifier-free guidance).
    """

    text: Tensor
    """[T, width] after context_embedder."""
    pooled: Tensor
    scale: float
    """true_cfg_scale, above 1."""

    def input(self, own: RowInput) -> RowInput:
        """The second pass of the row whose first is `own`."""
        return replace(own, text=self.text, pooled=self.pooled)


@dataclass(slots=True)
class FluxRow:
    """One edit inside the running batch."""

    request_id: str
    schedule: Schedule
    grid: tuple[int, int]
    """Tokens down and across."""
    text: Tensor
    """[T, width] after context_embedder."""
    pooled: Tensor
    guidance: float | None
    cis: Tensor
    """[T + n, head_dim / 2] of text and computed tokens."""
    latents: Tensor
    """[n, 4C] of the computed tokens; once packed, where they lie in the batch."""
    condition: Tensor | None
    blend: Blend | None
    negative: Negative | None = None
    inactive: Inactive | None = None
    """None for a dense row."""
    step: int = 0
    place: slice = field(default_factory=lambda: slice(0))
    """Of the computed tokens in the batch."""
    moves: Tensor | None = None
    """[N, 4C] by what the last step moved the whole batch."""

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def sigma(self) -> Tensor:
        return self.schedule.sigmas[self.step]

    @property
    def uses_entries(self) -> bool:
        """Whether this step reads entries (else it computes every token)."""
        return self.inactive is not None and self.inactive.entries[self.step] is not None

    def load(self) -> None:
        """Bring in what the next step reads."""
        if self.inactive is not None:
            self.inactive.load(self.step)

    @property
    def channels(self) -> int:
        """Of its latents as tokens."""
        return self.latents.shape[1]

    @property
    def walk(self) -> tuple[Walk, ...]:
        """The steps still to take."""
        return self.schedule.walk[self.step :]

    @property
    def steady(self) -> int:
        """For how many steps from the next one on the same inputs are packed, but for latents."""
        if self.inactive is None:
            return self.steps - self.step
        ahead = self.inactive.entries[self.step :]
        # Without an entry it packs the tokens pinned to that step, too.
        return next((i for i, entry in enumerate(ahead) if entry is None), len(ahead)) or 1

    def model_input(self) -> RowInput:
        tokens, cis, rest = self.latents, self.cis, None
        if self.condition is not None:
            tokens = torch.cat((tokens, self.condition), dim=1)
        if self.inactive is not None:
            rest = CachedRest(self, self.inactive)
            if not self.uses_entries:  # compute the pinned tokens too, as further image tokens
                tokens = torch.cat((tokens, rest.tokens()))
                cis = torch.cat((cis, rest.cis))
                rest = None
        return RowInput(tokens, self.text, self.pooled, self.guidance, cis, rest)

    def settle(self, latents: Tensor, begin: int) -> None:
        """Have the latents where they were packed.

        Args:
            latents: [n or all, 4C] the row's part of the batch, the computed tokens first; kept.
            begin: where that part begins.
        """
        computed = len(self.latents)
        self.latents, self.place = latents[:computed], slice(begin, begin + computed)
        self.moves = None

    @property
    def blends(self) -> bool:
        """Whether `blend_in` does anything."""
        return self.blend is not None

    def blend_in(self, moved: Tensor) -> None:
        """Inpaint semantics, after the sampler's step and before it is booked.

        Args:
            moved: [n or all, 4C] the computed tokens first; written to.
        """
        if self.blend is not None:
            computed, after = moved[: len(self.latents)], self.step + 1
            sigma, last = self.schedule.sigmas[after], after == self.steps
            computed.copy_(self.blend.apply(computed, sigma, last=last))

    def advance(self, moves: Tensor) -> None:
        """Book a step that was taken.

        Args:
            moves: [N, 4C] of the whole batch: model's velocity times change of sigma; kept.
        """
        self.moves = moves
        self.step += 1

    @property
    def loaded_bytes(self) -> int:
        return 0 if self.inactive is None else self.inactive.loaded_bytes

    def estimate(self) -> NDArray[np.float32]:
        """[C, h, w] latents as the last step's velocity would finish them."""
        assert self.moves is not None, "no step was taken yet"
        share = self.sigma / self.schedule.walk[self.step - 1].change
        return self._image(self.latents.float() - share * self.moves[self.place].float())

    def result(self) -> NDArray[np.float32]:
        """[C, h, w] latents."""
        return self._image(self.latents)

    def _image(self, computed: Tensor) -> NDArray[np.float32]:
        tokens = computed
        if self.inactive is not None:
            tokens = computed.new_empty(self.grid[0] * self.grid[1], computed.shape[1])
            tokens[self.inactive.active] = computed
            tokens[self.inactive.index] = self.inactive.template.clean.to(computed.dtype)
        return unpack_latents(tokens, self.grid).float().cpu().numpy()


@dataclass(slots=True)
class PrimingRow:
    """A template whose entries are computed, one anchor per step."""

    request_id: str
    template: TemplateInputs
    anchors: tuple[Anchor, ...]
    text: Tensor
    pooled: Tensor
    guidance: float | None
    cis: Tensor
    kinds: Sequence[frozenset[str]]
    """Per block, what is kept: any of "h" and "kv"."""
    format: str
    step: int = 0
    done: list[AnchorEntry] = field(default_factory=list)
    recorder: Recorder | None = None
    negative: None = None

    @property
    def steps(self) -> int:
        return len(self.anchors)

    @property
    def uses_entries(self) -> bool:
        return False

    def load(self) -> None:
        """Priming reads nothing."""

    def take_entry(self) -> AnchorEntry:
        return self.done.pop()

    @property
    def channels(self) -> int:
        """Of its latents as tokens."""
        return self.template.clean.shape[1]

    @property
    def walk(self) -> tuple[Walk, ...]:
        """The anchors still to compute: priming takes no step of the sampler."""
        return tuple(Walk(a.timestep, a.sigma, 0.0) for a in self.anchors[self.step :])

    @property
    def steady(self) -> int:
        """Each anchor has tokens of its own."""
        return 1

    def model_input(self) -> RowInput:
        sigma = torch.tensor(self.anchors[self.step].sigma, device=self.cis.device)
        tokens = self.template.at(sigma)
        self.recorder = Recorder(self.kinds, self.format)
        return RowInput(
            tokens, self.text, self.pooled, self.guidance, self.cis, capture=self.recorder
        )

    def settle(self, latents: Tensor, begin: int) -> None:
        """Priming moves nothing."""

    @property
    def blends(self) -> bool:
        """Priming takes no step of the sampler."""
        return False

    def blend_in(self, moved: Tensor) -> None:
        """Nothing is blended."""

    def advance(self, moves: Tensor) -> None:
        """Keep what was recorded; nothing has moved."""
        assert self.recorder is not None
        self.done.append(self.recorder.entry(self.anchors[self.step]))
        self.recorder = None
        self.step += 1
