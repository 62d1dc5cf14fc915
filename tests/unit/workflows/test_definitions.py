"""Definitions that cannot run are refused, by node and port."""

from collections.abc import Callable
from pathlib import Path

import pytest

from maskserve_workflows.definition import Workflow, each, repeat
from maskserve_workflows.folder import compile_folder, read_plans
from maskserve_workflows.nodes import (
    best,
    compose,
    crop,
    edit,
    encode,
    enlarge,
    find,
    generate,
    invert,
    outline,
    pad,
    paste,
    shows,
    split,
)
from maskserve_workflows.plan import dump_plan, parse_plan
from maskserve_workflows.ports import WorkflowError

Define = Callable[[Workflow], object]


def _out_of_each(flow):
    with each(2) as iteration:
        inner = enlarge(flow.picture("image"))
    iteration.all(inner)
    return inner


def _no_until(flow):
    with repeat(most=2):
        enlarge(flow.picture("image"))


def _empty(flow):
    with each(3):
        pass


def _no_carried(flow):
    with each(split(flow.mask("mask")), carry=flow.picture("image")) as iteration:
        enlarge(iteration.picture)


def _carried_alone(flow):
    with each(2) as iteration:
        iteration.carried = enlarge(flow.picture("image"))


def _no_mask(flow):
    with each(2) as iteration:
        invert(iteration.mask)


def _no_picture(flow):
    with each(2) as iteration:
        enlarge(iteration.picture)


def _all_of_text(flow):
    text = flow.text("name")
    with each(2) as iteration:
        enlarge(flow.picture("image"))
        iteration.all(text)


def _until_a_picture(flow):
    with repeat(most=2) as tries:
        tries.until(enlarge(flow.picture("image")))


def _carry_a_mask(flow):
    with each(split(flow.mask("mask")), carry=flow.mask("other")) as iteration:
        iteration.carried = enlarge(iteration.picture)


def _carried_mask(flow):
    image = flow.picture("image")
    with each(split(flow.mask("mask")), carry=image) as iteration:
        iteration.carried = invert(iteration.mask)


def _ten_references(flow):
    picture = flow.picture("i")
    edit(picture, None, "a", references=[picture] * 10)


def _nested(flow):
    with Workflow("inner"):
        pass


