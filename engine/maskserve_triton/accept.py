"""Check of an edit's settings against the model and its configuration, without its pictures.

A front refuses a setting that the model cannot serve, and never ignores it: a client that asks for
a negative prompt and gets a picture can rely on it.
"""

from __future__ import annotations

import secrets
import time
import uuid

from msgspec.structs import asdict, replace

from maskserve_common.config import Config, model_name
from maskserve_common.contracts.edit_kinds import check_kind
from maskserve_common.contracts.request import (
    AcceptedEdit,
    EditKind,
    Lora,
    ResolvedControl,
    ResolvedIpAdapter,
    check_prompt,
    check_text,
    steps_run,
)
from maskserve_common.contracts.settings import ControlSetting, EditSettings, LoraSetting
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.whole import check_answer_size
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.spec.ip_adapters import IpAdapters
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_lora.catalogue import Catalogue

_SEED_BITS = 32
"""Bits of a drawn seed: short enough to read out, and exact in clients whose numbers are
doubles."""


def accept_edit(
    requested: EditSettings,
    prompt: bytes,
    spec: ModelSpec,
    config: Config,
    catalogue: Catalogue | None = None,
    nets: ControlNets | None = None,
    kind: EditKind = "inpaint",
    ip_adapters: IpAdapters | None = None,
) -> AcceptedEdit:
    """Check an edit without its pictures, fill in the worker's defaults, and note the time.

    Args:
        requested: the client's SETTINGS (`parse_settings`).
        prompt: PROMPT.
        spec: spec of the served model.
        config: configuration of the worker.
        catalogue: catalogue of adapters; None: none are served.
        nets: ControlNets; None: none are served.
        kind: kind of the edit, by its pictures (`contracts.edit_kinds`).
        ip_adapters: IP-Adapters; None: those of the configuration.

    Raises:
        InvalidRequest: naming PROMPT, `SETTINGS.<key>`, or the picture that the model needs.
        AdapterNotFound: naming `SETTINGS.loras[i].name`, `SETTINGS.controls[i].name` or
            `SETTINGS.ip_adapter.name`.
        Overloaded: the adapters' storage does not answer.
    """
    check_settings(requested, spec, config)
    check_kind(
        requested,
        kind,
        spec.edit_kinds,
        references=spec.semantics.reference,
        alpha=spec.latents.alpha,
        regions=spec.region is not None and config.cache.enabled and config.engine.devices == 1,
    )
    if requested.answer_size is not None:
        native, multiple = spec.native_resolution, spec.size_multiple
        check_answer_size(requested.answer_size, native, multiple, config.limits)
    text = check_prompt(prompt, config)
    loras = _versions(requested.loras, catalogue) if requested.loras else ()
    controls = _resolved(requested.controls, nets) if requested.controls else ()
    ip_adapter = None
    if requested.ip_adapter is not None:
        file = (ip_adapters or IpAdapters(config, spec)).find(requested.ip_adapter.name)
        fields = asdict(requested.ip_adapter)
        ip_adapter = ResolvedIpAdapter(**fields, side=file.side, content=file.content)
    return AcceptedEdit(
        text,
        with_defaults(requested, spec, config),
        time.time_ns(),
        kind,
        loras=loras,
        controls=controls,
        ip_adapter=ip_adapter,
    )


def check_settings(settings: EditSettings, spec: ModelSpec, config: Config) -> None:
    """Refuse what this model or worker cannot do.

    Raises:
        InvalidRequest: naming `SETTINGS.<key>`.
    """
    served = model_name(config)
    if settings.model is not None and settings.model != served:
        raise InvalidRequest("SETTINGS.model", "is not served here", served)
    if settings.mask_from is not None:
        problem = "is given, and a worker finds no masks"
        raise InvalidRequest("SETTINGS.mask_from", problem, "a router with a node server that does")
    _check_guidance(settings, spec, config)
    _check_steps(settings, spec, config)
    _check_reuse(settings, spec)
    if settings.reproducible and settings.adapters == "fast":
        raise InvalidRequest(
            "SETTINGS.adapters", "is fast, and the edit is to be reproducible", "exact"
        )
    if settings.output_quality is not None and settings.output_format == "png":
        raise InvalidRequest("SETTINGS.output_quality", "is not a setting of PNG", "jpeg or webp")
    if settings.background == "transparent" and settings.output_format == "jpeg":
        raise InvalidRequest(
            "SETTINGS.background", "is transparent, but JPEG has no alpha", "png or webp"
        )
    if settings.cache == "require" and not config.cache.enabled:
        raise InvalidRequest("SETTINGS.cache", "is require, but caching is off", "auto or off")


