"""META of an edit's result, and its timeline for traces."""

from __future__ import annotations

import time
from typing import Any

from maskserve_common.contracts.keys import name_of
from maskserve_common.contracts.request import predicted_steps
from maskserve_common.contracts.settings import IpAdapterSetting
from maskserve_engine.base.timeline import RequestTimeline
from maskserve_engine.planning.refresh_control import fidelity_of
from maskserve_engine.requests.state import ControlUse, LoraUse, RequestState


def final_meta(edit: RequestState, worker: str, model: str) -> dict[str, Any]:
    """Return META of a finished edit, without the keys of the models after the denoiser."""
    now_s, request, plan = time.monotonic(), edit.job.request, edit.plan
    out_of_memory = edit.loads is not None and edit.loads.out_of_memory
    dense_for = plan.dense_for or ("memory" if out_of_memory else "")
    return {
        "event": "final",
        "step": edit.work.steps,
        "request_id": name_of(request.request_id),
        "seed": request.seed,
        "worker": worker,
        "model": model,
        "template_id": request.template_id,
        "cache_tier": plan.tier,
        "cache_bytes": {} if edit.loads is None else dict(edit.loads.loaded),
        "kinds": edit.tally.kinds(),
        **({} if edit.due_ms is None else {"due_ms": edit.due_ms}),
        **({} if edit.drift is None else {"drift": round(edit.drift, 4)}),
        **_reuse(edit),
        **_loras(edit.loras, request.settings.adapters),
        **_controls(edit.controls),
        **_ip_adapter(request.settings.ip_adapter),
        **({"dense_for": dense_for} if dense_for else {}),
        **_dense_steps(edit),
        **_region(edit),
        **_refresh_errors(edit),
        **_work(edit, edit.work.steps),
        "timings_ms": {
            **request.timings_ms,
            "queue": _ms(edit.times.admitted - edit.times.submitted),
            "denoise": _ms(now_s - edit.times.admitted),
            "load_stall": _load_stall_ms(edit),
        },
    }


def timeline(edit: RequestState) -> RequestTimeline:
    steps_done, times = edit.tally.done, edit.times
    return RequestTimeline(
        submitted=times.submitted,
        queued=times.queued,
        admitted=times.admitted,
        first_step=times.first_step,
        ended=time.monotonic(),
        waited=edit.waited,
        about={
            "request_id": edit.request_id,
            "template_id": edit.job.request.template_id,
        },
        work={
            "steps_done": steps_done,
            "row": "cached" if edit.plan.mode == "cached" else "dense",
            **_work(edit, steps_done),
            "load_stall_ms": _load_stall_ms(edit),
        },
    )


def _work(edit: RequestState, done: int) -> dict[str, Any]:
    """Return the figures that META and traces share, after `done` steps."""
    return {
        "steps": edit.work.steps,
        "steps_skipped": predicted_steps(edit.job.request.settings),
        "mask_ratio": round(edit.work.mask_ratio, 6),
        "mask_ring": edit.job.mask_ring,
        "active_tokens": edit.work.active_tokens,
        "total_tokens": edit.work.total_tokens,
        "computed_tokens": edit.tally.computed_tokens,
        "cache": edit.plan.outcome,
        "batch_mean": round(edit.tally.rows_in_batches / done, 3) if done else 0.0,
    }


def _reuse(edit: RequestState) -> dict[str, Any]:
    level = edit.level
    if level is None:
        return {}
    predicted = predicted_steps(edit.job.request.settings)
    return {"reuse": {"level": level.name, "steps_skipped": predicted, "psnr": level.psnr}}


def _loras(use: LoraUse, mode: str) -> dict[str, Any]:
    if not use.effective:
        return {}
    pairs = zip(use.effective, use.digests or ("",) * len(use.effective), strict=True)
    return {
        "adapters": mode,
        "loras": [
            {
                "name": lora.name,
                "digest": digest,
                "scale": lora.scale,
                **({"notes": list(lora.notes)} if lora.notes else {}),
            }
            for lora, digest in pairs
        ],
        "loras_from_step": use.from_step,
        "loras_waited_ms": _ms(use.waited_s),
    }


def _ip_adapter(setting: IpAdapterSetting | None) -> dict[str, Any]:
    return {} if setting is None else {"ip_adapter": {"name": setting.name, "scale": setting.scale}}


def _controls(use: ControlUse) -> dict[str, Any]:
    if not use.requested:
        return {}
    digests = dict(zip((control.version for control in use.effective), use.digests, strict=False))
    return {
        "controls": [
            {
                "name": control.name,
                "digest": digests.get(control.version, ""),
                "scale": control.scale,
                "start": control.start,
                "end": control.end,
                "image": control.image,
                **({} if control.mode is None else {"mode": control.mode}),
            }
            for control in use.requested
        ],
        "controls_waited_ms": _ms(use.waited_s),
        "controls_stalled_ms": _ms(use.stalled_s),
        "controls_stale_steps": use.stale_steps,
    }


def _dense_steps(edit: RequestState) -> dict[str, Any]:
    of_text = {"text_steps": edit.tally.text, "own_bytes": edit.step_cache_bytes}
    if edit.plan.schedule is not None:
        return {"dense_steps": len(edit.tally.dense), "anchors": edit.tally.dense, **of_text}
    first = {"dense_steps": edit.plan.dense_steps} if edit.plan.dense_steps else {}
    return first if edit.plan.schedule_with_template is None else {**first, **of_text}


def _region(edit: RequestState) -> dict[str, Any]:
    if edit.region is None:
        return {}
    share = round(float(edit.region.mean()), 4)
    return {"region": {"share": share, "joined_tokens": edit.joined_tokens}}


def _refresh_errors(edit: RequestState) -> dict[str, Any]:
    mean = edit.refresh_error
    if mean is None or edit.loads is None:
        return {}
    control = None if edit.plan.schedule is None else edit.plan.schedule.control
    floor = {} if control is None else {"reuse_floor": round(fidelity_of(control.tolerance), 2)}
    by_step = {str(step): round(e, 5) for step, e in edit.loads.refresh_errors.items()}
    return {"refresh_error": round(mean, 5), "refresh_errors": by_step, **floor}


def _load_stall_ms(edit: RequestState) -> float:
    return 0.0 if edit.loads is None else _ms(edit.loads.stalled)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