ILL_TYPED: list[tuple[Define, str]] = [
    (lambda f: enlarge(f.mask("m")), "enlarge-1.picture: takes a picture, and inputs.m is mask"),
    (lambda f: enlarge(f.text("t")), "enlarge-1.picture: takes a picture, and inputs.t is text"),
    (lambda f: invert(f.picture("i")), "invert-1.mask: takes a mask, and inputs.i is picture"),
    (lambda f: split(f.picture("i")), "split-1.mask: takes a mask, and inputs.i is picture"),
    (lambda f: outline(f.mask("m")), "outline-1.picture: takes a picture, and inputs.m is mask"),
    (lambda f: find(f.mask("m"), "a star"), "find-1.picture: takes a picture, and inputs.m is"),
    (lambda f: find(f.picture("i"), f.mask("m")), "find-1.name: takes a text, and inputs.m is"),
    (lambda f: find(f.picture("i"), 3), "find-1.name: is given a int; accepted: what a node"),
    (lambda f: find(f.picture("i")), "find-1: missing a required argument: 'name'"),
    (lambda f: find(f.picture("i"), "a", "b"), "find-1: too many positional arguments"),
    (lambda f: find(f.picture("i"), "a", colour=1), "find-1: got an unexpected keyword argument"),
    (lambda f: find(f.picture("i"), "a", threshold=2), "find-1.threshold: "),
    (lambda f: find(f.picture("i"), "a", threshold="x"), "find-1.threshold: "),
    (lambda f: find(f.picture("i"), None), "find-1.name: is missing; accepted: a text"),
    (lambda f: enlarge("a.png"), "enlarge-1.picture: is given a str; accepted: what a node"),
    (lambda f: enlarge(None), "enlarge-1.picture: is missing; accepted: a picture"),
    (lambda f: edit(f.picture("i"), f.picture("j"), "a"), "edit-1.mask: takes a mask, and"),
    (lambda f: edit(f.picture("i"), f.mask("m"), f.mask("n")), "edit-1.prompt: takes a text, and"),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", f.mask("c")), "edit-1.control: takes a pict"),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", steps=3), "edit-1.steps: "),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", strength=7), "edit-1.strength: "),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", loras=["x"]), "edit-1.loras"),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", seed=-1), "edit-1.seed: "),
    (lambda f: edit(f.picture("i"), f.mask("m"), "a", size="64x64"), "edit-1.size: has no effect"),
    (lambda f: edit(f.picture("i"), None, "a", mask_dilate=4), "edit-1.mask_dilate: has no effect"),
    (lambda f: edit(f.picture("i"), None, "a", cache="own"), "edit-1.cache: is own, and nothing"),
    (lambda f: edit(f.picture("i"), None, None), "edit-1.prompt: is missing; accepted: a text"),
    (lambda f: generate(f.picture("i")), "generate-1.prompt: takes a text, and inputs.i is"),
    (lambda f: generate("a", f.mask("c")), "generate-1.control: takes a picture, and inputs.c is"),
    (lambda f: generate("a", size="64"), "generate-1.size: "),
    (lambda f: generate("a", strength=0.5), "generate-1.strength: has no effect without IMAGE"),
    (lambda f: generate("a", expand=[8, 0, 0, 0]), "generate-1.expand: needs a source, and this"),
    (lambda f: generate("a", template_id="0" * 16), "generate-1.template_id: needs a source, and"),
    (lambda f: shows(f.picture("i"), f.picture("m"), "a"), "shows-1.mask: takes a mask, and"),
    (lambda f: compose(f.picture("i"), f.picture("j")), "compose-1.parts: takes a pictures, and"),
    (lambda f: best(f.picture("i"), f.text("t")), "best-1.pictures: takes a pictures, and"),
    (lambda f: crop(f.picture("i"), f.text("t")), "crop-1.mask: takes a mask, and inputs.t is"),
    (lambda f: paste(f.picture("i"), f.mask("m"), f.mask("n")), "paste-1.part: takes a picture"),
    (lambda f: pad(f.picture("i"), left=-1), "pad-1.left: "),
    (lambda f: pad(f.picture("i"), top=1.5), "pad-1.top: "),
    (
        lambda f: edit(f.picture("i"), None, "a", references=f.picture("j")),
        "edit-1.references: take",
    ),
    (
        lambda f: edit(f.picture("i"), None, "a", references=[f.mask("m")]),
        "edit-1.references[0]: t",
    ),
    (
        lambda f: edit(f.picture("i"), None, "a", references=["b.png"]),
        "edit-1.references[0]: is gi",
    ),
    (_ten_references, "edit-1.references: has 10 pictures; accepted: up to 9"),
    (lambda f: edit([f.picture("i")], None, "a"), "edit-1.image: is given a list; accepted: what"),
    (lambda f: generate("a", references=[f.picture("i")]), "generate-1.references: "),
    (lambda f: encode(None, None, "a"), "encode-1.image: is missing; accepted: a picture, or"),
    (lambda f: compose(f.picture("i"), []), "compose-1.parts: "),
    (_no_until, "repeat-1.until: is missing; accepted: until(verdict)"),
    (_empty, "each-1: has no steps; accepted: at least one"),
    (_no_carried, "each-1.carried: stands alone; accepted: both carry and carried"),
    (_carried_alone, "each-1.carried: stands alone; accepted: both carry and carried"),
    (_no_mask, "each-1.mask: it has no regions; accepted: each(regions)"),
    (_no_picture, "each-1.picture: nothing is carried; accepted: carry=picture"),
    (_all_of_text, "each-1.all: inputs.name is text; accepted: mask, picture, verdict"),
    (_until_a_picture, "repeat-1.until: takes a verdict, and enlarge-1.picture is picture"),
    (_carry_a_mask, "each-1.carry: takes a picture, and inputs.other is mask"),
    (_carried_mask, "each-1.carried: takes a picture, and invert-1.mask is mask"),
    (_nested, "inner: is defined inside another workflow; accepted: outside of it"),
    (lambda f: each(17), "each-1.most: is 17; accepted: 1 to 16"),
    (lambda f: each(3, most=2), "each-1.most: is for regions; accepted: a number alone"),
    (lambda f: repeat(most=0), "repeat-1.most: is 0; accepted: 1 to 16"),
    (lambda f: f.gives(image="x"), "ill.image: is given a str; accepted: what a node or input"),
    (lambda f: f.gives(all=split(f.mask("m"))), "ill.all: split-1.regions is regions; accepted: a"),
    (
        lambda f: f.text("settings"),
        "inputs.settings: every workflow has it; accepted: another name",
    ),
    (
        lambda f: f.gives(meta=f.text("t")),
        "ill.meta: every workflow has it; accepted: another name",
    ),
    (lambda f: (f.mask("m"), f.text("m")), "inputs.m: is given twice; accepted: each name once"),
]


