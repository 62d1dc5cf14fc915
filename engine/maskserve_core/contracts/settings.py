"""The SETTINGS tensor: what a client may ask of one edit (design §3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from maskserve_core.adapters.storage import NAME as ADAPTER_NAME
from maskserve_core.contracts.keys import SCOPE, TEMPLATE_ID
from maskserve_core.errors import InvalidRequest
from maskserve_core.reading import Misread, Table, given, read

MaskMode = Literal["auto", "white", "alpha"]
CacheMode = Literal["auto", "off", "require"]
AdapterMode = Literal["exact", "fast"]
OutputFormat = Literal["png", "jpeg", "webp"]
OutputEncoding = Literal["auto", "raw", "base64"]
LateMode = Literal["drop", "finish"]
ReuseMode = Literal["exact", "elastic"]
MASK_MODES: tuple[MaskMode, ...] = get_args(MaskMode)
CACHE_MODES: tuple[CacheMode, ...] = get_args(CacheMode)
LATE_MODES: tuple[LateMode, ...] = get_args(LateMode)
REUSE_MODES: tuple[ReuseMode, ...] = get_args(ReuseMode)
ADAPTER_MODES: tuple[AdapterMode, ...] = get_args(AdapterMode)

MAX_SETTINGS_BYTES = 64 * 1024
MAX_SEED = 2**63 - 1
MAX_DEADLINE_MS = 24 * 3600 * 1000
PRIORITIES = (-100, 100)
MAX_LORAS = 4
MAX_CONTROLS = 3

Pixels = Annotated[int, Meta(ge=0, le=512)]
Guidance = Annotated[float, Meta(ge=0, le=1000)]
Name = Annotated[str, Meta(max_length=256, description="a model name of up to 256 characters")]
Text = Annotated[str, Meta(max_length=32_000)]
AdapterName = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{ADAPTER_NAME.pattern})\Z",
        max_length=128,
        description="1 to 128 letters, digits, or any of . _ -",
    ),
]
TemplateId = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{TEMPLATE_ID.pattern})\Z",
        max_length=64,
        description="16 to 64 lower-case hexadecimal digits",
    ),
]
RequestId = Annotated[
    str,
    Meta(  # a router's scope (`scopes`), then the client's own name
        pattern=rf"\A({SCOPE.pattern}!)?[A-Za-z0-9._:/-]{{1,128}}\Z",
        max_length=161,
        description="1 to 128 letters, digits, or any of . _ : / -",
    ),
]


class LoraSetting(Table, frozen=True):
    """A LoRA that an edit asks for."""

    name: AdapterName
    """Of the adapter, as the worker's catalogue has it; never a path or URL."""
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    """What its update is multiplied by; negative leads away from it, 0 is none."""


LoraSettings = Annotated[
    tuple[LoraSetting, ...],
    Meta(
        max_length=MAX_LORAS,
        description=f'up to {MAX_LORAS} objects such as {{"name": "hollow", "scale": 0.8}}',
    ),
]


class ControlSetting(Table, frozen=True):
    """A control picture of an edit, and the ControlNet that reads it."""

    name: AdapterName
    """Of the ControlNet; never a path or URL."""
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """What the ControlNet adds is multiplied by it; 0 is none."""
    start: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the edit's steps before which it adds nothing."""
    end: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the edit's steps behind which it adds nothing."""
    image: Annotated[int, Meta(ge=0, le=MAX_CONTROLS - 1)] | None = None
    """Which picture of CONTROL; by default the one at the control's own place."""
    mode: Annotated[int, Meta(ge=0, le=255)] | None = None
    """The kind of picture, for a union ControlNet, which has several."""


ControlSettings = Annotated[
    tuple[ControlSetting, ...],
    Meta(
        max_length=MAX_CONTROLS,
        description=f'up to {MAX_CONTROLS} objects such as {{"name": "outline", "scale": 0.8}}',
    ),
]


