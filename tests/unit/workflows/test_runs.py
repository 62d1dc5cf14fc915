"""Runs in any order, with tasks lost, give what a plain interpreter does."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from maskserve_workflows.definition import Workflow, each, repeat
from maskserve_workflows.explanation import explain
from maskserve_workflows.nodes import NODE_TYPES, edit, enlarge, find, generate, shows, split
from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import dump_plan, is_edit, parse_plan
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.run import WorkflowRun, seed_of
from maskserve_workflows.values import Areas, Judgement
from tests.support.examples import examples
from tests.support.workflows import interpret, plans


def node(key, call, inputs):
    """The outputs of a node: text that names all its inputs; an edit's has its seed, too."""
    kind = NODE_TYPES[call.node]
    inputs = {name: value for name, value in inputs.items() if name != "encodings"}  # no difference
    seed = call.settings.get("seed", seed_of(7, key)) if is_edit(call) else ""
    settings = {k: v for k, v in call.settings.items() if k != "cache"}
    description = f"{call.node}{sorted(inputs.items())}{sorted(settings.items())}{seed}"
    digest = hashlib.sha256(description.encode()).hexdigest()[:12]
    outputs = {}
    for name, output_kind in kind.outputs.items():
        number = int(digest, 16)
        if output_kind == "verdict":
            outputs[name] = Judgement(number % 5 / 4, number % 5 > 2)
        elif output_kind == "regions":
            masks = tuple(f"{digest}.{i}" for i in range(number % 4))
            outputs[name] = Areas(masks, tuple(min(i, number // 7 % 2) for i in range(number % 4)))
        else:
            outputs[name] = f"{name} {digest}"
    return outputs


def run_in_any_order(plan, inputs, rng, lose=0.0):
    run, waiting, calls = WorkflowRun(plan, inputs), [], []
    while not run.ended:
        waiting += run.ready()
        assert waiting, "the run stands still"
        task = waiting.pop(rng.randrange(len(waiting)))
        if rng.random() < lose:
            run.retry(task.key)
            continue
        calls.append(task.key)
        run.complete(task.key, node(task.key, task.call, task.inputs))
    assert not waiting
    return run.outputs, calls, run.tries


INPUTS = {"image": "image", "mask": "mask", "name": "name"}


@given(plans(), st.integers(0, 2**32), st.sets(st.sampled_from(sorted(PASSES))))
@examples(150)
def test_a_run_gives_what_the_interpreter_gives(plan, seed, passes):
    compiled_plan = compiled(plan, passes)
    expected = interpret(compiled_plan, INPUTS, node)
    outputs, calls, tries = run_in_any_order(compiled_plan, INPUTS, random.Random(seed), lose=0.2)
    assert outputs == expected
    assert len(calls) == len(set(calls))
    assert set(calls) == set(tries)


@given(plans(), st.sets(st.sampled_from(sorted({*PASSES} - {"beside"}))))
@examples(150)
def test_no_pass_but_side_by_side_changes_an_answer(plan, passes):
    assert interpret(compiled(plan, passes), INPUTS, node) == interpret(plan, INPUTS, node)


@given(plans())
@examples(80)
def test_a_plan_reads_as_it_was_written(plan):
    compiled_plan = compiled(plan)
    assert parse_plan(dump_plan(compiled_plan)) == compiled_plan


def test_a_lost_task_alone_runs_again():
    with Workflow("two") as flow:
        image, mask = flow.picture("image"), flow.mask("mask")
        flow.gives(one=edit(image, mask, "a"), other=enlarge(image))
    run = WorkflowRun(flow.plan, INPUTS)
    first = {task.key: task for task in run.ready()}
    assert set(first) == {"edit-1", "enlarge-1"}
    run.complete("enlarge-1", {"picture": "large"})
    run.retry("edit-1")
    assert run.ready() == [first["edit-1"]]
    assert run.tries == {"edit-1": 2, "enlarge-1": 1}


def test_regions_that_stay_apart_are_painted_at_once_and_composed():
    with Workflow("detail") as flow:
        image = flow.picture("image")
        with each(split(flow.mask("mask")), most=4, carry=image) as iteration:
            iteration.carried = edit(iteration.picture, iteration.mask, "a")
        flow.gives(image=iteration.carried)
    run = WorkflowRun(compiled(flow.plan), {"image": "image", "mask": "mask"})
    (task,) = run.ready()
    run.complete(task.key, {"regions": Areas(("a", "b", "c"), (0, 0, 1))})
    ready_tasks = run.ready()
    assert [task.key for task in ready_tasks] == ["each-1[0]/edit-1", "each-1[1]/edit-1"]
    assert {task.inputs["image"] for task in ready_tasks} == {"image"}
    for task in ready_tasks:
        run.complete(task.key, {"picture": f"made {task.inputs['mask']}"})
    (composed,) = run.ready()
    assert composed.inputs["parts"] == ("made a", "made b")
    run.complete(composed.key, {"picture": "both"})
    (last,) = run.ready()
    assert (last.inputs["image"], last.inputs["mask"]) == ("both", "c")
    one_by_one = compiled(flow.plan, set(PASSES) - {"beside"})
    run = WorkflowRun(one_by_one, {"image": "image", "mask": "mask"})
    run.ready()
    run.complete("split-1", {"regions": Areas(("a", "b", "c"), (0, 0, 1))})
    assert len(run.ready()) == 1


def test_rounds_that_edit_whole_pictures_run_one_after_the_other():
    """Each changes all pixels, so the last would replace what the others painted."""
    with Workflow("whole") as flow:
        image = flow.picture("image")
        with each(split(flow.mask("mask")), most=4, carry=image) as iteration:
            painted = edit(iteration.picture, iteration.mask, "a")
            iteration.carried = edit(painted, None, "sharper")
        flow.gives(image=iteration.carried)
    run = WorkflowRun(compiled(flow.plan), {"image": "image", "mask": "mask"})
    run.ready()
    run.complete("split-1", {"regions": Areas(("a", "b"), (0, 0))})
    assert [task.key for task in run.ready()] == ["each-1[0]/edit-1"]


def test_no_region_leaves_the_picture_and_too_many_are_an_error():
    with Workflow("detail") as flow:
        image = flow.picture("image")
        with each(split(flow.mask("mask")), most=2, carry=image) as iteration:
            iteration.carried = edit(iteration.picture, iteration.mask, "a")
        flow.gives(image=iteration.carried)
    run = WorkflowRun(flow.plan, {"image": "image", "mask": "mask"})
    run.complete("split-1", {"regions": Areas((), ())})
    assert run.outputs == {"image": "image"}
    run = WorkflowRun(flow.plan, {"image": "image", "mask": "mask"})
    with pytest.raises(WorkflowError, match="each-1: 3 regions are too many; accepted: up to 2"):
        run.complete("split-1", {"regions": Areas.of_masks(["a", "b", "c"])})


def test_a_verifier_that_never_agrees_gives_the_best_answer():
    with Workflow("tries") as flow:
        image, mask = flow.picture("image"), flow.mask("mask")
        with repeat(most=3) as tries:
            edited = edit(image, mask, "a")
            verdict = shows(edited, mask, "a")
            tries.until(verdict)
            painted, best_verdict = tries.best(edited), tries.best(verdict)
        flow.gives(image=painted, verdict=best_verdict)
    run = WorkflowRun(flow.plan, {"image": "image", "mask": "mask"})
    for number, score in enumerate((0.2, 0.6, 0.4)):
        run.complete(f"repeat-1[{number}]/edit-1", {"picture": f"picture {number}"})
        run.complete(f"repeat-1[{number}]/shows-1", {"verdict": Judgement(score, False)})
    assert run.outputs == {"image": "picture 1", "verdict": Judgement(0.6, False)}


def test_passes_note_what_they_did():
    with Workflow("five", "Five wishes.") as flow:
        image, name = flow.picture("image"), flow.text("name")
        edits = [
            edit(image, find(image, name), f"wish {i}", loras=[{"name": "hollow"}])
            for i in range(5)
        ]
        enlarge(edits[0])
        flow.gives(**{f"image{i}": picture for i, picture in enumerate(edits)})
    plan = compiled(flow.plan)
    assert [step.node for step in plan.steps].count("find") == 1
    assert [step.node for step in plan.steps].count("encode") == 1
    assert "enlarge" not in [step.node for step in plan.steps]
    assert plan.early == ("hollow",)
    assert {step.settings.get("cache") for step in plan.steps if step.node == "edit"} == {"require"}
    assert {note.partition(":")[0] for note in plan.notes} == {
        "dead", "merge", "encode", "prime", "early"
    }  # fmt: skip


def test_a_reference_is_encoded_once_for_the_edits_that_share_it():
    with Workflow("style", "Things of one style, and two pictures with a lamp.") as flow:
        image, style, lamp = (flow.picture(name) for name in ("image", "style", "lamp"))
        with each(split(flow.mask("mask")), most=3, carry=image) as one:
            one.carried = edit(one.picture, one.mask, "a rose", references=[style])
        pair = [edit(image, None, words, references=[lamp, style]) for words in ("day", "night")]
        alone = edit(pair[0], None, "dusk", references=[image])
        flow.gives(image=one.carried, day=pair[0], night=pair[1], dusk=alone)
    plan = compiled(flow.plan)
    steps = {step.id: step for step in plan.steps}
    encodes = {
        name: step.inputs for name, step in steps.items() if getattr(step, "node", "") == "encode"
    }
    assert encodes == {
        "encode-1": {"references": ("inputs.style",)},
        "encode-2": {"image": "inputs.image", "references": ("inputs.lamp",)},
    }
    [in_turn] = steps["each-1"].body
    assert in_turn.inputs["encodings"] == ("encode-1.encoding",)
    for name in ("edit-2", "edit-3"):
        assert steps[name].inputs["encodings"] == ("encode-1.encoding", "encode-2.encoding")
    assert "encodings" not in steps["edit-4"].inputs
    assert all("cache" not in step.settings for step in (in_turn, steps["edit-2"]))
    assert [note for note in plan.notes if note.startswith("encode")] == [
        "encode: inputs.style is encoded once for 5 edits",
        "encode: inputs.image and inputs.lamp are encoded once for 2 edits",
    ]
    assert parse_plan(dump_plan(plan)) == plan
    assert "references=[inputs.lamp, inputs.style]" in explain(plan)


def test_passes_know_what_an_edit_without_a_mask_shares():
    """Nothing is primed for it; a generation's LoRAs are loaded early; equal seeds are one call."""
    lora = {"loras": [{"name": "hollow"}]}
    with Workflow("made", "From a text, twice.") as flow:
        image, prompt = flow.picture("image"), flow.text("prompt")
        one, same = (generate(prompt, seed=3, **lora) for _ in range(2))
        changed = [edit(image, None, words) for words in ("bluer", "redder")]
        last = generate(prompt, changed[0], **lora)
        flow.gives(one=one, same=same, last=last, other=changed[1])
    plan = compiled(flow.plan)
    assert [step.node for step in plan.steps].count("generate") == 2
    assert all("cache" not in step.settings for step in plan.steps)
    assert plan.early == ("hollow",)
    assert {note.partition(":")[0] for note in plan.notes} == {"merge", "encode", "early"}


def test_a_plan_that_was_changed_by_hand_is_refused():
    with Workflow("one") as flow:
        flow.gives(image=enlarge(flow.picture("image")))
    plan = compiled(flow.plan)
    raw = dump_plan(plan)
    with pytest.raises(WorkflowError, match=r"two\.digest: is not that of the plan"):
        parse_plan(raw.replace(b'"one"', b'"two"'))
    with pytest.raises(WorkflowError, match="version: is 2; accepted: 1"):
        parse_plan(raw.replace(b'"version": 1', b'"version": 2'))
    circle = structs.replace(
        plan, steps=(structs.replace(plan.steps[0], inputs={"picture": "enlarge-1.picture"}),)
    )
    with pytest.raises(WorkflowError, match="comes later or goes in a circle"):
        parse_plan(dump_plan(circle))