def test_there_are_forty():
    assert len(ILL_TYPED) >= 40


@pytest.mark.parametrize("number", range(len(ILL_TYPED)))
def test_an_ill_typed_definition_is_refused_by_name(number):
    define, words = ILL_TYPED[number]

    def whole():
        with Workflow("ill") as flow:
            define(flow)
            flow.gives(other=flow.picture("other_picture"))

    with pytest.raises(WorkflowError) as refused:
        whole()
    assert words in str(refused.value)
    assert "; accepted: " in str(refused.value)


def _named_edit():
    with Workflow("edit") as flow:
        flow.gives(image=flow.picture("image"))


def _gives_nothing():
    with Workflow("empty"):
        pass


def _inside_of_a_loop():
    with Workflow("ill") as flow:
        flow.gives(image=outline(_out_of_each(flow)))


@pytest.mark.parametrize(
    ("define", "words"),
    [
        (_named_edit, "edit: is the name of a model; accepted: any other"),
        (_gives_nothing, "empty: gives nothing; accepted: at least one output"),
        (lambda: enlarge(None), "enlarge: is called outside of a workflow; accepted: `with"),
        (_inside_of_a_loop, "takes enlarge-1.picture, which is inside of each-1; accepted: what"),
    ],
)
def test_a_workflow_as_a_whole_is_refused_by_name(define, words):
    with pytest.raises(WorkflowError) as refused:
        define()
    assert words in str(refused.value)


def test_a_folder_is_compiled_and_read(tmp_path: Path):
    (tmp_path / "one.py").write_text(
        "from maskserve_workflows.definition import Workflow\n"
        "from maskserve_workflows.nodes import enlarge\n"
        "with Workflow('twice') as flow:\n"
        "    flow.gives(image=enlarge(flow.picture('image')))\n"
    )
    (plan,) = compile_folder(tmp_path)
    (tmp_path / "twice.json").write_bytes(dump_plan(plan))
    assert read_plans(tmp_path) == [plan]
    (tmp_path / "other.json").write_bytes(dump_plan(plan))
    with pytest.raises(WorkflowError, match=r"other\.json: holds twice; accepted: twice\.json"):
        read_plans(tmp_path)
    (tmp_path / "two.py").write_text("1 / 0")
    with pytest.raises(WorkflowError, match=r"two\.py: ZeroDivisionError"):
        compile_folder(tmp_path)
    with pytest.raises(WorkflowError, match="the plan is not valid JSON"):
        parse_plan(b"{")
    with pytest.raises(WorkflowError, match="version: is None; accepted: 1"):
        parse_plan(b"{}")


@pytest.mark.parametrize(
    "ask",
    [
        bool,
        list,
        "{}".format,
        lambda port: port == 1,
        lambda port: port != 1,
        lambda port: port in [1],
    ],
)
def test_a_port_is_asked_for_no_value(ask: Callable[..., object]) -> None:
    """`if find(…)` would compile, and always be true."""
    with pytest.raises(WorkflowError) as refused, Workflow("asks") as flow:  # noqa: PT012
        mask = find(flow.picture("image"), "star")
        ask(mask)
    assert str(refused.value).startswith("find-1.mask: ")
    assert "while the workflow is defined; accepted: " in str(refused.value)
