"""The table of docs/models.md has a row for each model that the family contract loads, and says of
it what its spec does.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_engine.families.licences import published_licence
from maskserve_engine.families.specs import FAMILIES as SERVED
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.model_spec import ModelSpec
from tests.fakes.tiny_families import FAMILIES
from tests.support.family_cases import CASES

ROWS = {
    "FLUX.1 Fill": ("flux-fill",),
    "FLUX.1 dev": ("flux-base",),
    "FLUX.1 schnell": ("flux-base",),
    "FLUX.1 Kontext": ("flux-kontext",),
    "FLUX.2 klein 4B, 9B": ("klein", "klein-base"),
    "FLUX.2 klein 9B-KV": ("klein-kv",),
    "FLUX.2 dev": ("flux2-dev",),
    "FLUX.3 klein, base": ("flux3-klein", "flux3-base"),
    "Qwen-Image": ("qwen-image",),
    "Qwen-Image-Edit": ("qwen-image-edit",),
    "Qwen-Image-Edit-2509, -2511": ("qwen-image-edit-2509", "qwen-image-edit-2511"),
    "Qwen-Image-2.1": ("qwen-image-21",),
    "JoyImage-Edit": ("joyimage-edit",),
    "LongCat-Image": ("longcat-image",),
    "LongCat-Image-Edit, Turbo": ("longcat-image-edit",),
    "Z-Image, Turbo": ("z-image",),
    "Chroma": ("chroma",),
    "Stable Diffusion 3.5 large": ("sd3-large",),
    "Stable Diffusion 3.5 medium": ("sd3-medium",),
    "SDXL, SD 2.1": ("sdxl-base", "sd21-base"),
    "their inpainting models": ("sdxl-fill", "sd21-fill"),
}
"""Cases of the family contract by row."""
DISTILLED = "FLUX.1 schnell"
"""A row whose model is the row's before it without guidance."""


def _table() -> dict[str, dict[str, str]]:
    """The rows by model; classes that are `as` those of another row are spelt out."""
    text = (CHECKOUT / "docs" / "models.md").read_text("utf-8")
    lines = [line for line in text.partition("\n\n| column |")[0].splitlines() if line[:1] == "|"]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table, classes = {}, ""
    for cells in rows:
        row = dict(zip(head, cells, strict=True))
        classes = row["classes"] = classes if row["classes"][:3] == "as " else row["classes"]
        table[row["model"]] = row
    return table


TABLE = _table()


def classes_of(row: dict[str, str]) -> list[str]:
    names = re.findall(r"`(\w+Pipeline)`", row["classes"])
    further = re.findall(r"`(\w+)`", row["classes"].partition("their ")[2])
    return [
        *names,
        *(name.replace("Pipeline", f"{kind}Pipeline") for kind in further for name in names),
    ]


def like(name: str, classes: list[str]) -> list[str]:
    """Those of a row's classes that may stand in the index of a folder of class `name`."""
    parts = "XL", "Distilled"
    return [cls for cls in classes if all((part in cls) == (part in name) for part in parts)]


def source_of(spec: ModelSpec) -> str:
    semantics = spec.semantics
    if semantics.masked_picture:
        return "input"
    if semantics.reference:
        return "exact reference" if semantics.exact else "reference"
    return "blend"


def test_every_row_is_loaded_and_every_class_has_a_row() -> None:
    assert TABLE.keys() == ROWS.keys()
    assert {case for cases in ROWS.values() for case in cases} == CASES.keys()
    classes = {name for row in TABLE.values() for name in classes_of(row)}
    assert classes == {name for family in SERVED.values() for name in family.PIPELINES}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_the_spec_does(name: str, tmp_path: Path) -> None:
    row = TABLE[name]
    for case in ROWS[name]:
        folder = FAMILIES[case](tmp_path / case)
        if name == DISTILLED:
            config = folder / "transformer" / "config.json"
            values = json.loads(config.read_text("utf-8"))
            config.write_text(json.dumps({**values, "guidance_embeds": False}), "utf-8")
        [index] = folder.glob("*model_index.json")
        values = json.loads(index.read_text("utf-8"))
        for cls in like(values["_class_name"], classes_of(row)):
            index.write_text(json.dumps({**values, "_class_name": cls}), "utf-8")
            spec = load_spec(folder)
            kinds = [kind for kind in ("edit", "generate") if kind in spec.edit_kinds]
            takes = ["ControlNets"] * bool(spec.control) + ["IP-Adapters"] * bool(spec.ip_adapters)
            assert row["without a mask"] == (", ".join(kinds) or "none")
            assert row["pictures"] == str(spec.most_pictures)
            assert row["adapters"] == (", ".join(takes) or "none")
            assert row["source"] == source_of(spec)
            assert str(spec.defaults.num_inference_steps) in re.findall(r"\d+", row["steps"])
            assert row["licence"] in published_licence(spec.family, cls)
