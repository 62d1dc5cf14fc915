"""Repaint what is named, or all but that."""

from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, find, invert

with Workflow("replace", "Finds a thing by its name and edits it.") as replace:
    image, name, prompt = (replace.picture("image"), replace.text("name"), replace.text("prompt"))
    replace.gives(image=edit(image, find(image, name), prompt, mask_dilate=4))

with Workflow("background", "Finds a thing by its name and edits all else.") as background:
    image, name, prompt = (
        background.picture("image"), background.text("name"), background.text("prompt")
    )  # fmt: skip
    background.gives(image=edit(image, invert(find(image, name)), prompt))
