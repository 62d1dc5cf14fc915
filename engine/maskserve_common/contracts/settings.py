"""The SETTINGS tensor: what a client may ask of one edit (design §3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from maskserve_common.contracts.keys import ADAPTER_NAME, SCOPE, TEMPLATE_ID
from maskserve_common.errors import InvalidRequest
from maskserve_common.reading import Misread, Table, read, require_known

MaskMode = Literal["auto", "white", "alpha", "strength"]
CropMode = Literal["auto", "on", "off"]
Background = Literal["auto", "transparent", "opaque"]
CacheMode = Literal["auto", "own", "off", "require"]
AdapterMode = Literal["exact", "fast"]
OutputFormat = Literal["png", "jpeg", "webp"]
OutputEncoding = Literal["auto", "raw", "base64"]
LateMode = Literal["drop", "finish"]
ReuseMode = Literal["exact", "elastic"]
RegionMode = Literal["off", "auto"]
MASK_MODES: tuple[MaskMode, ...] = get_args(MaskMode)
CACHE_MODES: tuple[CacheMode, ...] = get_args(CacheMode)
CROP_MODES: tuple[CropMode, ...] = get_args(CropMode)
BACKGROUNDS: tuple[Background, ...] = get_args(Background)
LATE_MODES: tuple[LateMode, ...] = get_args(LateMode)
REUSE_MODES: tuple[ReuseMode, ...] = get_args(ReuseMode)
REGION_MODES: tuple[RegionMode, ...] = get_args(RegionMode)
ADAPTER_MODES: tuple[AdapterMode, ...] = get_args(AdapterMode)

MAX_SETTINGS_BYTES = 64 * 1024
MAX_SEED = 2**63 - 1
MAX_DEADLINE_MS = 24 * 3600 * 1000
PRIORITIES = (-100, 100)
MAX_LORAS = 4
MAX_CONTROLS = 3

Pixels = Annotated[int, Meta(ge=0, le=512)]
MAX_MARGIN = 16_384
Margins = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=MAX_MARGIN)], ...],
    Meta(
        min_length=4,
        max_length=4,
        description=f"pixels [left, top, right, bottom], each 0 to {MAX_MARGIN}",
    ),
]
PictureSize = Annotated[
    str,
    Meta(
        pattern=r"\A(?:auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})\Z",
        max_length=11,
        description="auto, or WIDTHxHEIGHT in pixels, as 1024x768",
    ),
]
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
    Meta(  # a router's `scope`, the client's own name, a router's number of the try
        pattern=rf"\A({SCOPE.pattern}!)?[A-Za-z0-9._:/-]{{1,128}}(~[0-9]{{1,4}})?\Z",
        max_length=166,
        description="1 to 128 letters, digits, or any of . _ : / -",
    ),
]


class LoraSetting(Table, frozen=True):
    """A LoRA that an edit asks for."""

    name: AdapterName
    """Name of the adapter, as the worker's catalogue has it; never a path or URL."""
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    """Factor of the adapter's update; negative leads away from it, 0 is none."""


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
    """Name of the ControlNet; never a path or URL."""
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """Factor of the ControlNet's residuals; 0 is none."""
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


class IpAdapterSetting(Table, frozen=True):
    """An IP-Adapter of an edit. It reads the last picture behind the source."""

    name: AdapterName
    """Name of the IP-Adapter; never a path or URL."""
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """Factor of what the picture adds to the prompt; 0 is none."""


_CLICK = "[x, y, 1] on the thing, or [x, y, 0] outside of it"
Click = Annotated[tuple[float, float, Literal[0, 1]], Meta(description=_CLICK)]


class MaskFrom(Table, frozen=True):
    """How to find a mask: by words, or by clicks and a box."""

    text: Annotated[str, Meta(max_length=1000)] = ""
    """The thing's name."""
    points: Annotated[
        tuple[Click, ...], Meta(max_length=64, description=f"up to 64 clicks, each {_CLICK}")
    ] = ()
    """Clicks `[x, y, 1]` on the thing, and `[x, y, 0]` outside of it; pixels of the source."""
    box: Annotated[
        tuple[float, ...], Meta(max_length=4, description="[left, top, right, bottom]")
    ] = ()
    """`[left, top, right, bottom]` round the thing, pixels of the source."""

    def check(self, field: str) -> None:
        """See that it names one thing in one way.

        Args:
            field: that it is; empty: its own fields are the request's.

        Raises:
            InvalidRequest: it does not.
        """
        if bool(self.text) == bool(self.points or self.box):
            problem = "names a thing in two ways" if self.text else "names nothing"
            raise InvalidRequest(field or "text", problem, "text, or points and box")
        if len(self.box) not in (0, 4):
            raise InvalidRequest(f"{field}.box".lstrip("."), f"has {len(self.box)} numbers", "4")


