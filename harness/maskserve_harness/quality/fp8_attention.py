"""What attention in FP8 over entries kept in FP8 would cost in quality, emulated on the demo model.

Queries, keys and values are rounded to FP8 with a scale per row and head, as FlashAttention 3 takes
them; so are the shares of attention, of which the largest of a query counts as 256. Sums are in
float32. Entries are exact before: they are rounded once, as if they lay in FP8. Held against dense
rows with attention in the model's dtype.

    python scripts/bench fp8_attention --n 4 --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from maskserve_engine.batch import forward
from maskserve_engine.layers.attention import Segments
from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.edit_classes import CLASSES, edits_of
from maskserve_harness.quality.choices import default
from maskserve_harness.quality.metrics import compare, summary
from maskserve_harness.quality.systems import Rig

_FP8, _LARGEST, _TOP = torch.float8_e4m3fn, 448.0, 256.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=2, help="edits of each class")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rig = Rig(DEMO_MODEL, steps=args.steps)
    edits = [edit for name in CLASSES if name != "most" for edit in edits_of(name, args.n)]
    jobs = rig.jobs(edits)
    dense, entries = rig.dense(edits, jobs), rig.entries(jobs)
    chosen = default(rig.adapter.facts, rig.steps)

    def tell(name: str, format: str) -> None:
        choice = replace(chosen, format=format)
        made = (
            rig.dense(edits, jobs)
            if format == "dense"
            else rig.cached(edits, jobs, entries, choice)
        )
        found = summary(compare(edits, made, dense))
        print(
            f"| {name} | {found.psnr_in_mask:.2f} | {found.pooled_psnr_in_mask:.2f} "
            f"| {found.worst_psnr_in_mask:.2f} |",
            flush=True,
        )

    print("| entries, attention | PSNR in mask | pooled | worst edit |\n|---|---|---|---|")
    for format in ("model", "int8", "float8", "int4"):
        tell(f"{format}, plain", format)
    with attention_in_fp8():
        tell("FP8, FP8", "model")
        tell("dense row, FP8", "dense")
    return 0


@contextmanager
def attention_in_fp8() -> Iterator[None]:
    with mock.patch.object(forward, "attention", emulated):
        yield


def emulated(query: Tensor, key: Tensor, value: Tensor, rows: Segments) -> Tensor:
    """`attention` in FP8."""
    out = torch.empty_like(query)
    for (qb, qe), (kb, ke) in zip(rows.q_spans, rows.k_spans, strict=True):
        q, k, v = (rounded(x.transpose(0, 1)) for x in (query[qb:qe], key[kb:ke], value[kb:ke]))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        coarse = (shares * _TOP).to(_FP8).float() / _TOP
        found = coarse @ v / shares.sum(dim=-1, keepdim=True)
        out[qb:qe] = found.transpose(0, 1).to(out.dtype)
    return out


def rounded(x: Tensor) -> Tensor:
    """[heads, n, head_dim] in FP8 and back, with a scale per head."""
    wide = x.float()
    scale = wide.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-12) / _LARGEST
    return (wide / scale).to(_FP8).float() * scale
