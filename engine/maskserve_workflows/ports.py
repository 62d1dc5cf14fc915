"""Types of the values that flow between nodes.

In a definition, a value is a handle of one of these classes. In a plan it is a reference, as text,
and its kind is the class's. In a run, values are plain data (`values.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NoReturn


class WorkflowError(ValueError):
    """A definition or plan that cannot run: one sentence that names node and port."""


@dataclass(frozen=True, slots=True, eq=False)
class Port:
    """A node's output, or an input of the workflow.

    Its value is known only when the workflow runs, so a definition cannot read it.
    """

    ref: str
    """Reference in the form that a plan uses: `inputs.image`, `find-1.mask`."""
    kind: ClassVar[str] = ""

    def __bool__(self) -> NoReturn:
        self._refuse("has no truth value")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compares with nothing")

    def __iter__(self) -> NoReturn:
        self._refuse("lists nothing")

    def __format__(self, form: str) -> NoReturn:
        self._refuse("is not text")

    def _refuse(self, why: str) -> NoReturn:
        raise WorkflowError(
            f"{self.ref}: {why} while the workflow is defined; accepted: as an input of a node, "
            "`repeat` with `until(verdict)`, `each(regions)`"
        )


class Picture(Port):
    """An image."""

    kind = "picture"


class Mask(Port):
    """A region of a picture: white."""

    kind = "mask"


class Words(Port):
    """A prompt, or the name of a thing."""

    kind = "text"


class Verdict(Port):
    """A judgement of a picture: passed or not, and a score."""

    kind = "verdict"


class Regions(Port):
    """A list of masks."""

    kind = "regions"


class Pictures(Port):
    """A list of pictures."""

    kind = "pictures"


class Verdicts(Port):
    """A list of verdicts."""

    kind = "verdicts"


class Encoding(Port):
    """Outputs of the encoder for a picture and a prompt."""

    kind = "encoding"


class Encodings(Port):
    """A list of encodings."""

    kind = "encodings"


KINDS: Final[dict[str, type[Port]]] = {
    port.kind: port
    for port in (
        Picture, Mask, Words, Verdict, Regions, Pictures, Verdicts, Encoding, Encodings
    )
}  # fmt: skip
MANY: Final = {"mask": "regions", "picture": "pictures", "verdict": "verdicts"}
"""Kind → the kind of a list of such values, which a loop gives."""
ELEMENT: Final = {many: one for one, many in MANY.items()} | {"encodings": "encoding"}
"""Kind of a list → the kind of its values."""
