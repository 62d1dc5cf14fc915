"""Pricing from counted work and a cost model, which a worker publishes for routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from maskserve_common.contracts.pricing import RINGS, Pricing, RingShares, RowPrice
from maskserve_common.contracts.tiers import HOST, TIERS
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import EntryFormat, block_bytes, entry_bytes
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.spec.model_spec import ALL_NET_TOKENS, ALL_TEXT, NetShares, TextShares

_KV = 1  # column of block_bytes
_BETWEEN_TILES = (0.05, 0.5)
"""Mask ratios between which the work of a row with a tile, which is not linear, is interpolated
linearly.
"""


def pricing_of(
    work: ModelWork,
    costs: CostModel,
    fmt: EntryFormat,
    *,
    text: float,
    anchors: int,
    steps_per_anchor: float = 1.0,
    halves: int = 1,
    controls: Mapping[str, ModelWork] = MappingProxyType({}),
    net_shares: NetShares = ALL_NET_TOKENS,
    lora: tuple[ModelWork, int] | None = None,
    text_shares: TextShares = ALL_TEXT,
    leaves_ring: bool = False,
) -> Pricing:
    """Return the pricing of a worker whose cached rows read keys and values.

    Exact for FLUX. For UNets computed tokens are counted at the finest level, and a mask touches
    relatively more tokens on coarser ones: routing compares like with like. Feature maps that rows
    with tiles load are not counted.

    Args:
        work: the model at the image's size.
        costs: cost model of the worker.
        fmt: storage of the entries.
        text: text tokens of a row.
        anchors: anchors of a whole edit: a far tier's template is loaded as a whole.
        steps_per_anchor: steps that share an anchor's entries; they are loaded once.
        halves: entries kept per token.
        controls: the ControlNets' work at that size, by name.
        net_shares: shares of the steps in which a net beside a cached row computes tokens.
        lora: work that a LoRA adds, and its file's bytes (`ModelWork.typical_lora`).
        text_shares: share of its steps in which a cached row computes its text.
        leaves_ring: whether the other steps also leave out the ring.
    """
    per_flop = costs.compute.per_unit
    tokens = work.tokens[0] - work.context
    # Rows of UNets with refresh steps always convolve on a tile.
    tiled = work if work.joint or work.halo else replace(work, halo=1)
    cached_row, per_mask = _line(work, text, text_shares.template)
    between = [flops * per_flop for flops in _line(tiled, text, text_shares.refresh)]
    with_text = [flops * per_flop for flops in _line(work, text, 1.0)]
    whole = tuple(float(n) for n in work.tokens)
    loaded = float(block_bytes(work, [whole], fmt, copies=halves)[:, _KV].sum())
    per_byte = costs.loads[HOST.name].per_unit if HOST.name in costs.loads else 0.0
    spare = loaded * per_byte / work.tokens[0] / steps_per_anchor
    template = anchors * entry_bytes(work, "kv", fmt, copies=halves)
    return Pricing(
        step=costs.compute.fixed,
        dense_row=work.step_flops([work.row_at(1.0, text)], "dense") * per_flop,
        cached_row=cached_row * per_flop + work.context * spare,
        active_token=per_mask * per_flop / tokens,
        spare_token=spare,
        fetch={
            tier: costs.load_seconds(tier, template)
            for tier in costs.loads
            if not TIERS[tier].read_by_steps
        },
        tokens=tokens,
        controls={
            name: _control_price(net, per_flop, text, net_shares, text_shares.refresh)
            for name, net in controls.items()
        },
        between=RowPrice(0.0, between[0], between[1] / tokens),
        whole=None
        if text_shares.template == 1.0
        else RowPrice(0.0, with_text[0], with_text[1] / tokens),
        lora_byte=None
        if lora is None
        else _row_price(lora[0], per_flop / lora[1], text, text_shares.template),
        rings=_rings(text_shares, leaves_ring=leaves_ring),
    )


def _rings(text: TextShares, *, leaves_ring: bool) -> RingShares:
    """Return the ring shares of rows that may leave the ring out whenever they leave out their
    text.
    """
    if not leaves_ring:
        return RINGS._replace(lookahead=text.lookahead)
    template, refresh = (share if share < 1.0 else None for share in (text.template, text.refresh))
    return RingShares(template, refresh, text.lookahead)


def _line(work: ModelWork, text: float, share: float) -> tuple[float, float]:
    """Return the FLOPs of a row without computed tokens that computes this share of its text, and
    the FLOPs that all tokens as computed ones would add.
    """
    few, many = _BETWEEN_TILES if work.halo else (0.0, 1.0)
    low, high = (work.step_flops([_row(work, m, text, share)], "kv") for m in (few, many))
    per_mask = (high - low) / (many - few)
    return max(0.0, low - few * per_mask), per_mask


def _row(work: ModelWork, mask_ratio: float, text: float, share: float) -> RowTokens:
    """Return a row that computes this share of its text and reads the rest."""
    row = work.row_at(mask_ratio, text)
    if not work.joint:
        return row
    return replace(row, text=share * text, text_read=(1.0 - share) * text)


def _control_price(
    net: ModelWork, per_flop: float, text: float, shares: NetShares, share: float
) -> RowPrice:
    row_price = _row_price(net, per_flop, text, share)
    return RowPrice(
        dense_row=row_price.dense_row,
        cached_row=row_price.dense_row * shares.whole + shares.computed * row_price.cached_row,
        active_token=shares.computed * row_price.active_token,
    )


def _row_price(work: ModelWork, per_flop: float, text: float, share: float) -> RowPrice:
    """Return the price of work beside a row's own, at all of its steps."""
    rows = [_row(work, ratio, text, share) for ratio in (0.0, 1.0)]
    few, many = (work.step_flops([row], "kv") * per_flop for row in rows)
    return RowPrice(
        dense_row=work.step_flops([work.row_at(1.0, text)], "dense") * per_flop,
        cached_row=few,
        active_token=(many - few) / work.tokens[0],
    )
