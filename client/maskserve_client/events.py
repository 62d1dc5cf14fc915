"""The events of an edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from PIL import Image


@dataclass(frozen=True, slots=True)
class EditResult:
    """An edited picture."""

    image: Image.Image
    """RGB, of the source's size; without a mask, of the size at which the model works. RGBA if the
    source or the model has transparency."""
    encoded: bytes
    """The picture's file from the server."""
    meta: dict[str, Any]
    """The final META: seed, request_id, template_id, mask_ratio, cache, timings_ms, …"""

    @property
    def seed(self) -> int:
        """The seed used: send it again to get this picture again."""
        return int(self.meta["seed"])

    @property
    def request_id(self) -> str:
        return str(self.meta["request_id"])

    @property
    def result_template_id(self) -> str | None:
        """Id of the template under which the setting `keep_result` keeps this picture.

        Use it as the next edit's `template_id`. None: it was not requested, or the server had no
        room.
        """
        template_id = self.meta.get("result_template_id")
        return None if template_id is None else str(template_id)


@dataclass(frozen=True, slots=True)
class Progress:
    """A step is done."""

    step: int
    steps: int
    """Model calls of the whole edit."""
    restarts: int = 0
    """Restarts: its worker failed and a router sent the edit to another."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The picture at an intermediate step."""

    step: int
    steps: int
    image: Image.Image
    restarts: int = 0
    """Restarts, as in Progress."""


@dataclass(frozen=True, slots=True)
class Final:
    """The edit is done; nothing follows."""

    result: EditResult


Event: TypeAlias = Progress | Preview | Final
