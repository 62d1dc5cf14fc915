"""The SETTINGS tensor: what a client may ask of one edit (design §3)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from maskserve_core.adapters.storage import NAME as ADAPTER_NAME
from maskserve_core.contracts.keys import TEMPLATE_ID
from maskserve_core.contracts.scopes import SCOPE
from maskserve_core.errors import InvalidRequest

MASK_MODES = ("auto", "white", "alpha")
OUTPUT_FORMATS = ("png", "jpeg", "webp")
OUTPUT_ENCODINGS = ("auto", "raw", "base64")
CACHE_MODES = ("auto", "off", "require")
ADAPTER_MODES = ("exact", "fast")

MAX_SETTINGS_BYTES = 64 * 1024
MAX_SEED = 2**63 - 1
MAX_DEADLINE_MS = 24 * 3600 * 1000
PRIORITIES = (-100, 100)
MAX_LORAS = 4
LORA_SCALES = (-100.0, 100.0)
MAX_RING = 64
"""Tokens: the whole of a 1024x1024 picture's grid from anywhere in it."""
MAX_THRESHOLD = 10.0
"""Of relative changes of a first block; beyond 1 nearly every step is left out."""
_REQUEST_ID = re.compile(rf"({SCOPE.pattern}!)?[A-Za-z0-9._:/-]{{1,128}}")
"""A router's scope (`scopes`), then the client's own name."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA of an edit."""

    name: str
    """Of the adapter, as the worker's catalogue has it; never a path or URL."""
    scale: float = 1.0
    """What its update is multiplied by; negative leads away from it, 0 is none."""
    version: str = ""
    """Which file of that name (`adapters.catalogue.Adapter.version`), so that all stages take the
    same one; the front fills it in.
    """
    text: bool = False
    """Whether it changes text encoders, too, likewise: its file is then on the host before the edit
    leaves the front, as an encoder waits for nobody.
    """


@dataclass(frozen=True, slots=True)
class EditSettings:
    """Settings of one edit; `None` means the model's default."""

    model: str | None = None
    """Name of the model the client expects; another name than the worker's is refused."""
    seed: int | None = None
    """Seed of the request's noise; drawn by the server and reported when absent."""
    num_inference_steps: int | None = None
    """Steps of the full schedule; `strength` below 1 runs fewer of them."""
    guidance_scale: float | None = None
    """Embedded guidance (FLUX), or the scale of classifier-free guidance (UNets)."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of FLUX with a negative prompt; 1 is off."""
    negative_prompt: str | None = None
    """What to steer away from; only with models that run classifier-free guidance."""
    strength: float = 1.0
    """Share of the schedule that is run, in (0, 1]."""
    mask_mode: str = "auto"
    """`white`: white edits; `alpha`: transparent edits; `auto`: alpha if there is any."""
    mask_dilate: int = 0
    """Pixels by which the mask grows, at the source's size."""
    mask_feather: int = 0
    """Pixels over which the edit fades into the source."""
    mask_ring: int | None = None
    """Tokens round the mask that a cached edit computes too; what is pasted stays the mask's."""
    first_block_threshold: float | None = None
    """Change of what the first block adds below which a step leaves the other blocks out
    (FirstBlockCache); 0 leaves out none."""
    output_format: str = "png"
    """Encoding of the answer."""
    output_encoding: str = "auto"
    """`raw` bytes or `base64` text; `auto`: as MASK came, which JSON carries as text only."""
    progress: bool = False
    """Send a progress event after every step (`edit_stream`)."""
    preview_every: int = 0
    """Send a preview image every so many steps; 0 sends none (`edit_stream`)."""
    cache: str = "auto"
    """Whether the template's cached activations may be used; `require` waits for priming."""
    reproducible: bool = False
    """Follow a fixed plan in steps of its own: equal requests give equal pixels at any load."""
    loras: tuple[Lora, ...] = ()
    """LoRAs whose updates are added up, each with its own scale."""
    adapters: str = "exact"
    """`exact`: no step runs before the LoRAs are there; `fast`: the first steps may run without."""
    template_id: str | None = None
    """A registered template to edit in place of IMAGE."""
    deadline_ms: int | None = None
    """Give up after this many milliseconds."""
    priority: int = 0
    """Higher runs first."""
    request_id: str | None = None
    """Name for cancel and logs; made by the server when absent."""

    @property
    def insists(self) -> bool:
        """Whether the edit waits for its template rather than go without the cache."""
        return self.cache == "require" or self.reproducible


Check = Callable[[str, Any], Any]


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"{_show(value)} is not a boolean", "true or false")
    return value


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(name, f"{_show(value)} is not an integer", f"{low} to {high}")
        if not low <= value <= high:
            raise InvalidRequest(name, f"{_show(value)} is out of range", f"{low} to {high}")
        return value

    return check


def _number(low: float, high: float, *, above_low: bool = False) -> Check:
    accepted = f"a number {'above' if above_low else 'from'} {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(name, f"{_show(value)} is not a number", accepted)
        # Python integers have no bound; compare before converting, since float() may overflow.
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(name, f"{value} is not a finite number", accepted)
        if not low <= value <= high or (above_low and value == low):
            raise InvalidRequest(name, f"{_show(value)} is out of range", accepted)
        return float(value)

    return check


