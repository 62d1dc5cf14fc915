"""Workflows through OpenAI's edit API: `model` names one, and its inputs are form fields."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import decode_mask, encode_image
from maskserve_common.imaging.masks import selected_pixels
from maskserve_router.api.openai.form import PICTURE, EditForm, ModelForm
from maskserve_router.messages.model_request import ModelRequest
from maskserve_workflows.plan import WorkflowPlan, edit_calls, kind_of_edit


class WorkflowForm(ModelForm):
    """The form of one workflow.

    Args:
        plan: plan of the workflow.
        limits: limits on masks.
    """

    def __init__(self, plan: WorkflowPlan, limits: LimitsConfig) -> None:
        self._plan, self._limits = plan, limits
        texts = {plan_input.name for plan_input in plan.inputs if plan_input.kind == "text"}
        self.texts = frozenset(texts - {"prompt"})
        calls = list(edit_calls(plan.steps))
        self.edits = [call.settings for call in calls]
        self._has_size = any(kind_of_edit(call) != "inpaint" for call in calls)

    def check(self, form: EditForm) -> None:
        plan = self._plan
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
        if form.fields.size != "auto" and not self._has_size:
            problem = f"is {form.fields.size[:20]}, and {plan.name} edits with masks"
            raise InvalidRequest("size", problem, "auto")
        required = sum(plan_input.kind == "picture" for plan_input in plan.inputs)
        count = bool(form.image) + len(form.control)
        if count != required:
            takes = f"{required}, as {plan.name} takes"
            raise InvalidRequest("image", f"is given {count} times", takes)
        for name in sorted(self.texts - form.texts.keys()):
            raise InvalidRequest(name, "is missing", f"a text, as {plan.name} takes")

    def message(self, form: EditForm, more_settings: dict[str, Any]) -> ModelRequest:
        plan = self._plan
        pictures = iter((form.image, *form.control))
        message = ModelRequest(pb.ModelInferRequest(model_name=plan.name))
        for plan_input in plan.inputs:
            if plan_input.kind == "picture":
                value = next(pictures)
            elif plan_input.kind == "mask":
                value = _white_mask(form, self._limits)
            else:
                name = plan_input.name
                text = form.fields.prompt if name == "prompt" else form.texts[name]
                value = text.encode()
            message.add(plan_input.name.upper(), [value])
        settings = {
            **form.settings,
            "mask_mode": "white",
            "size": form.fields.size,
            "background": form.fields.background,
            **more_settings,
        }
        message.add("SETTINGS", [msgspec.json.encode(settings)])
        return message


def _white_mask(form: EditForm, limits: LimitsConfig) -> bytes:
    """Return the form's mask in white. OpenAI's masks edit transparent pixels."""
    mask = decode_mask(form.mask or form.image, "MASK", limits)
    edited = selected_pixels(mask, form.settings.get("mask_mode", "alpha"))
    return encode_image(np.where(edited, np.uint8(255), np.uint8(0)), "png")
