"""Memory of a worker's device by use, measured at its start."""

from __future__ import annotations

import msgspec

_MIB, _GIB = 2**20, 2**30


class MemoryTable(msgspec.Struct, frozen=True):
    """Bytes of one device; parts on another device do not count."""

    device: str
    total: int
    weights: int
    """Bytes of the denoiser's weights."""
    encoder: int
    """Bytes of the encoder's weights, and of encoding one edit."""
    decoder: int
    """Bytes of the decoder's weights, and of decoding one edit."""
    step: int
    """Bytes for a step of `rows` rows and for a template that is primed meanwhile."""
    cache: int
    """Bytes of the device's budget for entries."""
    others: int
    """Bytes that other processes and CUDA itself had taken when the worker started."""
    left: int
    """Bytes that are left; below 0: budgets exceed the memory."""
    rows: int
    """`[engine] max_rows`."""
    template: int
    """Bytes of a square template of the model's native size, all anchors."""
    adapters: int = 0
    """Bytes of the device's budget for LoRAs; 0 where edits may name none."""
    controls: int = 0
    """Bytes of the device's budget for ControlNets, and of what rows cache of the largest one."""
    own: int = 0
    """Bytes of the cache's budget that refresh steps of an edit of native size with a small mask
    leave; 0: edits have no refresh steps."""

    def text(self) -> str:
        """For people: a line per part, in GiB; `reserved` is kept free and may be empty yet."""
        notes = {
            "weights": "the denoiser",
            "encoder": "its weights and working memory",
            "decoder": "its weights and working memory",
            "step": f"{self.rows} rows",
            "adapters": "LoRAs of edits",
            "controls": "ControlNets of edits, and what rows keep from them",
            "cache": f"{self.cache // max(1, self.template)} templates of "
            f"{self.template / _MIB:.1f} MiB",
            "others": "other processes",
        }
        if self.own:
            many, entry_mib = self.cache // self.own, self.own / _MIB
            notes["cache"] += f", or {many} edits with refresh steps of {entry_mib:.1f} MiB"
        lines = [f"memory of {self.device}: {self.total / _GIB:.2f} GiB"]
        adapter_budgets = [part for part in ("adapters", "controls") if getattr(self, part)]
        groups = {
            "taken": ("weights", "encoder", "decoder", "others"),
            "reserved": ("step", *adapter_budgets, "cache"),
            "": ("left",),
        }
        for group, parts in groups.items():
            for part in parts:
                size = getattr(self, part) / _GIB
                note = ": ".join(filter(None, (group, notes.get(part, ""))))
                lines.append(f"  {part:8}{size:8.2f}  {note}".rstrip())
        return "\n".join(lines)