class EditSettings(Table, frozen=True):
    """Settings of one edit; `None` means the model's default."""

    model: Name | None = None
    """Name of the model the client expects; another name than the worker's is refused."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """Seed of the request's noise; drawn by the server and reported when absent."""
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Steps of the full schedule; `strength` below 1 runs fewer of them."""
    guidance_scale: Guidance | None = None
    """Embedded guidance (FLUX), or the scale of classifier-free guidance (UNets)."""
    true_cfg_scale: Annotated[float, Meta(ge=1, le=100)] | None = None
    """Classifier-free guidance of FLUX with a negative prompt; 1 is off."""
    negative_prompt: Text | None = None
    """What to steer away from; only with models that run classifier-free guidance."""
    strength: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the schedule that is run."""
    mask_mode: MaskMode = "auto"
    """`white`: white edits; `alpha`: transparent edits; `auto`: alpha if there is any."""
    mask_dilate: Pixels = 0
    """Pixels by which the mask grows, at the source's size."""
    mask_feather: Pixels = 0
    """Pixels over which the edit fades into the source."""
    mask_ring: Annotated[int, Meta(ge=0, le=64)] | None = None
    """Tokens round the mask that a cached edit computes too (64: all of a 1024x1024 picture, from
    anywhere in it); what is pasted stays the mask's."""
    first_block_threshold: Annotated[float, Meta(ge=0, le=10)] | None = None
    """Relative change of what the first block adds below which a step leaves the other blocks out
    (FirstBlockCache); 0 leaves out none, beyond 1 nearly every step is left out."""
    output_format: OutputFormat = "png"
    """Encoding of the answer."""
    output_quality: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Of JPEG (95 unless it is given) and of WebP (lossless unless it is given); PNG has none."""
    output_encoding: OutputEncoding = "auto"
    """`raw` bytes or `base64` text; `auto`: as MASK came, which JSON carries as text only."""
    progress: bool = False
    """Send a progress event after every step (`edit_stream`)."""
    preview_every: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Send a preview image every so many steps; 0 sends none (`edit_stream`)."""
    cache: CacheMode = "auto"
    """Whether the template's cached activations may be used; `require` waits for priming."""
    reproducible: bool = False
    """Follow a fixed plan in steps of its own: equal requests give equal pixels at any load."""
    loras: LoraSettings = ()
    """LoRAs whose updates are added up, each with its own scale."""
    adapters: AdapterMode = "exact"
    """`exact`: no step runs before the LoRAs are there; `fast`: the first steps may run without,
    and steps add what a ControlNet service said of latents before theirs (`[controls] fast`)."""
    controls: ControlSettings = ()
    """ControlNets whose additions are summed, each for a picture of CONTROL."""
    private_prompt: bool = False
    """Keep the prompt's embeddings for edits of the same API key only: whether the prompt was used
    before cannot be told from another key's times."""
    template_id: TemplateId | None = None
    """A registered template, or a kept result, to edit in place of IMAGE."""
    keep_result: bool = False
    """Keep the edited picture for some time as a template of the client's own, whose id META names
    as `result_template_id`, and prime it in the background: the next edit may go on with it."""
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """The answer is due after this many milliseconds."""
    on_late: LateMode = "drop"
    """What becomes of an edit that is not done by then: `drop`: it ends with an error; `finish`: it
    goes on."""
    reuse: ReuseMode = "exact"
    """`elastic`: an edit that would be late may leave steps out to be in time (FLUX)."""
    reuse_floor: Annotated[float, Meta(ge=0, le=100)] | None = None
    """dB in the mask against a dense edit, below which no way of doing so is taken as it was
    measured on the demo models; given with `reuse` `elastic`."""
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] = 0
    """Higher runs first."""
    request_id: RequestId | None = None
    """Name for cancel and logs; made by the server when absent."""

    @property
    def limit_ms(self) -> int | None:
        """When nobody wants the answer any more; None: that never comes."""
        return self.deadline_ms if self.on_late == "drop" else None

    @property
    def insists(self) -> bool:
        """Whether the edit waits for its template rather than go without the cache."""
        return self.cache == "require" or self.reproducible


