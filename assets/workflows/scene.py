"""Make a picture from a text, and edit it as another text says."""

from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, generate

with Workflow("scene", "Makes a picture from a text, and changes it as told.") as scene:
    made = generate(scene.text("prompt"))
    scene.gives(made=made, image=edit(made, None, scene.text("change")))
