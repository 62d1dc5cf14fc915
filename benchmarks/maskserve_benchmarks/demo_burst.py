"""Eight different edits at once: by maskserve, with all tokens, and by diffusers' own pipeline.

The edits are those of `make bench`: four photographs of the model's size, masks of production (11 %
of a picture on average), prompts that the demo model knows. The photographs' activations are cached
before, and each side has run eight other edits. Then each side runs the same edits in three rounds;
medians count. maskserve goes first, so the words that the server keeps help the edits with all
tokens.
"""

from __future__ import annotations

import io
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_sheet import CELL, SheetRow, psnr, shaded
from maskserve_benchmarks.perf.inputs import Edit, InputOptions, find_photos, make_edits
from maskserve_client import Client, EditResult

EDITS, ROUNDS = 8, 3
"""Edits at once, and measured rounds of them."""
NAME = "eight edits at once"
_PHOTOGRAPHS, _COLUMNS = 4, 4
"""Different photographs among the edits, and pictures side by side in the sheet."""
MASKSERVE, ALL_TOKENS, DIFFUSERS, ONE_CALL = "maskserve", "all tokens", "diffusers", "one call"
Picture = npt.NDArray[np.uint8]


class Round(NamedTuple):
    """Edits that run at once; the first round warms up."""

    edits: Sequence[Edit]
    pictures: dict[str, Sequence[Picture]]
    """By side."""
    seconds: dict[str, float]
    """From the first edit's start to the last one's picture, by side."""
    metas: list[dict[str, Any]]
    """META of maskserve's edits."""

    def run(self, side: str, edit_all: Callable[[Sequence[Edit]], list[Picture]]) -> None:
        begin = time.perf_counter()
        self.pictures[side] = edit_all(self.edits)
        self.seconds[side] = time.perf_counter() - begin


def burst_rounds() -> list[Round]:
    count = EDITS * (1 + ROUNDS)
    edits = make_edits(
        InputOptions(entries=count, templates=_PHOTOGRAPHS), find_photos(CHECKOUT / "assets")
    )
    return [Round(edits[at : at + EDITS], {}, {}, []) for at in range(0, count, EDITS)]


def run_at_server(client: Client, rounds: Sequence[Round]) -> None:
    """Run the rounds by maskserve and with all tokens."""

    def results(edits: Sequence[Edit], **settings: Any) -> list[EditResult]:
        def result(edit: Edit) -> EditResult:
            return client.edit(edit.image, edit.mask, edit.prompt, **edit.settings, **settings)

        return list(pool.map(result, edits))

    def pictures(of_results: Sequence[EditResult]) -> list[Picture]:
        return [np.asarray(result.image) for result in of_results]

    with ThreadPoolExecutor(EDITS) as pool:
        results(rounds[0].edits[:_PHOTOGRAPHS], cache="require")
        for turn in rounds:

            def fast(edits: Sequence[Edit], metas: Any = turn.metas) -> list[Picture]:
                answers = results(edits)
                metas.extend(answer.meta for answer in answers)
                return pictures(answers)

            turn.run(MASKSERVE, fast)
            turn.run(ALL_TOKENS, lambda edits: pictures(results(edits, cache="off")))


def run_by_diffusers(pipeline: Any, rounds: Sequence[Round]) -> None:
    """Run the rounds by a `rivals.pipeline_model.Pipeline`: one edit after the other, and all in
    one call.
    """

    def in_calls_of(count: int) -> Callable[[Sequence[Edit]], list[Picture]]:
        def edit_all(edits: Sequence[Edit]) -> list[Picture]:
            calls = [pipeline.read(edit.tensors()) for edit in edits]
            files = [
                file
                for at in range(0, len(calls), count)
                for file, _ in pipeline.pictures(calls[at : at + count])
            ]
            return [np.asarray(Image.open(io.BytesIO(file))) for file in files]

        return edit_all

    for turn in rounds:
        turn.run(DIFFUSERS, in_calls_of(1))
        turn.run(ONE_CALL, in_calls_of(EDITS))


class Burst:
    """The measured rates and pictures of the rounds.

    Args:
        rounds: all rounds, run by all sides.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        _, *self.rounds = rounds

    def rate(self, side: str) -> float:
        """Return a side's edits per second: the median of the rounds."""
        return statistics.median(len(r.edits) / r.seconds[side] for r in self.rounds)

    def ratio(self, side: str) -> str:
        rate = self.rate(side)
        return f"{rate:.1f} edits/s ({self.rate(MASKSERVE) / rate:.1f}x)"

    def cells(self) -> list[str]:
        """Return the cells of the demonstration's table."""
        metas = [meta for r in self.rounds for meta in r.metas]
        computed = sum(meta["computed_tokens"] for meta in metas)
        computed /= sum(meta["steps"] * meta["total_tokens"] for meta in metas)
        kinds = Counter(meta["cache"] for meta in metas)
        return [
            NAME,
            f"{self.rate(MASKSERVE):.1f} edits/s",
            self.ratio(ALL_TOKENS),
            self.ratio(DIFFUSERS),
            ", ".join(kind for kind, _ in kinds.most_common()),
            f"{computed:.0%}",
            f"{self.likeness():.1f} dB",
        ]

    def likeness(self) -> float:
        """Return the likeness of maskserve's pictures to those with all tokens in dB, over all
        masked pixels.
        """
        inside = np.concatenate([_mask(edit).ravel() for r in self.rounds for edit in r.edits])
        fast, dense = (
            np.concatenate([x.reshape(-1, 3) for r in self.rounds for x in r.pictures[side]])
            for side in (MASKSERVE, ALL_TOKENS)
        )
        return psnr(fast[inside], dense[inside])

    def sheet_row(self) -> SheetRow:
        """Return the last round's pictures."""
        last = self.rounds[-1]
        sources = [
            np.asarray(shaded(Image.open(io.BytesIO(edit.image)), Image.fromarray(_mask(edit))))
            for edit in last.edits
        ]
        cells = [("photographs and masks", _contact(sources))]
        for side in (MASKSERVE, ALL_TOKENS, DIFFUSERS):
            cells.append((f"{side}, {self.rate(side):.1f} edits/s", _contact(last.pictures[side])))
        return SheetRow(NAME, cells)


def _mask(edit: Edit) -> npt.NDArray[np.bool_]:
    return np.asarray(Image.open(io.BytesIO(edit.mask))) >= 128


def _contact(pictures: Sequence[Picture]) -> Image.Image:
    """Return pictures of one size side by side, in rows, CELL pixels wide."""
    rows = [
        np.concatenate(pictures[at : at + _COLUMNS], axis=1)
        for at in range(0, len(pictures), _COLUMNS)
    ]
    whole = Image.fromarray(np.concatenate(rows))
    return whole.resize((CELL, CELL * whole.height // whole.width), Image.Resampling.LANCZOS)
