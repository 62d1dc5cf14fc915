"""What a cached UNet edit lacks, part by part: its entries are replaced by what the edit itself
computes there.

A row whose latents outside the mask are pinned to the template, but which computes every token,
tells at each step the keys and values and the stacks' ends that the edit itself has outside. With
all of them a cached row loses only what pinning loses; with some of them it shows what the others
cost. Everything is kept in the model's format at an anchor for every step, so neither stride nor
format has a part in it.

    python scripts/bench unet_parts --n 4 --json docs/benchmarks/unet_parts.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from maskserve_core.contracts.keys import Anchor
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.families.unet.forward import PassInput
from maskserve_engine.families.unet.rows import UnetPrimingRow, UnetRow
from maskserve_engine.job import EditJob
from maskserve_harness.benchmarks.machine import processor
from maskserve_harness.benchmarks.replay import Replay
from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.edit_classes import CLASSES, edits_of
from maskserve_harness.demo_model.scenes import Edit
from maskserve_harness.quality.metrics import EditQuality, Picture, by_class, compare
from maskserve_harness.quality.report import table
from maskserve_harness.quality.unet_command import KEPT, Rig

Pass = Literal["prompt", "negative"]


@dataclass(frozen=True)
class Parts:
    """Of an edit's entries, those that are the edit's own; the others are the template's."""

    name: str
    keys: bool = False
    """Keys and values of the tokens outside."""
    ends: bool = False
    """What stacks hand on of the tokens outside."""
    means: bool = False
    """Of the ends, the mean of each channel over the picture alone: that is what norms behind
    them read."""
    passes: tuple[Pass, ...] = ("prompt", "negative")
    """In which."""
    steps: tuple[int, int | None] = (0, None)
    """From the first to before the second."""
    primed: Literal["", "prompts", "mask", "prompts and mask"] = ""
    """What the template's entries know of the edit: its prompts in each pass, its mask and masked
    picture in the model's extra channels."""
    dense: int = 0
    """First steps that compute every token."""
    lifted: bool = False
    """Whether later steps read the template's, to which is added what the last dense step found:
    the edit's own less the template's at that step."""
    ring: int = 1


PARTS = (
    Parts("the template's"),
    Parts("own keys and values", keys=True),
    Parts("own ends", ends=True),
    Parts("own means of ends", means=True),
    Parts("own keys, values and ends", keys=True, ends=True),
    Parts("own, prompt's pass alone", keys=True, ends=True, passes=("prompt",)),
    Parts("own, negative pass alone", keys=True, ends=True, passes=("negative",)),
    Parts("own, first half of the steps", keys=True, ends=True, steps=(0, 10)),
    Parts("own, second half of the steps", keys=True, ends=True, steps=(10, None)),
    Parts("primed with the prompts", primed="prompts"),
    Parts("primed with the mask", primed="mask"),
    Parts("primed with prompts and mask", primed="prompts and mask"),
    Parts("the template's, two dense steps", dense=2),
    Parts("the template's, eight dense steps", dense=8),
    Parts("two dense steps, ends lifted", dense=2, lifted=True, ends=True),
    Parts("two dense steps, all lifted", dense=2, lifted=True, keys=True, ends=True),
    Parts("the template's, ring of four", ring=4),
)


@dataclass(slots=True)
class TracedRow(UnetPrimingRow):
    """An edit's row that keeps, as a priming row does, what all tokens are at each of its steps."""

    edit: UnetRow | None = None
    made: list[AnchorEntry] = field(default_factory=list)

    @classmethod
    def of(cls, edit: UnetRow, blocks: int) -> TracedRow:
        assert edit.inactive is not None
        anchors = tuple(Anchor(t / 1000.0, t) for t in edit.timesteps_ahead)
        return cls(edit.request_id, edit.inactive.template, anchors, (), (KEPT,) * blocks, "model",
                   edit=edit)  # fmt: skip

    @property
    def row(self) -> UnetRow:
        assert self.edit is not None
        return self.edit

    def passes(self) -> list[PassInput]:
        return self.row.passes()

    def sample(self) -> Tensor:
        UnetPrimingRow.sample(self)
        return self.row.sample()

    def advance(self, answers: Tensor) -> None:
        self.row.advance(answers)
        UnetPrimingRow.advance(self, answers)
        self.made.append(self.take_entry())