def _versions(loras: tuple[LoraSetting, ...], catalogue: Catalogue | None) -> tuple[Lora, ...]:
    """Add the files that the names stand for now."""
    if catalogue is None:
        raise InvalidRequest("SETTINGS.loras", "adapters are not served here", "no loras")
    resolved_loras = []
    for index, lora in enumerate(loras):
        adapter = catalogue.find(lora.name, f"SETTINGS.loras[{index}].name")
        text = any(part.startswith("text_encoder") for part in adapter.parts)
        resolved_loras.append(
            Lora(
                name=lora.name,
                scale=lora.scale,
                version=adapter.version,
                text=text,
                notes=adapter.notes,
            )
        )
    return tuple(resolved_loras)


def _resolved(
    controls: tuple[ControlSetting, ...], nets: ControlNets | None
) -> tuple[ResolvedControl, ...]:
    """Add the ControlNets that the names stand for now, and each control's picture."""
    if nets is None:
        raise InvalidRequest("SETTINGS.controls", "ControlNets are not served here", "no controls")
    resolved_controls = []
    for index, control in enumerate(controls):
        field = f"SETTINGS.controls[{index}]"
        net = nets.find(control.name, f"{field}.name")
        if net.modes and (control.mode is None or control.mode >= net.modes):
            problem = "is missing" if control.mode is None else f"is {control.mode}"
            raise InvalidRequest(f"{field}.mode", problem, f"0 to {net.modes - 1}")
        if not net.modes and control.mode is not None:
            raise InvalidRequest(f"{field}.mode", f"is not a setting of {control.name}", "no mode")
        picture = index if control.image is None else control.image
        fields = {
            **asdict(control), "image": picture, "version": net.version, "fills": net.fills
        }  # fmt: skip
        resolved_controls.append(ResolvedControl(**fields))
    return tuple(resolved_controls)


def _check_guidance(settings: EditSettings, spec: ModelSpec, config: Config) -> None:
    if settings.guidance_scale is not None and spec.guidance == "none":
        raise InvalidRequest(
            "SETTINGS.guidance_scale", "is not an input of this model", "no guidance_scale"
        )
    if spec.guidance == "cfg":
        _check_cfg(settings, spec, config)
    else:
        _check_true_cfg(settings, spec, config)


def _check_cfg(settings: EditSettings, spec: ModelSpec, config: Config) -> None:
    """`guidance_scale` is the scale of classifier-free guidance."""
    if settings.true_cfg_scale is not None and settings.true_cfg_scale > 1:
        raise InvalidRequest(
            "SETTINGS.true_cfg_scale", "is called guidance_scale with this model", "1"
        )
    if settings.negative_prompt is not None:
        if not spec.negative_prompts:
            raise _no_negative_prompt()
        check_text("SETTINGS.negative_prompt", settings.negative_prompt, config)
        if not _two_passes(settings, spec, config):
            raise InvalidRequest(
                "SETTINGS.negative_prompt",
                "has no effect at this guidance_scale",
                f"it with a guidance_scale above {spec.guides_above:g}",
            )


def _check_true_cfg(settings: EditSettings, spec: ModelSpec, config: Config) -> None:
    """Check the scale of true guidance, which may stand beside embedded guidance."""
    if settings.negative_prompt is not None:
        if not spec.true_cfg:
            raise _no_negative_prompt()
        check_text("SETTINGS.negative_prompt", settings.negative_prompt, config)
        if settings.true_cfg_scale is None or settings.true_cfg_scale <= 1:
            raise InvalidRequest(
                "SETTINGS.negative_prompt",
                "has no effect without SETTINGS.true_cfg_scale",
                "it with a true_cfg_scale above 1",
            )
    elif settings.true_cfg_scale is not None and settings.true_cfg_scale > 1:
        if not spec.true_cfg:
            raise InvalidRequest("SETTINGS.true_cfg_scale", "cannot be used by this model", "1")
        raise InvalidRequest(
            "SETTINGS.true_cfg_scale",
            "has no effect without SETTINGS.negative_prompt",
            "it with a negative_prompt, which may be empty",
        )


