"""One checked edit between the worker's models: the tensors ACCEPTED and REQUEST.

A front reads the client's SETTINGS once. Then the edit is a checked record, which msgspec reads in
microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from maskserve_common.config import Config
from maskserve_common.contracts.settings import (
    ControlSetting,
    EditSettings,
    IpAdapterSetting,
    LoraSetting,
)
from maskserve_common.errors import InvalidRequest

EditKind = Literal["inpaint", "edit", "generate"]
"""`inpaint`: repaint the mask of a source; `edit`: a new version of the whole source, by the
model's edit or image-to-image pipeline; `generate`: a picture without a source, by its
text-to-image pipeline (docs/adr/0086).
"""
EDIT_KINDS: tuple[EditKind, ...] = get_args(EditKind)


class Lora(LoraSetting, frozen=True):
    """A LoRA of an edit, with the file that its name had when the edit was accepted."""

    version: str = ""
    """Version of the adapter's file (`maskserve_lora.catalogue.KnownAdapter.version`): all stages
    use the same one."""
    text: bool = False
    """Whether it changes text encoders, too: its file is then on the host before the edit leaves
    the front, because an encoder never waits."""
    notes: tuple[str, ...] = ()
    """Notes on skipped parts of the file and on assumptions (`maskserve_lora.lora_plan`)."""


class ResolvedControl(ControlSetting, frozen=True):
    """A control of an edit, with its picture, and with the ControlNet that its name had when the
    edit was accepted.
    """

    version: str = ""
    """Which ControlNet of that name (`spec.control_nets.KnownControlNet.version`)."""
    fills: bool = False
    """Whether it fills the edit's mask."""


class ResolvedIpAdapter(IpAdapterSetting, frozen=True):
    """An edit's IP-Adapter, with the file that its name had when the edit was accepted."""

    side: int = 0
    """Side of the square picture that its image encoder sees, in pixels."""
    content: str = ""
    """Digest of its file, if a stage service reads its own copy; else empty."""


@dataclass(frozen=True, slots=True)
class AcceptedEdit:
    """An edit that a front passes to preprocess, beside the client's IMAGE and MASK."""

    prompt: str
    settings: EditSettings
    """Settings, checked, with the worker's defaults, a seed and a request id."""
    accepted_ns: int
    """Wall clock (time.time_ns) when the front took the request, from which deadlines count."""
    kind: EditKind = "inpaint"
    due_ms: int | None = None
    """Milliseconds from then until the client wants the answer; None: no wish."""
    after_token_s: float = 0.0
    """Recent seconds from an edit's last step to its answer, per token of its picture."""
    loras: tuple[Lora, ...] = ()
    controls: tuple[ResolvedControl, ...] = ()
    ip_adapter: ResolvedIpAdapter | None = None

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> AcceptedEdit:
        return _decode_accepted(raw)


@dataclass(frozen=True, slots=True)
class Reference:
    """A picture of IMAGE behind the first, as the model sees it."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    pixels_id: str
    """Digest of its pixels at that size."""


@dataclass(frozen=True, slots=True)
class EditRequest:
    """An edit as preprocess passes it on. Sizes are (height, width) in pixels."""

    request_id: str
    prompt: str
    settings: EditSettings
    seed: int
    template_id: str
    """Digest of the decoded source pixels and their size; empty without a source."""
    source_size: tuple[int, int]
    """Size of the answer, with what `expand` adds; without a mask, the model's size or the middle
    of it."""
    model_size: tuple[int, int]
    accepted_ns: int
    """Time of acceptance, as in `AcceptedEdit`."""
    kind: EditKind = "inpaint"
    due_ms: int | None = None
    after_token_s: float = 0.0
    loras: tuple[Lora, ...] = ()
    controls: tuple[ResolvedControl, ...] = ()
    """ControlNets, each with its `image`."""
    ip_adapter: ResolvedIpAdapter | None = None
    pixels_id: str = ""
    """Digest of the source's pixels at model resolution; entries are keyed on it. Empty without a
    source."""
    references: tuple[Reference, ...] = ()
    """Pictures that the model sees beside the source."""
    ip_picture: Reference | None = None
    """Picture of the IP-Adapter, behind the references; None: the edit has no IP-Adapter."""
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part that the model sees; None: all."""
    alpha: bool = False
    """Whether the answer is transparent where the source is."""
    edit_boxes: tuple[tuple[int, int, int, int], ...] = ()
    """Top, left, bottom and right of the edit mask, in pixels of the model's size."""
    warnings: tuple[str, ...] = ()
    """Warnings of META to the client; the edit runs nevertheless."""
    timings_ms: dict[str, float] = field(default_factory=dict)

    @property
    def view_size(self) -> tuple[int, int]:
        """(height, width) of the model's view, in the source's pixels."""
        return self.source_size if self.window is None else self.window[2:]

    @property
    def reference_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of each further reference."""
        return [reference.size for reference in self.references]

    @property
    def used_loras(self) -> tuple[Lora, ...]:
        """LoRAs with an effect."""
        return tuple([lora for lora in self.loras if lora.scale])

    @property
    def template_noise_seed(self) -> int:
        """Seed of the noise that all edits of these pixels share."""
        return int((self.pixels_id or self.template_id)[:12], 16)

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> EditRequest:
        return _decode_request(raw)


_encode = msgspec.json.Encoder().encode
_decode_accepted = msgspec.json.Decoder(AcceptedEdit).decode
_decode_request = msgspec.json.Decoder(EditRequest).decode


def steps_run(num_inference_steps: int, strength: float, *, rounds_up: bool = True) -> int:
    """Return the denoising steps of a schedule that run, by diffusers' image-to-image rule.

    Args:
        num_inference_steps: steps of the whole schedule.
        strength: share of it that is run.
        rounds_up: as `ModelSpec.strength_rounds_up`.
    """
    initial = min(num_inference_steps * strength, num_inference_steps)
    if not rounds_up:
        return int(initial)
    return num_inference_steps - int(max(num_inference_steps - initial, 0))


def model_steps(count: int, interval: int) -> tuple[int, ...]:
    """Return the steps of a schedule in which the model runs, as in diffusers' TaylorSeer: the
    first two, the fourth, and then one in `interval`. A line gives the answers of the others.

    Args:
        count: steps of the schedule.
        interval: `EditSettings.step_interval`.
    """
    if interval == 1:
        return tuple(range(count))
    return tuple(step for step in range(count) if step < 2 or (step - 3) % interval == 0)


def predicted_steps(settings: EditSettings) -> int:
    """Return the steps of an edit in which the model does not run (`step_interval`).

    Args:
        settings: settings with the worker's defaults.
    """
    assert settings.num_inference_steps is not None, "the worker has filled it in"
    scheduled = steps_run(settings.num_inference_steps, settings.strength)
    return scheduled - len(model_steps(scheduled, settings.step_interval or 1))


def check_prompt(raw: bytes, config: Config) -> str:
    """The prompt's text. An empty prompt is allowed: it asks for whatever fits.

    Raises:
        InvalidRequest: naming PROMPT.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("PROMPT", "is not UTF-8", "UTF-8 text") from None
    check_text("PROMPT", text, config)
    return text


def check_text(field: str, text: str, config: Config) -> None:
    longest = config.limits.max_prompt_chars
    if len(text) > longest:
        raise InvalidRequest(field, f"is {len(text)} characters long", f"up to {longest}")
    if "\0" in text:
        raise InvalidRequest(field, "holds a NUL character", "text without NUL")