class EditSettings(Table, frozen=True):
    """Settings of one edit; `None` means the model's default."""

    model: Name | None = None
    """Model of the edit; a router chooses a worker by it."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """Seed of the edit's noise. By default the server draws one; META has it."""
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Steps of the full schedule; by default the model's."""
    guidance_scale: Guidance | None = None
    """How closely the edit follows the prompt; by default the model's. Above 1 (Z-Image: 0), a
    model without distilled guidance runs twice in each step."""
    true_cfg_scale: Annotated[float, Meta(ge=1, le=100)] | None = None
    """FLUX.1 (not Fill) and Qwen-Image: how strongly the edit avoids the negative prompt. Above 1,
    the model runs twice in each step."""
    negative_prompt: Text | None = None
    """Things to avoid. FLUX Fill and FLUX.2 take none; FLUX.1 and Qwen-Image need `true_cfg_scale`
    with it."""
    strength: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the schedule that the edit runs, from its end: below 1 the source shows through."""
    mask_mode: MaskMode = "auto"
    """Which pixels are edited. `white`: white ones. `alpha`: transparent ones. `auto`: `alpha` if
    the mask has transparency, else `white`. `strength`: grey is the share of the steps, the last
    ones, that edit a pixel."""
    mask_from: MaskFrom | None = None
    """Find the mask, instead of MASK (docs/api.md#masks-by-name-or-click): `{"text": "the red
    car"}`, or clicks and a box, `{"points": [[x, y, 1]], "box": [left, top, right, bottom]}`."""
    mask_dilate: Pixels = 0
    """Pixels of the source by which the mask grows."""
    mask_feather: Pixels = 0
    """Pixels outside the mask in which the edit fades into the source."""
    mask_ring: Annotated[int, Meta(ge=0, le=64)] | None = None
    """Tokens around the mask that a cached edit computes and does not paste; by default the
    model's."""
    crop_to_mask: CropMode = "auto"
    """`on`: the model sees a window around the mask. `off`: it sees the whole picture. `auto`: the
    window, if the source is larger than the model's area and the window under half of the
    source."""
    crop_padding: Annotated[float, Meta(ge=0, le=4096)] = 0.25
    """Margin of that window: below 1 a share of the mask's longer side, from 1 on pixels."""
    size: PictureSize = "auto"
    """The answer's size without MASK (docs/api.md#without-a-mask-and-without-a-picture)."""
    expand: Margins = (0, 0, 0, 0)
    """Pixels by which the picture grows; the new area is edited."""
    region: RegionMode = "off"
    """`auto`: an edit without MASK finds the tokens that it changes, and computes mostly these
    (docs/api.md#without-a-mask-and-without-a-picture)."""
    step_interval: Annotated[int, Meta(ge=1, le=8)] | None = None
    """Not UNets: after three steps the model runs in one step of this many. A line through its last
    two answers gives the others (TaylorSeer). 1: it runs in all; by default `[model]`'s."""
    output_format: OutputFormat = "png"
    """Encoding of the edited picture."""
    output_quality: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Quality of JPEG (default 95) and WebP (default lossless); not for PNG."""
    background: Background = "auto"
    """The answer to a transparent source. `auto`: transparent outside the mask, in PNG and WebP.
    `transparent`: the same, and JPEG is refused. `opaque`: opaque."""
    output_encoding: OutputEncoding = "auto"
    """`raw` bytes or `base64` text; `auto`: the encoding of MASK."""
    progress: bool = False
    """Send a progress event after every step (`edit_stream`)."""
    preview_every: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Send a preview every so many steps; 0: none (`edit_stream`)."""
    cache: CacheMode = "auto"
    """Source of cached tokens. `auto`: the template, or refresh steps. `own`: refresh steps. `off`:
    none, and the picture is diffusers'. `require`: the template, for which the edit waits; META's
    `dense_for` says if it ran dense nevertheless."""
    reproducible: bool = False
    """Equal requests give equal pixels, bit for bit, at any load and on all workers of one kind.
    The edit waits for its template, or fails."""
    loras: LoraSettings = ()
    """LoRAs of the edit: `name`, and `scale` (1 by default, -100 to 100)."""
    adapters: AdapterMode = "exact"
    """`exact`: steps wait for LoRAs and ControlNets. `fast`: first steps may run without LoRAs, and
    a ControlNet service computes one step ahead. `reproducible` edits are exact."""
    controls: ControlSettings = ()
    """ControlNets of the edit: `name`, `scale` (1 by default, -10 to 10), `start` and `end` (share
    of the steps, 0 to 1), `image` (index in CONTROL; by default its own) and `mode` (of union
    nets)."""
    ip_adapter: IpAdapterSetting | None = None
    """SDXL, SD 2.1 and FLUX.1 (not Fill): the IP-Adapter that reads a further picture, the last
    one: `name`, and `scale` (1 by default, -10 to 10)."""
    private_prompt: bool = False
    """No other API key reuses the embeddings of this prompt."""
    template_id: TemplateId | None = None
    """A registered template or kept result, to edit instead of IMAGE."""
    reference_ids: tuple[TemplateId, ...] = ()
    """Registered templates or kept results that the model sees after IMAGE."""
    keep_result: bool = False
    """Keep the result as a template, named by META's `result_template_id`, until `[limits]
    result_expires_s` after its last use."""
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """Milliseconds after acceptance at which the response is due."""
    on_late: LateMode = "drop"
    """`drop`: a late edit ends with an error, or is refused at once if it cannot be in time.
    `finish`: it is finished."""
    reuse: ReuseMode = "exact"
    """`elastic` (FLUX): an edit that would be late may have a larger `step_interval`, another ring,
    or fewer refresh steps. Needs `reuse_floor`."""
    reuse_floor: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Least quality in the mask, in dB against a dense edit, by which the edit places its refresh
    steps. At 100, or with ControlNets, it runs dense. With `elastic`: least quality of an edit that
    would be late, as measured on the demo models."""
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[1])] = 0
    """Order among a key's waiting edits; each unit is worth five seconds."""
    request_id: RequestId | None = None
    """Name of the edit; by default the server makes one."""

    @property
    def answer_size(self) -> tuple[int, int] | None:
        """(height, width) of `size`; None: it is `auto`."""
        if self.size == "auto":
            return None
        width, height = map(int, self.size.split("x"))
        return height, width

    @property
    def limit_ms(self) -> int | None:
        """Milliseconds after which the client no longer needs the answer; None: never."""
        return self.deadline_ms if self.on_late == "drop" else None

    @property
    def may_refresh(self) -> bool:
        """Whether the edit may have refresh steps: it follows no fixed plan."""
        return self.cache in ("auto", "own") and not self.reproducible

    @property
    def promise(self) -> float:
        """Fidelity that the edit's errors have to keep, in dB; 0: it asks for none."""
        return (self.reuse_floor or 0.0) if self.reuse == "exact" else 0.0

    @property
    def insists(self) -> bool:
        """Whether the edit waits for its template rather than go without the cache."""
        return self.cache == "require" or self.reproducible


ENCODER_SETTINGS: Final = frozenset(
    {
        "model", "guidance_scale", "true_cfg_scale", "negative_prompt", "mask_mode", "mask_dilate",
        "mask_feather", "crop_to_mask", "crop_padding", "size", "expand", "reproducible", "loras",
        "ip_adapter", "private_prompt", "template_id", "reference_ids",
    }
)  # fmt: skip
"""Settings on which the outputs of the encoder depend."""
REFERENCE_SETTINGS: Final = frozenset({"model", "private_prompt", "reproducible"})
"""Those on which the encodings of references depend."""


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
_REMOVED: Final = {
    "first_block_threshold": "step_interval, which saves as much and changes less of the picture"
}
"""Settings of earlier versions -> what to use in their place."""


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
    for key in sorted(_REMOVED.keys() & values.keys()):
        raise InvalidRequest(f"SETTINGS.{key}", "is no setting any more", _REMOVED[key])
    try:
        settings = read(require_known(values, _KEYS), EditSettings)
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
    """A control's scale and the range of steps in which it acts."""

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
    """Return the controls that add something in any step. The others are ignored: no random number
    is drawn for them, as in diffusers.
    """
    return tuple(
        control
        for control in controls
        if any(scale_at(control, step, steps) for step in range(steps))
    )


def shares(controls: Sequence[Named], steps: int) -> tuple[tuple[str, float], ...]:
    """Return the name of each control that acts, with the share of the steps in which it does."""
    control_shares = (
        (item.name, sum(bool(scale_at(item, step, steps)) for step in range(steps)) / steps)
        for item in controls
    )
    return tuple([item for item in control_shares if item[1]])
