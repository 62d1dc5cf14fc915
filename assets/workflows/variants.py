"""Paint several pictures, and answer with the best."""

from maskserve_workflows.definition import Workflow, each, repeat
from maskserve_workflows.nodes import best, edit, shows

with Workflow(
    "variants", "Takes the best of eight edits; makes eight more while none passes."
) as variants:
    image, mask, prompt = (
        variants.picture("image"),
        variants.mask("mask"),
        variants.text("prompt"),
    )
    with repeat(most=3) as tries:
        with each(8) as one:
            painted = edit(image, mask, prompt)
            pictures, verdicts = one.all(painted), one.all(shows(painted, mask, prompt))
        chosen = best(pictures, verdicts)
        tries.until(chosen.verdict)
        picture, verdict = tries.best(chosen.picture), tries.best(chosen.verdict)
    variants.gives(image=picture, verdict=verdict)
