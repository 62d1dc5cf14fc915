"""Counted work of one denoising step: FLOPs per block and kind, from a model's config alone.

A multiply-add counts as two FLOPs; norms, activations, softmax and rotary embeddings count as
nothing, as in torch's own counter. FlashPS Table 1 gives the leading terms; here are all of them,
text tokens included, because at small masks the text is a third of what a cached row computes.

Every block's work is linear in six sums over the rows of a batch, so a batch costs one small
product however many rows it holds:

    row      rows                           modulation, once per row
    token    image tokens computed          projections, feed-forward
    text     text tokens                    the text stream, or K and V of cross-attention
    spare    inactive image tokens          K and V projected from `h` (kind `project` alone)
    pair     (query, key) pairs             self-attention scores and values
    cross    (image query, text key) pairs  cross-attention
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

KINDS = ("dense", "project", "kv")
"""Ways to run a block, in the column order of every per-kind array (design §2, "plan")."""
DENSE, PROJECT, KV = range(3)

TERMS = ("row", "token", "text", "spare", "pair", "cross")
_SPARE = TERMS.index("spare")
STEPS_AHEAD = 8
"""Steps for which a FLUX batch has its shifts, scales and gates computed at once."""
_FLUX_HELD = 28
"""Widths that a token holds at most, behind a single block's attention: the block's input, all that
one product made of it (7), queries, keys, the activated feed-forward part (4), what attention gave,
it and the feed-forward part side by side (5), and what they become; one that a dense block has left
for the next ones that are not; and what a row that may skip steps remembers (5).
"""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """FLOPs of one transformer block per unit of each term, and the shape of its entry."""

    name: str
    stack: int
    """Index of the stack the block belongs to, in the order they run."""
    level: int
    """Index into the resolutions of the model: 0 for FLUX, the down-sampling depth for UNets."""
    width: int
    """Channels of `h`; K and V are as wide each."""
    row: float
    token: float
    text: float
    spare: float
    pair: float
    cross: float


@dataclass(frozen=True, slots=True)
class FixedWork:
    """FLOPs outside the blocks that every row pays, at one place of the step."""

    row: float = 0.0
    """Per row; for UNets all convolutions and ResNets up to the next stack."""
    token: float = 0.0
    """Per image token computed at level 0 (FLUX embedder and final layer)."""
    text: float = 0.0
    """Per text token."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What one row computes when it runs cached.

    Args:
        active: active image tokens per level; floats are allowed for limits.
        text: text tokens.
    """

    active: tuple[float, ...]
    text: float


@dataclass(frozen=True, slots=True)
class Totals:
    """A batch reduced to the sums its cost depends on; arrays are `[levels, len(TERMS)]`."""

    rows: int
    dense: Floats
    cached: Floats
    active: tuple[float, ...]
    """Active tokens of all rows, per level."""
    text: float

    def __add__(self, other: Totals) -> Totals:
        """Of both batches together."""
        return Totals(
            self.rows + other.rows,
            self.dense + other.dense,
            self.cached + other.cached,
            tuple(a + b for a, b in zip(self.active, other.active, strict=True)),
            self.text + other.text,
        )


@dataclass(frozen=True)
class ModelWork:
    """Work of one model at one image size; `copies` evaluations per row (2 under CFG)."""

    family: str
    blocks: tuple[BlockWork, ...]
    tokens: tuple[int, ...]
    """Image tokens per level."""
    joint: bool
    """Whether text tokens sit in self-attention (FLUX) or only in cross-attention (UNets)."""
    before: tuple[FixedWork, ...]
    """Work before each stack; as many as stacks."""
    after: FixedWork
    """Work after the last stack."""
    restore_ends: bool
    """Whether inactive outputs are needed at the end of each stack (UNets)."""
    peak_row: float
    """Numbers that one evaluation of a row holds at once where it holds most, all tokens computed,
    text apart; what kernels keep for themselves is not counted."""
    peak_text: float
    """The same per text token."""
    copies: int = 1
    coefficients: Floats = field(init=False, repr=False, compare=False)
    levels: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    widths: Floats = field(init=False, repr=False, compare=False)
    ends: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    """Index of the last block of each stack."""
    starts: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    """Index of the first block of each stack."""

    def __post_init__(self) -> None:
        table = [[getattr(b, term) for term in TERMS] for b in self.blocks]
        object.__setattr__(self, "coefficients", np.array(table, dtype=np.float64) * self.copies)
        object.__setattr__(self, "levels", np.array([b.level for b in self.blocks], dtype=np.intp))
        object.__setattr__(self, "widths", np.array([b.width for b in self.blocks], dtype=float))
        ends = {b.stack: i for i, b in enumerate(self.blocks)}
        object.__setattr__(self, "ends", np.array(list(ends.values()), dtype=np.intp))
        starts = np.concatenate((np.zeros(1, np.intp), self.ends[:-1] + 1))
        object.__setattr__(self, "starts", starts)

    def row_at(self, mask_ratio: float, text: float) -> RowTokens:
        """A row whose mask covers exactly `mask_ratio` of each level: a lower bound, because a
        real mask touches whole tokens and touches relatively more of them on coarser levels.
        """
        if not 0.0 <= mask_ratio <= 1.0:
            raise ValueError(f"mask_ratio: {mask_ratio} is not in 0 to 1")
        return RowTokens(tuple(mask_ratio * n for n in self.tokens), text)

    def totals(self, rows: Sequence[RowTokens]) -> Totals:
        """The sums of `rows`.

        Raises:
            ValueError: a row without one count per level, or above the level's tokens.
        """
        dense = np.zeros((len(self.tokens), len(TERMS)))
        cached = np.zeros_like(dense)
        count, text = len(rows), float(sum(r.text for r in rows))
        sums = []
        for level, n in enumerate(self.tokens):
            active = pairs = all_pairs = cross = 0.0
            for r in rows:
                if len(r.active) != len(self.tokens) or not 0 <= r.active[level] <= n:
                    raise ValueError(f"active: {r.active} does not fit tokens {self.tokens}")
                a, joined = r.active[level], r.text if self.joint else 0.0
                active += a
                pairs += (a + joined) * (n + joined)
                all_pairs += (n + joined) ** 2
                cross += a * r.text
            cached[level] = (count, active, text, count * n - active, pairs, cross)
            dense[level] = (count, count * n, text, 0.0, all_pairs, n * text)
            sums.append(active)
        return Totals(count, dense, cached, tuple(sums), text)

    def block_flops(self, totals: Totals) -> Floats:
        """FLOPs of every block for the whole batch, `[blocks, len(KINDS)]`."""
        cached = self.coefficients * totals.cached[self.levels]
        spare = cached[:, _SPARE]
        project = cached.sum(axis=1)
        dense = (self.coefficients * totals.dense[self.levels]).sum(axis=1)
        return np.stack((dense, project, project - spare), axis=1)

    def fixed_flops(self, totals: Totals, *, dense: bool = False) -> Floats:
        """FLOPs before each stack and, last, after the final one: `[stacks + 1]`."""
        tokens = (totals.dense if dense else totals.cached)[0, 1]
        return np.array(
            [
                self.copies * (w.row * totals.rows + w.token * tokens + w.text * totals.text)
                for w in (*self.before, self.after)
            ]
        )

    def batch_flops(
        self, cached: Totals | None, kinds: Sequence[str], dense: Totals | None
    ) -> float:
        """FLOPs of one step of cached rows whose block i runs as `kinds[i]`, beside dense ones."""
        flops = 0.0
        if cached is not None:
            blocks = self.block_flops(cached)
            flops += float(blocks[np.arange(len(blocks)), [KINDS.index(k) for k in kinds]].sum())
            flops += float(self.fixed_flops(cached).sum())
        if dense is not None:
            flops += float(self.block_flops(dense)[:, DENSE].sum())
            flops += float(self.fixed_flops(dense, dense=True).sum())
        return flops

    def step_flops(self, rows: Sequence[RowTokens], kind: str = "kv") -> float:
        """FLOPs of one step of `rows` with every block run as `kind`."""
        totals = self.totals(rows)
        blocks = self.block_flops(totals)[:, KINDS.index(kind)].sum()
        return float(blocks + self.fixed_flops(totals, dense=kind == "dense").sum())


def flop_limit(
    work: ModelWork,
    mask_ratio: float,
    text: float,
    *,
    kind: str = "kv",
    blocks_only: bool = False,
) -> float:
    """Dense FLOPs over cached FLOPs of one row: no cached step can be faster by more than this
    at equal FLOP/s, so every benchmark prints it beside what it measured.

    Args:
        work: the model at the image's size.
        mask_ratio: active over all tokens, on every level.
        text: text tokens of the row.
        kind: how the cached row runs its blocks.
        blocks_only: leave out embedders, convolutions and the final layer.
    """
    row = work.row_at(mask_ratio, text)
    if blocks_only:
        flops = work.block_flops(work.totals([row])).sum(axis=0)
        return float(flops[DENSE] / flops[KINDS.index(kind)])
    return work.step_flops([row], "dense") / work.step_flops([row], kind)


def flux_work(config: dict[str, Any], height: int, width: int) -> ModelWork:
    """Work of a FluxTransformer2DModel.

    A cached row computes its active image tokens and all text tokens; queries are those, keys are
    all tokens. `kv` has K and V of inactive tokens ready after norm and rotary embedding;
    `project` has their hidden states and makes K and V of them, in single blocks too.

    Args:
        config: transformer/config.json.
        height: latent rows (pixels / VAE scale); tokens are 2x2 latents.
        width: latent columns.
    """
    h = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    channels = int(config["in_channels"])
    out = int(config.get("out_channels") or channels) * int(config.get("patch_size", 1)) ** 2
    # Q, K, V and the output are h x h each, the feed-forward is h x 4h and back: (4 + 8) * 2h²,
    # of which K and V are 4h². Single blocks fold the output into the (h + 4h) x h projection.
    double = {
        "row": 2 * 12.0 * h * h,  # AdaLN: h x 6h for the image and again for the text stream
        "token": 24.0 * h * h,
        "text": 24.0 * h * h,
        "spare": 4.0 * h * h,
        "pair": 4.0 * h,
        "cross": 0.0,
    }
    single = {**double, "row": 6.0 * h * h}
    counts = (int(config["num_layers"]), int(config["num_single_layers"]))
    blocks = [
        BlockWork(f"{name}.{i}", stack=0, level=0, width=h, **terms)
        for name, terms, count in zip(("double", "single"), (double, single), counts, strict=True)
        for i in range(count)
    ]
    clocks = 2 if config.get("guidance_embeds") else 1
    embed = FixedWork(
        row=clocks * _mlp(256, h) + _mlp(int(config["pooled_projection_dim"]), h),
        token=2.0 * channels * h,
        text=2.0 * int(config["joint_attention_dim"]) * h,
    )
    tokens = (height // 2) * (width // 2)
    held = _FLUX_HELD * h + 2.0 * int(config["attention_head_dim"])  # and rotary factors, complex
    return ModelWork(
        family="flux",
        blocks=tuple(blocks),
        tokens=(tokens,),
        joint=True,
        before=(embed,),
        after=FixedWork(row=4.0 * h * h, token=2.0 * h * out),
        restore_ends=False,
        # What a block holds, the model's input and output, and all blocks' shifts, scales, gates.
        peak_row=tokens * (held + channels + out)
        + STEPS_AHEAD * (12 * counts[0] + 3 * counts[1] + 2) * h,
        peak_text=held,
    )


def _mlp(inputs: int, width: int) -> float:
    """FLOPs of a two-layer embedder, inputs → width → width."""
    return 2.0 * inputs * width + 2.0 * width * width