def _choice(options: tuple[str, ...]) -> Check:
    accepted = ", ".join(options)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in options:
            raise InvalidRequest(name, f"{_show(value)} is not one of them", accepted)
        return value

    return check


def _string(pattern: re.Pattern[str] | None, max_chars: int, accepted: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(name, f"{_show(value)} is not a string", accepted)
        if len(value) > max_chars:
            raise InvalidRequest(name, f"is {len(value)} characters long", accepted)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest(name, "holds lone surrogates, not text", "Unicode text") from None
        if pattern is not None and pattern.fullmatch(value) is None:
            raise InvalidRequest(name, f"{_show(value)} has another form", accepted)
        return value

    return check


_check_scale = _number(*LORA_SCALES)
_check_adapter = _string(ADAPTER_NAME, 128, "1 to 128 letters, digits, or any of . _ -")


def _loras(field: str, value: Any) -> tuple[Lora, ...]:
    """A list of objects with `name` and, if it is not 1, `scale`; each name once."""
    accepted = f'up to {MAX_LORAS} objects such as {{"name": "hollow", "scale": 0.8}}'
    if not isinstance(value, list):
        raise InvalidRequest(field, f"{_show(value)} is not a list", accepted)
    if len(value) > MAX_LORAS:
        raise InvalidRequest(field, f"has {len(value)} entries", accepted)
    found: dict[str, Lora] = {}
    for index, each in enumerate(value):
        own = f"{field}[{index}]"
        if not isinstance(each, dict):
            raise InvalidRequest(own, f"{_show(each)} is not an object", accepted)
        unknown = sorted(set(each) - {"name", "scale"})
        if unknown:
            raise InvalidRequest(f"{own}.{unknown[0][:40]}", "is not a known key", "name, scale")
        if each.get("name") is None:
            raise InvalidRequest(f"{own}.name", "is missing", "the name of an adapter")
        name = _check_adapter(f"{own}.name", each["name"])
        if name in found:
            raise InvalidRequest(f"{own}.name", f"{name} is given twice", "each adapter once")
        scale = each.get("scale")
        found[name] = Lora(name, 1.0 if scale is None else _check_scale(f"{own}.scale", scale))
    return tuple(found.values())


_CHECKS: dict[str, Check] = {
    "model": _string(None, 256, "a model name of up to 256 characters"),
    "seed": _integer(0, MAX_SEED),
    "num_inference_steps": _integer(1, 1000),
    "guidance_scale": _number(0.0, 1000.0),
    "true_cfg_scale": _number(1.0, 100.0),
    "negative_prompt": _string(None, 32_000, "text of up to 32000 characters"),
    "strength": _number(0.0, 1.0, above_low=True),
    "mask_mode": _choice(MASK_MODES),
    "mask_dilate": _integer(0, 512),
    "mask_feather": _integer(0, 512),
    "mask_ring": _integer(0, MAX_RING),
    "first_block_threshold": _number(0.0, MAX_THRESHOLD),
    "output_format": _choice(OUTPUT_FORMATS),
    "output_encoding": _choice(OUTPUT_ENCODINGS),
    "progress": _boolean,
    "preview_every": _integer(0, 1000),
    "cache": _choice(CACHE_MODES),
    "reproducible": _boolean,
    "loras": _loras,
    "adapters": _choice(ADAPTER_MODES),
    "template_id": _string(TEMPLATE_ID, 64, "16 to 64 lower-case hexadecimal digits"),
    "deadline_ms": _integer(1, MAX_DEADLINE_MS),
    "priority": _integer(*PRIORITIES),
    "request_id": _string(_REQUEST_ID, 161, "1 to 128 letters, digits, or any of . _ : / -"),
}


_DEFAULTS = tuple((f.name, f.default) for f in fields(EditSettings))


def _show(value: Any) -> str:
    """A value as it may be repeated in a message: short, on one line."""
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge integer"
    return shown if len(shown) <= 60 else shown[:57] + "..."


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

    `null` stands for "not given". JSON's NaN and Infinity are refused by the range checks, and an
    unknown or repeated key is an error: a misspelt setting must not be ignored.

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
    unknown = sorted(set(values) - set(_CHECKS))
    if unknown:
        raise InvalidRequest(
            f"SETTINGS.{unknown[0][:40]}", "is not a known setting", ", ".join(sorted(_CHECKS))
        )
    checked = {
        key: _CHECKS[key](f"SETTINGS.{key}", value)
        for key, value in values.items()
        if value is not None
    }
    return EditSettings(**checked)


def dump_settings(settings: EditSettings) -> bytes:
    """The SETTINGS bytes of `settings`: only what differs from the defaults."""
    values = {
        name: value for name, default in _DEFAULTS if (value := getattr(settings, name)) != default
    }
    if settings.loras:
        values["loras"] = [{"name": lora.name, "scale": lora.scale} for lora in settings.loras]
    return json.dumps(values).encode()
