"""Workflows through OpenAI's edit API: `model` names one, and its inputs are form fields."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import decode_mask, encode_image
from maskserve_common.imaging.masks import selected
from maskserve_router.api.openai.form import EditForm
from maskserve_router.messages.model_request import ModelRequest
from maskserve_workflows.plan import WorkflowPlan

PICTURE = "image"
"""Name of the output that becomes the answer's picture."""


def texts_of(plan: WorkflowPlan) -> frozenset[str]:
    """Return the text inputs that are form fields of their own."""
    return frozenset(plan_input.name for plan_input in plan.inputs if plan_input.kind == "text") - {
        "prompt"
    }


def check_form(plan: WorkflowPlan, form: EditForm) -> None:
    """Check that a form fits a workflow.

    Raises:
        InvalidRequest: naming the field.
    """
    if PICTURE not in plan.outputs:
        problem = f"{plan.name} gives no {PICTURE}"
        raise InvalidRequest("model", problem, "a workflow that gives one, or KServe's API")
    if form.fields.output_format != "png":
        raise InvalidRequest("output_format", f"is {form.fields.output_format}", "png")
    if form.fields.output_compression is not None:
        problem = f"is {form.fields.output_compression}, and {plan.name} answers with PNG"
        raise InvalidRequest("output_compression", problem, "none")
    if not any(plan_input.kind == "mask" for plan_input in plan.inputs):
        for name, present in (
            ("mask", form.mask is not None),
            ("mask_mode", "mask_mode" in form.settings),
        ):
            if present:
                takes = ", ".join(plan_input.name for plan_input in plan.inputs)
                raise InvalidRequest(name, f"is not an input of {plan.name}", takes)
    if form.fields.size != "auto":
        raise InvalidRequest("size", f"is {form.fields.size[:20]}", "auto with a workflow")
    required_pictures = sum(plan_input.kind == "picture" for plan_input in plan.inputs)
    picture_count = bool(form.image) + len(form.control)
    if picture_count != required_pictures:
        raise InvalidRequest(
            "image", f"is given {picture_count} times", f"{required_pictures}, as {plan.name} takes"
        )
    for name in sorted(texts_of(plan) - form.texts.keys()):
        raise InvalidRequest(name, "is missing", f"a text, as {plan.name} takes")


def workflow_message(
    plan: WorkflowPlan, form: EditForm, more_settings: dict[str, Any], limits: LimitsConfig
) -> ModelRequest:
    """Return the request to the workflow's model.

    Args:
        plan: plan of the workflow.
        form: a form that passed `check_form`.
        more_settings: settings that the router adds.
        limits: limits on the mask.

    Raises:
        InvalidRequest: the mask cannot be used.
    """
    pictures = iter((form.image, *form.control))
    message = ModelRequest(pb.ModelInferRequest(model_name=plan.name))
    for plan_input in plan.inputs:
        if plan_input.kind == "picture":
            value = next(pictures)
        elif plan_input.kind == "mask":
            value = _white_mask(form, limits)
        else:
            text = (
                form.fields.prompt if plan_input.name == "prompt" else form.texts[plan_input.name]
            )
            value = text.encode()
        message.add(plan_input.name.upper(), [value])
    settings = {
        **form.settings,
        "mask_mode": "white",
        "background": form.fields.background,
        **more_settings,
    }
    message.add("SETTINGS", [msgspec.json.encode(settings)])
    return message


def _white_mask(form: EditForm, limits: LimitsConfig) -> bytes:
    """Return the form's mask in white. OpenAI's masks edit transparent pixels."""
    mask = decode_mask(form.mask or form.image, "MASK", limits)
    edited = selected(mask, form.settings.get("mask_mode", "alpha"))
    return encode_image(np.where(edited, np.uint8(255), np.uint8(0)), "png")
