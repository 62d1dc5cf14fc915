"""Repaint what is named, or all but that."""

from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, find, invert

with Workflow("replace", "Repaints the thing of this name.") as replace:
    image, name, prompt = (replace.picture("image"), replace.text("name"), replace.text("prompt"))
    replace.gives(image=edit(image, find(image, name), prompt, mask_dilate=4))

with Workflow("background", "Repaints all but the thing of this name.") as background:
    image, name, prompt = (
        background.picture("image"), background.text("name"), background.text("prompt")
    )  # fmt: skip
    background.gives(image=edit(image, invert(find(image, name)), prompt))
