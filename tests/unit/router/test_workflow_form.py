"""A workflow asked for by OpenAI's form: what it takes, and the request that becomes of it."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.openai.form import EditForm, Fields, convert
from maskserve_router.api.openai.form_pictures import _picture_of
from maskserve_router.api.openai.workflow_form import WorkflowForm
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, find, outline, shows
from maskserve_workflows.passes import compiled

with Workflow("rims", "Paints along a sketch.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    rims = outline(flow.picture("sketch"))
    flow.gives(image=edit(image, mask, prompt, rims, controls=[{"name": "outline"}]))
RIMS = compiled(flow.plan)
with Workflow("named", "Repaints what is found.") as flow:
    image, name = flow.picture("image"), flow.text("name")
    flow.gives(image=edit(image, find(image, name), flow.text("prompt")))
NAMED = compiled(flow.plan)
with Workflow("looks", "Only looks.") as flow:
    flow.gives(verdict=shows(flow.picture("image"), flow.mask("mask"), flow.text("prompt")))
LOOKS = compiled(flow.plan)


def form(
    image: bytes = b"image",
    mask: bytes | None = None,
    control: tuple[bytes, ...] = (),
    texts: dict[str, str] | None = None,
    settings: dict[str, object] | None = None,
    **fields: object,
) -> EditForm:
    read = convert({"prompt": "a star", **fields}, Fields)
    return EditForm(read, image, mask, {"strength": 0.5, **(settings or {})}, control, texts or {})


def with_alpha() -> bytes:
    """Transparent, where to edit, at its left half."""
    file = io.BytesIO()
    pixels = np.full((8, 8, 4), 255, np.uint8)
    pixels[:, :4, 3] = 0
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_inputs_are_pictures_in_their_order_a_white_mask_and_texts():
    edit_form = form(mask=with_alpha(), control=(b"sketch",))
    rims_form = WorkflowForm(RIMS, LimitsConfig())
    rims_form.check(edit_form)
    message = rims_form.message(edit_form, {"seed": 7})
    names = [tensor.name for tensor in message.head.inputs]
    tensors = dict(zip(names, map(bytes_tensor.only, message.contents), strict=True))
    assert (bytes(tensors["IMAGE"]), bytes(tensors["SKETCH"])) == (b"image", b"sketch")
    assert bytes(tensors["PROMPT"]) == b"a star"
    white = np.asarray(Image.open(io.BytesIO(tensors["MASK"])))
    assert (white[:, :4] == 255).all()
    assert (white[:, 4:] == 0).all()
    settings = json.loads(bytes(tensors["SETTINGS"]))
    assert (settings["seed"], settings["strength"], settings["mask_mode"]) == (7, 0.5, "white")


def test_texts_beside_the_prompt_are_fields():
    named_form = WorkflowForm(NAMED, LimitsConfig())
    assert named_form.texts == {"name"}
    named_form.check(form(texts={"name": "red star"}))
    message = named_form.message(form(texts={"name": "star"}), {})
    assert [tensor.name for tensor in message.head.inputs] == [
        "IMAGE",
        "NAME",
        "PROMPT",
        "SETTINGS",
    ]


@pytest.mark.parametrize(
    ("plan", "edit_form", "field"),
    [
        (LOOKS, form(), "model"),
        (NAMED, form(), "name"),
        (RIMS, form(mask=b"mask"), "image"),
        (NAMED, form(control=(b"more",), texts={"name": "a"}), "image"),
        (NAMED, form(texts={"name": "a"}, output_format="jpeg"), "output_format"),
        (NAMED, form(texts={"name": "a"}, size="640x640"), "size"),
        (NAMED, form(texts={"name": "a"}, output_compression=80), "output_compression"),
        (NAMED, form(texts={"name": "a"}, mask=b"mask"), "mask"),
        (NAMED, form(texts={"name": "a"}, settings={"mask_mode": "white"}), "mask_mode"),
    ],
)
def test_what_a_workflow_does_not_take_is_refused_by_name(plan, edit_form: EditForm, field: str):
    with pytest.raises(InvalidRequest, match=rf"\] {field}: "):
        WorkflowForm(plan, LimitsConfig()).check(edit_form)


def test_further_outputs_are_of_the_plans_kinds():
    """A text that looks like a number came as a number."""
    response = pb.ModelInferResponse()
    kinds = {"image": "picture", "said": "text", "verdict": "verdict", "rims": "mask"}
    for name, raw in {
        "IMAGE": b"image", "SAID": b"7", "VERDICT": b'{"passed": true}', "RIMS": b"rims",
        "META": json.dumps({"event": "final", "outputs": kinds}).encode(),
    }.items():  # fmt: skip
        bytes_tensor.add_output(response, name, [raw])
    picture, meta = _picture_of(ModelAnswer.parse(response.SerializeToString()))
    assert picture == b"image"
    assert meta["outputs"] == {"said": "7", "verdict": {"passed": True}, "rims": "cmltcw=="}
