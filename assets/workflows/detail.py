"""Repaint everything of a name, each by itself."""

from maskserve_workflows.definition import Workflow, each
from maskserve_workflows.nodes import edit, find, split

with Workflow("detail", "Edits all things of this name, one by one.") as detail:
    image, name, prompt = (detail.picture("image"), detail.text("name"), detail.text("prompt"))
    with each(split(find(image, name)), most=8, carry=image) as one:
        one.carried = edit(one.picture, one.mask, prompt, mask_dilate=4)
    detail.gives(image=one.carried)
