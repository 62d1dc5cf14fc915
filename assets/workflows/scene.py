"""Make a picture from a text, and edit it as another text says."""

from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, generate

with Workflow("scene", "Makes a picture of a text, then edits it by an instruction.") as scene:
    made = generate(scene.text("prompt"))
    scene.gives(made=made, image=edit(made, None, scene.text("change")))
