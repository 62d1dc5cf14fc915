"""The REQUEST tensor: one checked edit on its way through the worker's models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from maskserve_core.contracts.settings import EditSettings


@dataclass(frozen=True, slots=True)
class EditRequest:
    """What preprocess hands on. Sizes are (height, width) in pixels."""

    request_id: str
    prompt: str
    settings: EditSettings
    seed: int
    template_id: str
    """Digest of the decoded source pixels and their size."""
    source_size: tuple[int, int]
    model_size: tuple[int, int]
    accepted_ns: int
    """Wall clock (time.time_ns) when the front took the request; deadlines count from here."""
    pixels_id: str = ""
    """Digest of the source's pixels at model resolution; entries are keyed on it."""
    timings_ms: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> bytes:
        # dataclasses.asdict copies everything deeply, which takes three times as long.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["settings"] = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)}
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> EditRequest:
        return cls.from_values(json.loads(raw))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> EditRequest:
        """Of `to_json` read back; `values` is used up."""
        values["settings"] = EditSettings(**values["settings"])
        values["source_size"] = tuple(values["source_size"])
        values["model_size"] = tuple(values["model_size"])
        return cls(**values)