def _no_negative_prompt() -> InvalidRequest:
    return InvalidRequest(
        "SETTINGS.negative_prompt", "cannot be used by this model", "no negative_prompt"
    )


def _check_steps(settings: EditSettings, spec: ModelSpec, config: Config) -> None:
    steps = _steps(settings, spec, config)
    least, most = spec.least_steps, config.limits.max_steps
    if not least <= steps <= most:
        raise InvalidRequest("SETTINGS.num_inference_steps", f"is {steps}", f"{least} to {most}")
    if spec.sigmas and steps != len(spec.sigmas):
        raise InvalidRequest(
            "SETTINGS.num_inference_steps",
            f"is {steps}, and this model has a schedule of its own",
            f"{len(spec.sigmas)}",
        )
    if (settings.step_interval or 1) > 1 and not spec.predicts_steps:
        raise InvalidRequest("SETTINGS.step_interval", "is not a setting of this model", "1")
    if steps_run(steps, settings.strength, rounds_up=spec.strength_rounds_up) < 1:
        raise InvalidRequest(
            "SETTINGS.strength",
            f"{settings.strength:g} of {steps} steps runs none of them",
            "a strength that leaves at least one step",
        )


def _check_reuse(settings: EditSettings, spec: ModelSpec) -> None:
    if settings.reuse != "elastic":
        if settings.promise and not settings.may_refresh:
            raise InvalidRequest(
                "SETTINGS.reuse_floor",
                "places an edit's refresh steps, and this edit can have none",
                "cache auto or own, without reproducible",
            )
        return
    if not spec.elastic:
        raise InvalidRequest("SETTINGS.reuse", "elastic is not a setting of this model", "exact")
    if settings.reproducible:  # the load decides its level
        raise InvalidRequest(
            "SETTINGS.reuse", "elastic does not go with SETTINGS.reproducible", "exact"
        )
    if settings.reuse_floor is None:
        raise InvalidRequest(
            "SETTINGS.reuse", "elastic needs a floor", "elastic with reuse_floor in dB"
        )


def _steps(settings: EditSettings, spec: ModelSpec, config: Config) -> int:
    requested_steps = settings.num_inference_steps
    return (
        spec.steps_default(config.model.num_inference_steps)
        if requested_steps is None
        else requested_steps
    )


def _guidance(settings: EditSettings, spec: ModelSpec, config: Config) -> float:
    requested_scale = settings.guidance_scale
    return (
        spec.guidance_default(config.model.guidance_scale)
        if requested_scale is None
        else requested_scale
    )


def _two_passes(settings: EditSettings, spec: ModelSpec, config: Config) -> bool:
    """Return whether classifier-free guidance runs the model twice, with a negative prompt."""
    return _guidance(settings, spec, config) > spec.guides_above


def with_defaults(settings: EditSettings, spec: ModelSpec, config: Config) -> EditSettings:
    """`settings` with every default that is the worker's to choose filled in.

    Steps, their interval and the ring are never None afterwards, nor are seed and request id;
    guidance_scale is None only for models that have none.
    """
    guidance = None if spec.guidance == "none" else _guidance(settings, spec, config)
    negative = settings.negative_prompt
    if negative is None and spec.guidance == "cfg" and _two_passes(settings, spec, config):
        negative = ""  # classifier-free guidance leads away from it
    return replace(
        settings,
        negative_prompt=negative,
        num_inference_steps=_steps(settings, spec, config),
        guidance_scale=guidance,
        mask_ring=config.model.mask_ring if settings.mask_ring is None else settings.mask_ring,
        step_interval=settings.step_interval or config.model.step_interval,
        seed=secrets.randbits(_SEED_BITS) if settings.seed is None else settings.seed,
        request_id=settings.request_id or uuid.uuid4().hex,
    )