def no_duplicates(field: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """For `json.loads`: an object in which each key stands once."""

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InvalidRequest(f"{field}.{key[:40]}", "is given twice", "each key once")
            values[key] = value
        return values

    return collect


_settings_object = no_duplicates("SETTINGS")


def parse_settings(raw: bytes) -> EditSettings:
    """Check the SETTINGS tensor's bytes.

    `null` stands for "not given". JSON's NaN and Infinity are refused by the ranges, and an unknown
    or repeated key is an error: a misspelt setting must not be ignored.

    Raises:
        InvalidRequest: naming `SETTINGS` or `SETTINGS.<key>`.
    """
    if len(raw) > MAX_SETTINGS_BYTES:
        raise InvalidRequest("SETTINGS", f"is {len(raw)} bytes", f"up to {MAX_SETTINGS_BYTES}")
    try:
        values = json.loads(raw.decode("utf-8") or "{}", object_pairs_hook=_settings_object)
    except UnicodeDecodeError:
        raise InvalidRequest("SETTINGS", "is not UTF-8", "a JSON object") from None
    except (ValueError, RecursionError):
        raise InvalidRequest("SETTINGS", "is not valid JSON", "a JSON object") from None
    if not isinstance(values, dict):
        raise InvalidRequest("SETTINGS", f"is a JSON {type(values).__name__}", "a JSON object")
    try:
        settings = read(given(values, _KEYS), EditSettings)
    except Misread as error:
        raise InvalidRequest(f"SETTINGS.{error.path}", error.problem, error.accepted) from None
    _once("loras", [lora.name for lora in settings.loras])
    for index, control in enumerate(settings.controls):
        if control.end < control.start:
            raise InvalidRequest(
                f"SETTINGS.controls[{index}].end",
                f"is {control.end:g}, before the start",
                f"{control.start:g} to 1",
            )
    return settings


def _once(key: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"SETTINGS.{key}[{index}].name", f"{name} is given twice", "each adapter once"
            )


def dump_settings(settings: EditSettings) -> bytes:
    """The SETTINGS bytes of `settings`: only what differs from the defaults."""
    return _encode({n: v for n, v in _values(settings) if v != _DEFAULTS[n]})


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EditSettings)}
_KEYS = frozenset((*_DEFAULTS, *LoraSetting.__struct_fields__, *ControlSetting.__struct_fields__))
_encode = msgspec.json.Encoder().encode


def _values(settings: EditSettings) -> list[tuple[str, Any]]:
    return [(name, getattr(settings, name)) for name in _DEFAULTS]


class Ranged(Protocol):
    """What says when a control acts."""

    @property
    def scale(self) -> float: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


class Named(Ranged, Protocol):
    """The same of a ControlNet."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Ranged)


def scale_at(control: Ranged, step: int, steps: int) -> float:
    """The scale of step `step` of `steps`, as diffusers' pipelines have it; 0: adds nothing."""
    outside = step / steps < control.start or (step + 1) / steps > control.end
    return 0.0 if outside else control.scale


def acting(controls: Sequence[R], steps: int) -> tuple[R, ...]:
    """Those that add something in any step. The others are as if nobody had asked for them: no
    random number is drawn for them, either, as diffusers would.
    """
    return tuple(
        each for each in controls if any(scale_at(each, step, steps) for step in range(steps))
    )


def shares(controls: Sequence[Named], steps: int) -> tuple[tuple[str, float], ...]:
    """Of those that act, the name and the share of the steps in which it does."""
    found = (
        (each.name, sum(bool(scale_at(each, step, steps)) for step in range(steps)) / steps)
        for each in controls
    )
    return tuple([each for each in found if each[1]])
