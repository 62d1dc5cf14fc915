"""One checked edit on its way through the worker's models: the tensors ACCEPTED and REQUEST, and
what a model's facts and the configuration allow an edit to ask, pictures aside.

A front reads the client's SETTINGS once and refuses what it can. What a model cannot do is refused,
never ignored: a client that asks for a negative prompt and gets a picture must be able to believe
that it was used. From there on the edit travels as a checked record, which msgspec reads in
microseconds.
"""

from __future__ import annotations

import secrets
import time
import uuid
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import asdict, replace

from maskserve_core.adapters.catalogue import Catalogue
from maskserve_core.config import Config, model_name
from maskserve_core.contracts.settings import ControlSetting, EditSettings, LoraSetting
from maskserve_core.errors import InvalidRequest
from maskserve_core.models.control_nets import ControlNets
from maskserve_core.models.facts import ModelFacts


class Lora(LoraSetting, frozen=True):
    """A LoRA of an edit, with the file that its name stands for since the edit was accepted."""

    version: str = ""
    """Which file of that name (`adapters.catalogue.KnownAdapter.version`): all stages take the same
    one.
    """
    text: bool = False
    """Whether it changes text encoders, too: its file is then on the host before the edit leaves
    the front, as an encoder waits for nobody.
    """
    notes: tuple[str, ...] = ()
    """What of the file is left out, or taken for granted (`adapters.lora_plan`)."""


class ResolvedControl(ControlSetting, frozen=True):
    """A control of an edit, with the ControlNet that its name stands for since the edit was
    accepted, and with its picture.
    """

    version: str = ""
    """Which ControlNet of that name (`models.control_nets.KnownControlNet.version`)."""


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
    """Of the answer: what `expand` adds counts."""
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
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part that the model sees; None: all."""
    alpha: bool = False
    """Whether the answer is transparent where the source is."""
    edit_boxes: tuple[tuple[int, int, int, int], ...] = ()
    """Top, left, bottom and right of what the edit mask covers, in pixels of the model's size."""
    warnings: tuple[str, ...] = ()
    """What META tells the client to look at, though the edit runs."""
    timings_ms: dict[str, float] = field(default_factory=dict)

    @property
    def seen_size(self) -> tuple[int, int]:
        """(height, width) of what the model sees, in the source's pixels."""
        return self.source_size if self.window is None else self.window[2:]

    @property
    def used_loras(self) -> tuple[Lora, ...]:
        """Those that change anything."""
        return tuple([lora for lora in self.loras if lora.scale])

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


_SEED_BITS = 32
"""Drawn seeds are short enough to read out, and exact in clients whose numbers are doubles."""


def accept_edit(
    asked: EditSettings,
    prompt: bytes,
    facts: ModelFacts,
    config: Config,
    catalogue: Catalogue | None = None,
    nets: ControlNets | None = None,
) -> AcceptedEdit:
    """Check all of an edit but its pictures, fill in the worker's defaults, and note the time.

    Args:
        asked: what the client's SETTINGS say (`parse_settings`).
        prompt: PROMPT.
        facts: of the served model.
        config: of this worker.
        catalogue: of the adapters; None where none are served.
        nets: ControlNets; None where none are served.

    Raises:
        InvalidRequest: naming PROMPT or `SETTINGS.<key>`.
        AdapterNotFound: naming `SETTINGS.loras[i].name` or `SETTINGS.controls[i].name`.
        Overloaded: the adapters' storage does not answer.
    """
    check_settings(asked, facts, config)
    text = check_prompt(prompt, config)
    loras = _versions(asked.loras, catalogue) if asked.loras else ()
    controls = _resolved(asked.controls, nets) if asked.controls else ()
    settings = with_defaults(asked, facts, config)
    return AcceptedEdit(text, settings, time.time_ns(), loras=loras, controls=controls)


def steps_run(num_inference_steps: int, strength: float, *, rounds_up: bool = True) -> int:
    """Denoising steps that run of a schedule, by diffusers' image-to-image rule.

    Args:
        num_inference_steps: of the whole schedule.
        strength: share of it that is run.
        rounds_up: as ModelFacts.strength_rounds_up.
    """
    initial = min(num_inference_steps * strength, num_inference_steps)
    if not rounds_up:
        return int(initial)
    return num_inference_steps - int(max(num_inference_steps - initial, 0))


