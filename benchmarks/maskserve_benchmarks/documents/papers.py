"""Write docs/papers.md: the parts of four papers that work here, how, and the missing ones.

python scripts/bench papers            # after a change of docs/papers.toml
python scripts/bench papers --check    # exit code 1 if the document is stale
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.documents.check_flag import check_only
from maskserve_benchmarks.reports import table

TABLE = CHECKOUT / "docs" / "papers.toml"
DOCUMENT = CHECKOUT / "docs" / "papers.md"
Status = Literal["default", "setting", "simulated", "deviates", "missing", "illustration"]
MEANINGS: dict[Status, str] = {
    "default": "works without a setting",
    "setting": "works with a setting",
    "simulated": "not measured; simulated from the named inputs",
    "deviates": "done in another way; the decision is linked",
    "missing": "absent, or not measured",
    "illustration": "makes no claim about a system; not listed below",
}
HEAD = """# What of the papers is here

`python scripts/bench papers` generates this page from [papers.toml](papers.toml). Links lead to the
command, hardware and date of a figure. **No whole edit was timed on a GPU**: measured figures are
from CPUs, except for [steps on one H200](gpu.md#measured-on-an-h200).
"""


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A mechanism or a figure of the paper."""

    part: Annotated[str, Meta(min_length=2)]
    content: Annotated[str, Meta(min_length=2)]
    status: Status
    support: str = ""
    decision: str = ""
    """The document below docs/ that says why the project decided otherwise."""

    def __post_init__(self) -> None:
        if (self.status == "deviates") != bool(self.decision):
            raise ValueError(f"{self.part}: what deviates, and nothing else, has a decision")
        if (self.status == "illustration") == bool(self.support):
            raise ValueError(f"{self.part}: all but illustrations say what is here")


class Paper(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str
    summary: str
    figures: int
    tables: int
    algorithms: int
    parts: list[Part]


class Papers(msgspec.Struct, forbid_unknown_fields=True):
    papers: list[Paper]


def papers() -> list[Paper]:
    """Return the papers of the table.

    Raises:
        msgspec.ValidationError: a part is incomplete.
    """
    return msgspec.toml.decode(TABLE.read_bytes(), type=Papers).papers


def document() -> str:
    counts = {paper.name: Counter(part.status for part in paper.parts) for paper in papers()}
    rows = [
        [meaning, *(count[status] for count in counts.values())]
        for status, meaning in MEANINGS.items()
    ]
    lines = [HEAD, table(["parts", *counts], rows)]
    for paper in papers():
        lines += [f"\n## {paper.name}", f"\n*{paper.title}*", f"\n{paper.summary.strip()}"]
        for status, meaning in MEANINGS.items():
            items = [_item(part) for part in paper.parts if part.status == status]
            if items and status != "illustration":
                lines += [f"\n**{meaning[0].upper()}{meaning[1:]}**\n", *items]
    return "\n".join(lines) + "\n"


def _item(part: Part) -> str:
    why = f"[why]({part.decision})" if part.decision else ""
    location = f"{part.support} ({why})" if why and part.support else part.support or why
    return f"- {part.part}: {part.content}. *Here*: {location}"


def main() -> int:
    if check_only(__doc__):
        return int(DOCUMENT.read_text(encoding="utf-8") != document())
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0
