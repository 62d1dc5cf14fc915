"""The README's picture of its jobs."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from maskserve_benchmarks.documents.job_pictures import readme_jobs, sheet


def test_the_sheet_has_every_picture_that_the_commands_write(tmp_path: Path) -> None:
    colours = {
        "picture.png": (200, 0, 0),
        "instructed.png": (0, 200, 0),
        "referred.png": (200, 0, 200),
        "edited.png": (0, 0, 200),
        "scene-made.png": (200, 200, 0),
        "scene.png": (0, 200, 200),
    }
    for name, colour in colours.items():
        Image.new("RGB", (128, 128), colour).save(tmp_path / name)
    counted = {colour: count for count, colour in sheet(tmp_path).getcolors(1 << 20) or []}
    assert {counted.get(colour) for colour in colours.values()} == {128 * 128}
    written = {name for name in colours if f"--out {name}" in readme_jobs()}
    assert written == colours.keys() - {"scene-made.png"}  # the workflow's further picture
