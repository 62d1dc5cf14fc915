"""Paint along the rims of a sketch, and enlarge the result."""

from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit, enlarge, outline

with Workflow("outline", "Edits along the outlines of a sketch, then doubles the sides.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    rims = outline(flow.picture("sketch"))
    painted = edit(image, mask, prompt, rims, controls=[{"name": "outline"}])
    flow.gives(image=enlarge(painted))