def check_settings(settings: EditSettings, facts: ModelFacts, config: Config) -> None:
    """Refuse what this model or worker cannot do.

    Raises:
        InvalidRequest: naming `SETTINGS.<key>`.
    """
    served = model_name(config)
    if settings.model is not None and settings.model != served:
        raise InvalidRequest("SETTINGS.model", "is not served here", served)
    if settings.mask_from is not None:
        told = "is given, and a worker finds no masks"
        raise InvalidRequest("SETTINGS.mask_from", told, "a router with a node server that does")
    _check_guidance(settings, facts, config)
    _check_steps(settings, facts, config)
    _check_skipping(settings, facts)
    _check_reuse(settings, facts)
    if settings.reproducible and settings.adapters == "fast":
        raise InvalidRequest(
            "SETTINGS.adapters", "is fast, and the edit is to be reproducible", "exact"
        )
    if settings.output_quality is not None and settings.output_format == "png":
        raise InvalidRequest("SETTINGS.output_quality", "is no setting of PNG", "jpeg or webp")
    if settings.background == "transparent" and settings.output_format == "jpeg":
        raise InvalidRequest(
            "SETTINGS.background", "is transparent, but JPEG has no alpha", "png or webp"
        )
    if settings.cache == "require" and not config.cache.enabled:
        raise InvalidRequest("SETTINGS.cache", "is require, but caching is off", "auto or off")


def _versions(loras: tuple[LoraSetting, ...], catalogue: Catalogue | None) -> tuple[Lora, ...]:
    """The same, with the files that the names stand for now."""
    if catalogue is None:
        raise InvalidRequest("SETTINGS.loras", "adapters are not served here", "no loras")
    found = []
    for index, lora in enumerate(loras):
        adapter = catalogue.find(lora.name, f"SETTINGS.loras[{index}].name")
        text = any(part.startswith("text_encoder") for part in adapter.parts)
        found.append(
            Lora(
                name=lora.name,
                scale=lora.scale,
                version=adapter.version,
                text=text,
                notes=adapter.notes,
            )
        )
    return tuple(found)


def _resolved(
    controls: tuple[ControlSetting, ...], nets: ControlNets | None
) -> tuple[ResolvedControl, ...]:
    """The same, with the ControlNets that the names stand for now, and each with its picture."""
    if nets is None:
        raise InvalidRequest("SETTINGS.controls", "ControlNets are not served here", "no controls")
    found = []
    for index, control in enumerate(controls):
        field = f"SETTINGS.controls[{index}]"
        net = nets.find(control.name, f"{field}.name")
        if net.modes and (control.mode is None or control.mode >= net.modes):
            said = "is missing" if control.mode is None else f"is {control.mode}"
            raise InvalidRequest(f"{field}.mode", said, f"0 to {net.modes - 1}")
        if not net.modes and control.mode is not None:
            raise InvalidRequest(f"{field}.mode", f"is no setting of {control.name}", "no mode")
        picture = index if control.image is None else control.image
        asked = {**asdict(control), "image": picture, "version": net.version}
        found.append(ResolvedControl(**asked))
    return tuple(found)


def _check_guidance(settings: EditSettings, facts: ModelFacts, config: Config) -> None:
    if settings.guidance_scale is not None and facts.guidance == "none":
        raise InvalidRequest(
            "SETTINGS.guidance_scale", "is no input of this model", "no guidance_scale"
        )
    if facts.guidance == "cfg":
        _check_cfg(settings, facts, config)
    else:
        _check_true_cfg(settings, facts, config)


def _check_cfg(settings: EditSettings, facts: ModelFacts, config: Config) -> None:
    """`guidance_scale` is the scale of classifier-free guidance."""
    if settings.true_cfg_scale is not None and settings.true_cfg_scale > 1:
        raise InvalidRequest(
            "SETTINGS.true_cfg_scale", "is called guidance_scale with this model", "1"
        )
    if settings.negative_prompt is not None:
        if not facts.negative_prompts:
            raise _no_negative_prompt()
        _check_text("SETTINGS.negative_prompt", settings.negative_prompt, config)
        if not _two_passes(settings, facts, config):
            raise InvalidRequest(
                "SETTINGS.negative_prompt",
                "has no effect at this guidance_scale",
                f"a guidance_scale above {facts.guides_above:g} beside it",
            )


def _check_true_cfg(settings: EditSettings, facts: ModelFacts, config: Config) -> None:
    """A second scale, beside embedded guidance or none."""
    if settings.negative_prompt is not None:
        if not facts.true_cfg:
            raise _no_negative_prompt()
        _check_text("SETTINGS.negative_prompt", settings.negative_prompt, config)
        if settings.true_cfg_scale is None or settings.true_cfg_scale <= 1:
            raise InvalidRequest(
                "SETTINGS.negative_prompt",
                "has no effect without SETTINGS.true_cfg_scale",
                "a true_cfg_scale above 1 beside it",
            )
    elif settings.true_cfg_scale is not None and settings.true_cfg_scale > 1:
        if not facts.true_cfg:
            raise InvalidRequest("SETTINGS.true_cfg_scale", "cannot be used by this model", "1")
        raise InvalidRequest(
            "SETTINGS.true_cfg_scale",
            "has no effect without SETTINGS.negative_prompt",
            "a negative_prompt beside it (it may be empty)",
        )


