"""Run the README's jobs, and show their pictures side by side.

    python scripts/bench job_pictures

It asks the server that the README starts for them, at its port or at $MASKSERVE_URL.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from maskserve_benchmarks.checkout import CHECKOUT

_SOURCE, _MASK = (CHECKOUT / "assets/demo/demo-edit" / name for name in ("source.png", "mask.png"))
_GAP, _LINE = 8, 22
"""Pixels between pictures, and of a line of text."""


def readme_jobs() -> str:
    """Return the README's commands of the jobs."""
    text = (CHECKOUT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    [jobs] = [block for block in blocks if "maskserve generate" in block]
    return str(jobs)


def sheet(folder: Path) -> Image.Image:
    """Return the pictures that the jobs have written to a folder, under the names of the jobs."""
    jobs = {
        "text to image": [_opened(folder / "picture.png")],
        "by instruction": [_opened(folder / "instructed.png")],
        "two pictures": [_opened(folder / "referred.png")],
        "under a mask": [_shaded(), _opened(folder / "edited.png")],
        "workflow": [_opened(folder / name) for name in ("scene-made.png", "scene.png")],
    }
    width, height = jobs["workflow"][0].size
    step = width + _GAP
    whole = Image.new("RGB", (sum(map(len, jobs.values())) * step - _GAP, height + _LINE), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(size=14)
    x = 0
    for job, pictures in jobs.items():
        draw.text((x, 2), job, "black", font)
        for picture in pictures:
            whole.paste(picture, (x, _LINE))
            x += step
    return whole


def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _shaded() -> Image.Image:
    """The source of the masked edit, brighter under the mask."""
    source = _opened(_SOURCE)
    with Image.open(_MASK) as mask:
        bright = Image.blend(source, Image.new("RGB", source.size, "white"), 0.4)
        return Image.composite(bright, source, mask.convert("L"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, default=CHECKOUT / "docs/images/jobs.png", help="PNG file"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (".venv", "assets"):
            (folder / part).symlink_to(CHECKOUT / part)
        subprocess.run(["bash", "-euc", readme_jobs()], cwd=folder, check=True)
        sheet(folder).save(args.out, optimize=True)
    return 0
