"""What the memory of a worker's device goes to, as it is told at its start."""

from __future__ import annotations

import msgspec

_MIB, _GIB = 2**20, 2**30


class MemoryTable(msgspec.Struct, frozen=True):
    """Bytes of one device. Parts that lie on another device count nothing here."""

    device: str
    total: int
    weights: int
    """Of the denoiser."""
    encoder: int
    """Its weights, and what encoding one edit takes beside them."""
    decoder: int
    """Likewise."""
    step: int
    """What a step of `rows` rows takes, and a template that is primed meanwhile."""
    cache: int
    """The device's budget for entries."""
    others: int
    """Taken by others when the worker started: other processes, CUDA's own."""
    left: int
    """Below 0: more is promised than there is."""
    rows: int
    """`[engine] max_rows`."""
    template: int
    """Of a square template of the model's native size, all its anchors."""
    adapters: int = 0
    """The device's budget for LoRAs; 0 where edits may name none."""
    controls: int = 0
    """The same for ControlNets, and what rows keep of the largest one."""
    own: int = 0
    """Of the cache's budget, what anchors of its own leave of an edit of native size with a small
    mask; 0: edits have none."""

    def text(self) -> str:
        """For people: a line per part, in GiB; `reserved` is kept free and may be empty yet."""
        notes = {
            "weights": "the denoiser's",
            "encoder": "and what encoding takes",
            "decoder": "and what decoding takes",
            "step": f"{self.rows} rows",
            "adapters": "LoRAs of edits",
            "controls": "ControlNets of edits, and what these keep of them",
            "cache": f"{self.cache // max(1, self.template)} templates of "
            f"{self.template / _MIB:.1f} MiB",
            "others": "other processes",
        }
        if self.own:
            many, entry_mib = self.cache // self.own, self.own / _MIB
            notes["cache"] += f", or {many} edits with own anchors of {entry_mib:.1f} MiB"
        lines = [f"memory of {self.device}: {self.total / _GIB:.2f} GiB"]
        named = [part for part in ("adapters", "controls") if getattr(self, part)]
        groups = {
            "taken": ("weights", "encoder", "decoder", "others"),
            "reserved": ("step", *named, "cache"),
            "": ("left",),
        }
        for group, parts in groups.items():
            for part in parts:
                size = getattr(self, part) / _GIB
                note = ": ".join(filter(None, (group, notes.get(part, ""))))
                lines.append(f"  {part:8}{size:8.2f}  {note}".rstrip())
        return "\n".join(lines)