class PartsRig(Rig):
    """The demo UNet, whose cached rows read entries of two passes."""

    def traced(self, edits: Sequence[Edit], ring: int) -> list[list[AnchorEntry]]:
        """What each edit itself has at each of its steps, in both passes."""
        found = []
        for i, edit in enumerate(edits):
            job = self.job(edit, i, ring)
            own = self.adapter.cached_row(job, job.request.template_noise_seed)
            row = TracedRow.of(own, self.adapter.blocks)
            while row.step < row.steps:
                self.adapter.step([row], None)
            found.append(row.made)
        return found

    def primed(self, edits: Sequence[Edit], knows: str) -> list[list[AnchorEntry]]:
        """Each template's entries, in both passes."""
        found = []
        for i, edit in enumerate(edits):
            job = self.job(edit, i)
            row = self._priming_row(job, 1, "model")
            if "mask" in knows:
                row.template = replace(
                    row.template, condition=self.adapter.dense_row(job).condition
                )
            row.prompts = self._prompts(job) if "prompts" in knows else row.prompts[:1] * 2
            made = []
            while row.step < row.steps:
                self.adapter.step([row], None)
                made.append(row.take_entry())
            found.append(made)
        return found

    def _prompts(self, job: EditJob) -> tuple[Any, ...]:
        assert job.negative is not None, "these edits are guided"
        return tuple(self.adapter.prompt(each, job) for each in (job.conditioning, job.negative))

    def made_of(
        self,
        edits: Sequence[Edit],
        entries: Sequence[list[AnchorEntry]],
        traced: Sequence[list[AnchorEntry]],
        parts: Parts,
    ) -> list[Picture]:
        """The edits by cached rows that read such entries, of both passes each."""
        rows, self.replay = [], Replay(self.adapter)  # whose entries nobody reads any more
        self.adapter.entry_halves = 2
        for i, edit in enumerate(edits):
            job = self.job(edit, i, parts.ring)
            own_steps = range(self.steps)[slice(*parts.steps)]
            then = entries[i][parts.dense - 1], traced[i][parts.dense - 1]
            per_step: list[AnchorEntry | None] = [
                _mixed(theirs, own, parts, then if parts.lifted else None)
                if step in own_steps
                else theirs
                for step, (theirs, own) in enumerate(zip(entries[i], traced[i], strict=True))
            ]
            per_step[: parts.dense] = [None] * parts.dense
            rows.append(self.replay.cached_row(job, per_step, job.request.template_noise_seed))
        return self._finish(edits, self.run(rows, ("kv",) * self.adapter.blocks))


def _mixed(
    theirs: AnchorEntry,
    own: AnchorEntry,
    parts: Parts,
    then: tuple[AnchorEntry, AnchorEntry] | None,
) -> AnchorEntry:
    """The template's entry with some parts of the edit's own; or lifted, by both entries then."""
    taken = [name in parts.passes for name in ("prompt", "negative")]

    def changed(part: str, wanted: bool, block: int) -> list[Tensor]:
        of, mine = (_data(each, block, part) for each in (theirs, own))
        if not wanted:
            return of
        if then is not None:
            before, after = (_data(each, block, part) for each in then)
            return [a + c - b for a, b, c in zip(of, before, after, strict=True)]
        found = []
        for a, b in zip(of, mine, strict=True):
            if part == "end" and not parts.ends:
                b = torch.cat([x + (y - x).mean(0) for x, y in _halves(a, b)])
            pairs = zip(_halves(a, b), taken, strict=True)
            found.append(torch.cat([y if take else x for (x, y), take in pairs]))
        return found

    blocks = []
    for block in range(len(theirs.blocks)):
        keys, values = changed("kv", parts.keys, block)
        end = changed("end", parts.ends or parts.means, block)
        coded = [encode(each, "model") for each in (keys, values, *end)]
        blocks.append(BlockEntry(None, coded[0], coded[1], coded[2] if end else None))
    return AnchorEntry(theirs.anchor, tuple(blocks))


def _data(entry: AnchorEntry, block: int, part: str) -> list[Tensor]:
    return [coded.data for coded in entry.blocks[block].part(part)]


def _halves(*both: Tensor) -> list[tuple[Tensor, ...]]:
    """Of each the first and the second pass's half, side by side."""
    return list(zip(*(each.chunk(2) for each in both), strict=True))


def measure(rig: PartsRig, edits: Sequence[Edit]) -> dict[str, list[EditQuality]]:
    """What each mixture makes of each edit, against our dense rows."""
    dense = rig.dense(edits)
    traced = {1: rig.traced(edits, 1)}
    entries: dict[str, list[list[AnchorEntry]]] = {}
    found = {"dense": compare(edits, dense, dense)}
    for parts in PARTS:
        if parts.primed not in entries:
            entries = {parts.primed: rig.primed(edits, parts.primed)}
        found[parts.name] = compare(
            edits, rig.made_of(edits, entries[parts.primed], traced[1], parts), dense
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL.with_name("demo-unet"))
    add("--n", type=int, default=4, help="edits of each class (default 4)")
    add("--classes", nargs="+", choices=CLASSES, default=["strip", "pieces"])
    add("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rig = PartsRig(args.model, 20, 0.0)
    systems: dict[str, dict[str, list[EditQuality]]] = {}
    with torch.inference_mode():
        for name in args.classes:
            edits = edits_of(name, args.n)
            for edit in edits:  # entries of one take gigabytes
                for system, own in measure(rig, [edit]).items():
                    systems.setdefault(system, {}).setdefault(name, []).extend(own)
            print(f"{time.strftime('%H:%M:%S')}  {name}: {len(edits)} edits", flush=True)
    judged = {system: by_class(found) for system, found in systems.items()}
    print(table(judged))
    if args.json:
        report = {
            "command": " ".join(sys.argv),
            "hardware": processor(),
            "date": time.strftime("%Y-%m-%d"),
            "steps": rig.steps,
            "systems": judged,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