def _no_negative_prompt() -> InvalidRequest:
    return InvalidRequest(
        "SETTINGS.negative_prompt", "cannot be used by this model", "no negative_prompt"
    )


def _check_steps(settings: EditSettings, facts: ModelFacts, config: Config) -> None:
    steps = _steps(settings, facts, config)
    least, most = facts.least_steps, config.limits.max_steps
    if not least <= steps <= most:
        raise InvalidRequest("SETTINGS.num_inference_steps", f"is {steps}", f"{least} to {most}")
    if facts.sigmas and steps != len(facts.sigmas):
        raise InvalidRequest(
            "SETTINGS.num_inference_steps",
            f"is {steps}, and this model has a schedule of its own",
            f"{len(facts.sigmas)}",
        )
    if steps_run(steps, settings.strength, rounds_up=facts.strength_rounds_up) < 1:
        raise InvalidRequest(
            "SETTINGS.strength",
            f"{settings.strength:g} of {steps} steps runs none of them",
            "a strength that leaves at least one step",
        )


def _check_skipping(settings: EditSettings, facts: ModelFacts) -> None:
    if not settings.first_block_threshold:
        return
    if not facts.skips_steps:
        raise InvalidRequest("SETTINGS.first_block_threshold", "is no setting of this model", "0")
    if settings.reproducible:  # which steps are skipped depends on rounding, and so on the batch
        raise InvalidRequest(
            "SETTINGS.first_block_threshold", "does not go with SETTINGS.reproducible", "0"
        )


def _check_reuse(settings: EditSettings, facts: ModelFacts) -> None:
    if settings.reuse != "elastic":
        if settings.reuse_floor is not None:
            raise InvalidRequest(
                "SETTINGS.reuse_floor", "has no effect where reuse is exact", "reuse elastic"
            )
        return
    if not facts.skips_steps:
        raise InvalidRequest("SETTINGS.reuse", "elastic is no setting of this model", "exact")
    if settings.reproducible:  # what is left out depends on the load
        raise InvalidRequest(
            "SETTINGS.reuse", "elastic does not go with SETTINGS.reproducible", "exact"
        )
    if settings.reuse_floor is None:
        raise InvalidRequest(
            "SETTINGS.reuse", "elastic names no floor", "reuse_floor in dB beside it"
        )


def _steps(settings: EditSettings, facts: ModelFacts, config: Config) -> int:
    given = settings.num_inference_steps
    return facts.steps_default(config.model.num_inference_steps) if given is None else given


def _guidance(settings: EditSettings, facts: ModelFacts, config: Config) -> float:
    given = settings.guidance_scale
    return facts.guidance_default(config.model.guidance_scale) if given is None else given


def _two_passes(settings: EditSettings, facts: ModelFacts, config: Config) -> bool:
    """Of an edit with classifier-free guidance: whether it is led away from a negative prompt."""
    return _guidance(settings, facts, config) > facts.guides_above


def check_prompt(raw: bytes, config: Config) -> str:
    """The prompt's text. An empty prompt is allowed: it asks for whatever fits.

    Raises:
        InvalidRequest: naming PROMPT.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("PROMPT", "is not UTF-8", "UTF-8 text") from None
    _check_text("PROMPT", text, config)
    return text


def _check_text(field: str, text: str, config: Config) -> None:
    longest = config.limits.max_prompt_chars
    if len(text) > longest:
        raise InvalidRequest(field, f"is {len(text)} characters long", f"up to {longest}")
    if "\0" in text:
        raise InvalidRequest(field, "holds a NUL character", "text without NUL")


def with_defaults(settings: EditSettings, facts: ModelFacts, config: Config) -> EditSettings:
    """`settings` with every default that is the worker's to choose filled in.

    Steps, ring and threshold are never None afterwards, nor are the seed and the request id;
    guidance_scale is None only for models that have none.
    """
    guidance = None if facts.guidance == "none" else _guidance(settings, facts, config)
    threshold = settings.first_block_threshold
    if threshold is None:
        threshold = 0.0 if settings.reproducible else config.model.first_block_threshold
    negative = settings.negative_prompt
    if negative is None and facts.guidance == "cfg" and _two_passes(settings, facts, config):
        negative = ""  # classifier-free guidance leads away from it
    return replace(
        settings,
        negative_prompt=negative,
        num_inference_steps=_steps(settings, facts, config),
        guidance_scale=guidance,
        mask_ring=config.model.mask_ring if settings.mask_ring is None else settings.mask_ring,
        first_block_threshold=threshold,
        seed=secrets.randbits(_SEED_BITS) if settings.seed is None else settings.seed,
        request_id=settings.request_id or uuid.uuid4().hex,
    )
