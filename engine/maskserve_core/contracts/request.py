"""One checked edit on its way through the worker's models: the tensors ACCEPTED and REQUEST.

A front reads the client's SETTINGS once and refuses what it can. From there on the edit travels as
a checked record, which msgspec reads in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from maskserve_core.contracts.settings import ControlSetting, EditSettings, LoraSetting


class Lora(LoraSetting, frozen=True):
    """A LoRA of an edit, with the file that its name stands for since the edit was accepted."""

    version: str = ""
    """Which file of that name (`adapters.catalogue.Adapter.version`), so that all stages take the
    same one.
    """
    text: bool = False
    """Whether it changes text encoders, too: its file is then on the host before the edit leaves
    the front, as an encoder waits for nobody.
    """


class ResolvedControl(ControlSetting, frozen=True):
    """A control of an edit, with the ControlNet that its name stands for since the edit was
    accepted, and with its picture.
    """

    version: str = ""
    """Which ControlNet of that name (`models.control_nets.ControlNet.version`)."""


@dataclass(frozen=True, slots=True)
class AcceptedEdit:
    """What a front hands to preprocess, beside the client's IMAGE and MASK."""

    prompt: str
    settings: EditSettings
    """Checked, with the worker's defaults, a seed and a request id."""
    accepted_ns: int
    """Wall clock (time.time_ns) when the front took the request; deadlines count from here."""
    due_ms: int | None = None
    """From then on, of what the client asked; None: it asked for nothing."""
    after_token_s: float = 0.0
    """Seconds from an edit's last step to its answer, of late, per token of its picture."""
    loras: tuple[Lora, ...] = ()
    controls: tuple[ResolvedControl, ...] = ()

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedEdit:
        return _decode_accepted(raw)


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
    """As of AcceptedEdit."""
    due_ms: int | None = None
    after_token_s: float = 0.0
    loras: tuple[Lora, ...] = ()
    controls: tuple[ResolvedControl, ...] = ()
    """Each with its `image`."""
    pixels_id: str = ""
    """Digest of the source's pixels at model resolution; entries are keyed on it."""
    edit_boxes: tuple[tuple[int, int, int, int], ...] = ()
    """Top, left, bottom and right of what the edit mask covers, in pixels of the model's size."""
    timings_ms: dict[str, float] = field(default_factory=dict)

    @property
    def template_noise_seed(self) -> int:
        """Of the noise that all edits of these pixels share."""
        return int((self.pixels_id or self.template_id)[:12], 16)

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> EditRequest:
        return _decode_request(raw)


_encode = msgspec.json.Encoder().encode
_decode_accepted = msgspec.json.Decoder(AcceptedEdit).decode
_decode_request = msgspec.json.Decoder(EditRequest).decode
